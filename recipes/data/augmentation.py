"""Random shifts, mirror images and hidden squares of whole batches.

The randomness of an image is a hash of (seed, epoch, index of the image). It depends neither on the batch, nor on the
process, nor on the number of processes, and a resumed run draws the same numbers.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

#: How images are mirrored: never, half of them at random, or each of them in every second epoch.
Flip = bool | Literal["alternating"]
FLIPS: tuple[Flip, ...] = (False, True, "alternating")
#: What comes in at the edges of shifted images.
Edges = Literal["black", "mirrored"]
EDGES: tuple[Edges, ...] = ("black", "mirrored")

#: Further keys of the hash, so that squares and the first epoch of mirror images do not depend on shifts.
_CUTOUT, _FIRST_FLIP = 1, 2
#: What hides pixels: close to the mean of natural images.
_GREY = 128


def augment(
    images: Tensor,
    indices: Tensor,
    *,
    seed: int,
    epoch: int,
    shift: int,
    flip: Flip,
    cutout: int = 0,
    edges: Edges = "black",
) -> Tensor:
    """Shift every image by up to ``shift`` pixels in each direction, mirror half of the images, and hide a square.

    A hidden square is grey, and its centre is any pixel of the image, so that some of it may lie outside (DeVries and
    Taylor, arXiv 1708.04552). With ``flip="alternating"``, a hash of seed and index says whether an image is mirrored
    in even epochs or in odd ones, so that two epochs show both sides of each image (Jordan, arXiv 2404.00498).

    Args:
        images: uint8 (N, H, W, C).
        indices: place of each image in the training split, int64 (N,).
        seed: seed of the run.
        epoch: number of the epoch.
        shift: largest shift in pixels, less than height and width.
        flip: which images are mirrored.
        cutout: edge of the hidden square in pixels; 0: none.
        edges: what comes in at the edges: black pixels, or the mirror image of the pixels inside of the edge.

    Returns:
        uint8 (N, H, W, C), a new tensor.
    """
    n, height, width, _ = images.shape
    noise = hashed(indices, seed, epoch)
    places = 2 * shift + 1
    top, left, mirror = noise % places, (noise >> 16) % places, (noise >> 32) & 1
    if flip == "alternating":
        mirror = (hashed(indices, seed, _FIRST_FLIP) + epoch) & 1
    rows = top[:, None] + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device).expand(n, width)
    if flip:
        columns = torch.where(mirror[:, None] == 1, width - 1 - columns, columns)
    columns = columns + left[:, None]
    if edges == "mirrored":
        rows, columns = _reflected(rows - shift, height), _reflected(columns - shift, width)
    else:
        images = F.pad(images, (0, 0, shift, shift, shift, shift))
    batch = torch.arange(n, device=images.device)
    augmented = images[batch[:, None, None], rows[:, :, None], columns[:, None, :]]
    if cutout:
        centres = hashed(indices, seed, epoch, _CUTOUT)
        down = _covered(centres % height, height, cutout)
        across = _covered((centres >> 24) % width, width, cutout)
        augmented[down[:, :, None] & across[:, None, :]] = _GREY
    return augmented


def _reflected(places: Tensor, length: int) -> Tensor:
    """Places on an axis of ``length`` pixels, those up to ``length - 1`` outside of it mirrored at the edge pixel."""
    last = length - 1
    return last - (last - places.abs()).abs()


def _covered(centres: Tensor, length: int, size: int) -> Tensor:
    """Which pixels of an axis a square of edge ``size`` covers: bool (N, length)."""
    begin = (centres - size // 2)[:, None]
    pixels = torch.arange(length, device=centres.device)
    return (pixels >= begin) & (pixels < begin + size)


def hashed(indices: Tensor, *keys: int) -> Tensor:
    """Hashes of indices, int64 (N,), with integers ``keys``: int64 (N,), uniform in 0 to 2^63 - 1.

    Each key is mixed in by the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
    """
    z = indices
    for key in keys:
        z = _mix(z + _signed((key + 1) * 0x9E3779B97F4A7C15))
    return _mix(z) & 0x7FFFFFFFFFFFFFFF


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    # A shift of int64 copies the sign into the upper bits; the hash needs zeros there.
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value
