"""Image files in a folder or a tar archive, decoded once and cached as arrays.

Layout: ``train/CLASS/NAME.jpg`` and ``test/CLASS/NAME.jpg`` (torchvision's ImageFolder), in an archive also below
further folders. Archives are read as a stream and decoded in memory: no member is ever written to a path that it names.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image, UnidentifiedImageError
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from recipes.tasks.images import ImageSet
from recipes.tasks.sources import DataError, store_arrays

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
PICTURES = (".jpg", ".jpeg", ".png")
SPLITS = ("train", "test")

#: Bytes of one image file above which an archive is refused: small images are meant, and memory is finite.
MAX_FILE_BYTES = 16 * 2**20

File = tuple[str, str, bytes]  # split, class, contents


def is_archive(path: Path) -> bool:
    """Whether the name says that this is a tar archive."""
    return path.name.lower().endswith(ARCHIVES)


def load_cached(path: Path, cache_dir: Path, name: str, image_size: int, channels: int) -> ImageSet:
    """Images of a folder or archive: from the cache, or decoded now and put there.

    The cache file's name holds a digest of the path, size, time of change and the wanted shape.

    Raises:
        DataError: the files are not images in the expected layout, or the cache cannot be written.
    """
    cached = cache_dir / f"{path.name.split('.')[0]}-{_fingerprint(path, image_size, channels)}.npz"
    if not cached.exists():
        images = decode(path, name, image_size, channels)
        store_arrays(
            cached,
            train_images=images.train_images,
            train_labels=images.train_labels,
            test_images=images.test_images,
            test_labels=images.test_labels,
            classes=np.array(images.classes),
        )
    try:
        with np.load(cached, allow_pickle=False) as arrays:
            classes = tuple(str(label) for label in arrays["classes"])
            parts = {key: arrays[key] for key in ("train_images", "train_labels", "test_images", "test_labels")}
            return ImageSet(name, **parts, classes=classes)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{cached} cannot be read ({error}); delete it and it is made again") from error


def decode(path: Path, name: str, image_size: int, channels: int) -> ImageSet:
    """Decode all images of a folder or archive to uint8 (N, image_size, image_size, channels).

    Images of another size are resized. Classes are sorted by name. Images are in a fixed random order: in that of the
    files, the first batches of an evaluation would hold one class only.

    Raises:
        DataError: see `load_cached`.
    """
    images: dict[tuple[str, str], list[np.ndarray]] = {}
    files = _files_of_archive(path) if is_archive(path) else _files_of_folder(path)
    # To stderr: standard output holds the run's own lines.
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"decoding {path.name} (once)", total=None)
        for split, label, contents in files:
            images.setdefault((split, label), []).append(_picture(contents, f"{split}/{label}", image_size, channels))
            progress.advance(task)
    classes = sorted({label for _, label in images})
    missing = [f"{split}/{label}" for split in SPLITS for label in classes if (split, label) not in images]
    if missing or not classes:
        what = f"no images in {', '.join(missing[:5])}" if classes else "no images"
        raise DataError(f"{path}: {what}; expected train/CLASS/*.jpg and test/CLASS/*.jpg with the same classes")
    arrays = {}
    for split in SPLITS:
        counts = [len(images[split, label]) for label in classes]
        order = np.random.default_rng(0).permutation(sum(counts))
        arrays[f"{split}_images"] = np.stack([image for label in classes for image in images.pop((split, label))])[
            order
        ]
        arrays[f"{split}_labels"] = np.repeat(np.arange(len(classes)), counts).astype(np.int64)[order]
    return ImageSet(name, **arrays, classes=tuple(classes))


def _files_of_archive(path: Path) -> Iterator[File]:
    try:
        # "r|*" reads forwards only: an archive is decompressed once, whatever the order of its members.
        with tarfile.open(path, mode="r|*") as archive:
            for member in archive:
                parts = PurePosixPath(member.name).parts
                if not member.isfile() or len(parts) < 3 or parts[-3] not in SPLITS or not _is_picture(parts[-1]):
                    continue
                if member.size > MAX_FILE_BYTES:
                    raise DataError(f"{path}: {member.name} has {member.size} bytes, more than {MAX_FILE_BYTES}")
                stream = archive.extractfile(member)
                assert stream is not None  # a regular file, tested above
                yield parts[-3], parts[-2], stream.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{path} cannot be read as a tar archive ({error}); is the download complete?") from error


def _files_of_folder(path: Path) -> Iterator[File]:
    for split in SPLITS:
        for file in _pictures_below(path / split):
            if file.stat().st_size > MAX_FILE_BYTES:
                raise DataError(f"{file} has {file.stat().st_size} bytes, more than {MAX_FILE_BYTES}")
            yield split, file.parent.name, file.read_bytes()


def _pictures_below(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*/*") if _is_picture(file.name) and file.is_file())


def _is_picture(name: str) -> bool:
    # macOS archives carry "._NAME.jpg" companions that are no images.
    return name.lower().endswith(PICTURES) and not name.startswith(".")


def _picture(contents: bytes, where: str, size: int, channels: int) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(contents), formats=("JPEG", "PNG")) as picture:
            image = picture.convert("RGB" if channels == 3 else "L")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise DataError(f"an image of {where} cannot be decoded: {error}") from error
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image, dtype=np.uint8).reshape(size, size, channels)


def _fingerprint(path: Path, image_size: int, channels: int) -> str:
    """Digest of what decoding depends on; of a folder, of the names, sizes and times of all its files."""
    files = [path] if path.is_file() else [file for split in SPLITS for file in _pictures_below(path / split)]
    digest = hashlib.blake2b(f"{path.resolve()} {image_size} {channels}".encode(), digest_size=8)
    for file in files:
        status = file.stat()
        digest.update(f"\n{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()
