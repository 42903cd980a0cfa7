"""Decoded images of `workloads.image_files`, kept as arrays."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np

from recipes.data.sources import store_arrays
from recipes.errors import RecipeError
from workloads.image_files import ImageFileError, decode, files_below
from workloads.images import ImageSet

_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def load_cached(path: Path, cache_dir: Path, name: str, image_size: int, channels: int) -> ImageSet:
    """Images of a folder or archive: from the cache, or decoded now and put there.

    The name of the cache file holds a digest of the path, its size, its time of change and the wanted shape.

    Args:
        path: folder or archive, see `workloads.image_files`.
        cache_dir: folder of the cache.
        name, image_size, channels: see `workloads.image_files.decode`.

    Raises:
        RecipeError: the files are not images in the expected layout, or the cache cannot be read or written.
    """
    cached = cache_dir / f"{path.name.split('.')[0]}-{_fingerprint(path, image_size, channels)}.npz"
    if not cached.exists():
        try:
            images = decode(path, name, image_size, channels)
        except ImageFileError as error:
            raise RecipeError(str(error)) from error
        arrays = {key: getattr(images, key) for key in _ARRAYS}
        store_arrays(cached, **arrays, classes=np.array(images.classes))
    try:
        with np.load(cached, allow_pickle=False) as stored:
            classes = tuple(str(label) for label in stored["classes"])
            return ImageSet(name, **{key: stored[key] for key in _ARRAYS}, classes=classes)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise RecipeError(f"{cached} cannot be read ({error}); delete it, and the next run makes it again") from error


def _fingerprint(path: Path, image_size: int, channels: int) -> str:
    """Digest of everything that decoding depends on; of a folder, the names, sizes and times of all its files."""
    files = [path] if path.is_file() else files_below(path)
    digest = hashlib.blake2b(f"{path.resolve()} {image_size} {channels}".encode(), digest_size=8)
    for file in files:
        status = file.stat()
        digest.update(f"\n{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()
