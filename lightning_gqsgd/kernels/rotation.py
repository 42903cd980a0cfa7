"""Random Hadamard rotations of blocks, in readable PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gqsgd.kernels.dither import uniform
from lightning_gqsgd.kernels.layout import LENGTH
from lightning_gqsgd.kernels.protocol import Lengths
from lightning_gqsgd.kernels.wire import Key

#: The shortest block that `codecs.eden` rotates. Shorter blocks are padded with zeros, because the rotated coordinates
#: of a shorter block are too far from Gaussian: at a length of 64, gains differ by up to 1 % between coordinates.
SHORTEST = 128
#: `codecs.eden` adds a dither to the rotated coordinates of a block if at most this number of its coordinates are not
#: small compared with the largest; see `smallness`.
FEW = 32


def smallness(exponent: Lengths) -> Lengths:
    """Returns k for a block of 2^exponent coordinates. Coordinates below 2^-k times the largest count as small.

    If more than `FEW` coordinates are not small, their sums are about as wide as the gaps between sums of the largest
    coordinates.
    """
    return 1 + (exponent + 1) // 2


def padded(length: Lengths, block_size: int) -> Lengths:
    """Returns the lengths of blocks rounded up to a power of two of at least `SHORTEST`. Blocks that are rotated as a
    whole are padded to these lengths with zeros.

    Args:
        length: number of coordinates of each block, 1 to ``block_size``.
        block_size: the largest number of coordinates, a power of two of at least `SHORTEST`.
    """
    whole = length * 0 + SHORTEST
    # There is no branch on the length, because the lengths may be an array or a tensor.
    while block_size > SHORTEST:
        whole += whole * (whole < length)
        block_size //= 2
    return whole


def rotated(values: Tensor, blocks: Tensor, key: Key, *, inverse: bool = False) -> Tensor:
    """Returns the coordinates of blocks after the rotation of `Kernels.rotate`, [B, width]. Zeros beyond the end of a
    block stay zero."""
    width = values.shape[1]
    signs = torch.where(uniform(blocks, key, width) < 0.5, -1, 1).to(values.dtype)
    if inverse:
        return transformed(values, blocks) * signs
    return transformed(values * signs, blocks)


def transformed(values: Tensor, blocks: Tensor) -> Tensor:
    """Returns the orthonormal Hadamard transforms of the coordinates of blocks, [B, width]. The lengths of the
    transforms are powers of two."""
    width = values.shape[1]
    values = values.clone()
    start = torch.zeros_like(blocks[:, LENGTH])
    # The size of a Hadamard matrix of this kind is a power of two. The binary digits of the length give the parts that
    # fill the block, the largest first.
    for power in (1 << k for k in reversed(range(width.bit_length()))):
        has_part = (blocks[:, LENGTH] & power) != 0
        places = (
            start[has_part, None] + torch.arange(power, device=values.device)[None],
            has_part.nonzero(),
        )
        part = values[places[1], places[0]]
        root = torch.tensor(power**-0.5, dtype=values.dtype, device=values.device)
        values[places[1], places[0]] = _hadamard(part) * root
        start = start + has_part * power
    return values


def _hadamard(values: Tensor) -> Tensor:
    """Returns the products of rows with the Hadamard matrix, [rows, power of two]; not normalised."""
    half = 1
    while half < values.shape[1]:
        first, second = values.unflatten(1, (-1, 2, half)).unbind(2)
        values = torch.stack([first + second, first - second], dim=2).flatten(1)
        half *= 2
    return values
