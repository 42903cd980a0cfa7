"""Small image collections as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class ImageSet:
    """A training split and a test split.

    Attributes:
        name: what runs, dashboards and plots call the collection.
        train_images, test_images: uint8 (N, height, width, channels).
        train_labels, test_labels: int64 (N,), indices into ``classes``.
        classes: names of the classes.
    """

    name: str
    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    classes: tuple[str, ...]
