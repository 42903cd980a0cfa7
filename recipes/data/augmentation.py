"""Random shifts and mirror images of whole batches.

The randomness of an image is a hash of (seed, epoch, index of the image). It depends neither on the batch, nor on the
process, nor on the number of processes, and a resumed run draws the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def augment(images: Tensor, indices: Tensor, *, seed: int, epoch: int, shift: int, flip: bool) -> Tensor:
    """Shift every image by up to ``shift`` pixels in each direction, and mirror half of the images.

    Black pixels come in at the edges.

    Args:
        images: uint8 (N, H, W, C).
        indices: place of each image in the training split, int64 (N,).
        seed: seed of the run.
        epoch: number of the epoch.
        shift: largest shift in pixels.
        flip: whether images are mirrored.

    Returns:
        uint8 (N, H, W, C), a new tensor.
    """
    n, height, width, _ = images.shape
    noise = hashed(indices, seed, epoch)
    places = 2 * shift + 1
    top, left, mirror = noise % places, (noise >> 16) % places, (noise >> 32) & 1
    rows = top[:, None] + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device).expand(n, width)
    if flip:
        columns = torch.where(mirror[:, None] == 1, width - 1 - columns, columns)
    columns = columns + left[:, None]
    padded = F.pad(images, (0, 0, shift, shift, shift, shift))
    batch = torch.arange(n, device=images.device)
    return padded[batch[:, None, None], rows[:, :, None], columns[:, None, :]]


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
