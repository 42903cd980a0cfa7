"""Small images in a folder or in a tar archive, decoded to arrays.

The layout is ``train/CLASS/NAME.jpg`` and ``test/CLASS/NAME.jpg`` (torchvision's ImageFolder); in an archive these
folders may be below further folders. An archive is read as a stream and decoded in memory: no member is ever written to
the path that it names.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image, UnidentifiedImageError
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from workloads.images import Images, ImageSet

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
PICTURES = (".jpg", ".jpeg", ".png")
SPLITS = ("train", "test")

#: Largest size of one image file in bytes: small images are meant, and all of them are held in memory.
MAX_FILE_BYTES = 16 * 2**20

#: Split, class and contents of a file.
File = tuple[str, str, bytes]


class ImageFileError(ValueError):
    """Files that are not small images in the expected layout; the message names the file and the reason."""


def is_archive(path: Path) -> bool:
    """Whether the name of a path ends like that of a tar archive."""
    return path.name.lower().endswith(ARCHIVES)


def decode(path: Path, name: str, image_size: int, channels: int) -> ImageSet:
    """Decode all images of a folder or archive, with a progress bar on standard error.

    Classes are sorted by name. Images come in a fixed random order: in the order of the files, the first batches of an
    evaluation would hold images of one class only.

    Args:
        path: folder or archive.
        name: name of the collection.
        image_size: height and width of the result in pixels; images of another size are resized.
        channels: 3 for colour, 1 for grey.

    Raises:
        ImageFileError: the files are no images, too large, not in the expected layout, or cannot be read.
    """
    images: dict[tuple[str, str], list[Images]] = {}
    files = _files_of_archive(path) if is_archive(path) else _files_of_folder(path)
    # On standard error: standard output holds the run's own lines.
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"decoding {path.name} (once)", total=None)
        for split, label, contents in files:
            images.setdefault((split, label), []).append(_picture(contents, f"{split}/{label}", image_size, channels))
            progress.advance(task)
    classes = sorted({label for _, label in images})
    _check_classes(path, images, classes)
    arrays: dict[str, np.ndarray] = {}
    for split in SPLITS:
        counts = [len(images[split, label]) for label in classes]
        order = np.random.default_rng(0).permutation(sum(counts))
        pixels = np.stack([image for label in classes for image in images.pop((split, label))])
        arrays[f"{split}_images"] = pixels[order]
        arrays[f"{split}_labels"] = np.repeat(np.arange(len(classes)), counts).astype(np.int64)[order]
    return ImageSet(name, **arrays, classes=tuple(classes))


def files_below(path: Path) -> list[Path]:
    """The image files of a folder: training split first, each split sorted by class and name."""
    return [file for split in SPLITS for file in _pictures_below(path / split)]


def _check_classes(path: Path, images: dict[tuple[str, str], list[Images]], classes: list[str]) -> None:
    missing = [f"{split}/{label}" for split in SPLITS for label in classes if (split, label) not in images]
    if missing or not classes:
        what = f"no images in {', '.join(missing[:5])}" if classes else "no images"
        raise ImageFileError(f"{path}: {what}; expected train/CLASS/*.jpg and test/CLASS/*.jpg with the same classes")


def _files_of_archive(path: Path) -> Iterator[File]:
    try:
        # "r|*" reads forwards only: an archive is decompressed once, whatever the order of its members.
        with tarfile.open(path, mode="r|*") as archive:
            for member in archive:
                parts = PurePosixPath(member.name).parts
                if not member.isfile() or len(parts) < 3 or parts[-3] not in SPLITS or not _is_picture(parts[-1]):
                    continue
                if member.size > MAX_FILE_BYTES:
                    raise ImageFileError(f"{path}: {_too_large(member.name, member.size)}")
                stream = archive.extractfile(member)
                assert stream is not None  # the member is a regular file
                yield parts[-3], parts[-2], stream.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ImageFileError(f"{path} cannot be read as a tar archive ({error}); is the download complete?") from error


def _files_of_folder(path: Path) -> Iterator[File]:
    for file in files_below(path):
        size = file.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ImageFileError(_too_large(str(file), size))
        yield file.parent.parent.name, file.parent.name, file.read_bytes()


def _too_large(name: str, size: int) -> str:
    return f"{name} has {size} bytes, more than {MAX_FILE_BYTES}; remove it, or take data=image_folder for large images"


def _pictures_below(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*/*") if _is_picture(file.name) and file.is_file())


def _is_picture(name: str) -> bool:
    # macOS archives hold a companion "._NAME.jpg" of each file, which is no image.
    return name.lower().endswith(PICTURES) and not name.startswith(".")


def _picture(contents: bytes, place: str, size: int, channels: int) -> Images:
    """Decode one file to uint8 (size, size, channels); ``place`` says in an error where the file is."""
    try:
        with Image.open(io.BytesIO(contents), formats=("JPEG", "PNG")) as picture:
            image = picture.convert("RGB" if channels == 3 else "L")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise ImageFileError(f"an image of {place} cannot be decoded: {error}") from error
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image, dtype=np.uint8).reshape(size, size, channels)
