"""Decoded images of `workloads.image_files`, kept as arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.data.sources import cached_arrays, stamp
from recipes.errors import RecipeError
from workloads.image_files import ImageFileError, decode, files_below
from workloads.images import ImageSet

_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def load_cached(path: Path, cache_dir: Path, name: str, image_size: int, channels: int) -> ImageSet:
    """Images of a folder or archive: from the cache, or decoded by `workloads.image_files` now and put there.

    Raises:
        RecipeError: the files are not images in the expected layout, or the cache cannot be read or written.
    """

    def make() -> dict[str, NDArray[Any]]:
        try:
            images = decode(path, name, image_size, channels)
        except ImageFileError as error:
            raise RecipeError(str(error)) from error
        return {key: getattr(images, key) for key in _ARRAYS} | {"classes": np.array(images.classes)}

    files = [path] if path.is_file() else files_below(path)
    identity = [f"{path.resolve()} {image_size} {channels}", *(f"{file.name} {stamp(file)}" for file in files)]
    arrays = cached_arrays(cache_dir, path.name.split(".")[0], identity, make)
    return ImageSet(name, **{key: arrays[key] for key in _ARRAYS}, classes=tuple(map(str, arrays["classes"])))
