"""scikit-learn's handwritten digits: 1,797 grey images of 8x8 pixels that come with the package."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from workloads.images import Images, ImageSet


def load_digits(name: str, image_size: int, channels: int) -> ImageSet:
    """The digits with a fixed stratified split: 1,437 images for training, 360 for testing.

    Args:
        name: name of the collection.
        image_size: height and width in pixels; the digits have 8, other sizes are interpolated bilinearly.
        channels: number of channels, all of them equal.
    """
    # Here, not above: scikit-learn takes seconds to import, and most runs on other data never need it.
    from sklearn.datasets import load_digits as sklearn_digits
    from sklearn.model_selection import train_test_split

    digits = sklearn_digits()
    train, test = train_test_split(
        np.arange(len(digits.target)), test_size=0.2, random_state=0, stratify=digits.target, shuffle=True
    )
    images = _resized(digits.images, image_size, channels)
    labels = digits.target.astype(np.int64)
    classes = tuple(str(digit) for digit in range(10))
    return ImageSet(name, images[train], labels[train], images[test], labels[test], classes)


def _resized(images: np.ndarray, size: int, channels: int) -> Images:
    """Grey levels 0 to 16, (N, 8, 8), as uint8 (N, size, size, channels)."""
    pixels = torch.from_numpy(images).float()[:, None] * (255 / 16)
    if size != images.shape[1]:
        pixels = F.interpolate(pixels, size=(size, size), mode="bilinear", align_corners=False)
    grey = pixels.round().to(torch.uint8).permute(0, 2, 3, 1)
    return np.ascontiguousarray(grey.expand(-1, -1, -1, channels).numpy())
