"""Random Hadamard rotations of blocks, in readable PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gqsgd.kernels.dither import uniform
from lightning_gqsgd.kernels.layout import LENGTH
from lightning_gqsgd.kernels.protocol import Lengths
from lightning_gqsgd.kernels.wire import Key

#: The shortest block that `codecs.eden` turns; shorter ones get zeros. Coordinates of a shorter block that is turned
#: are too far from Gaussian ones: at 64, gains differ by up to 1 % from coordinate to coordinate.
SHORTEST = 128
#: `codecs.eden` moves turned coordinates by a dither in a block that has at most so many coordinates that are not small
#: beside its largest one; see `smallness`.
FEW = 32


def smallness(exponent: Lengths) -> Lengths:
    """Returns k of a block of 2^exponent coordinates: those below 2^-k of the largest one count as small.

    Sums of more than `FEW` coordinates that are not small are about as wide as the gaps between sums of the largest.
    """
    return 1 + (exponent + 1) // 2


def padded(length: Lengths, block_size: int) -> Lengths:
    """Returns the next power of two of the lengths of blocks, and at least `SHORTEST`: the lengths of blocks that are
    turned whole, with zeros at their ends.

    Args:
        length: number of coordinates of blocks, 1 to ``block_size``.
        block_size: the largest number, a power of two of at least `SHORTEST`.
    """
    whole = length * 0 + SHORTEST
    # Only arithmetic, and no branch on the length, because the lengths may be an array or a tensor.
    while block_size > SHORTEST:
        whole += whole * (whole < length)
        block_size //= 2
    return whole


def turned(values: Tensor, blocks: Tensor, key: Key, *, inverse: bool = False) -> Tensor:
    """Returns the coordinates of blocks turned as by `Kernels.rotate`, [B, width]; zeros beyond a block's end stay
    zero."""
    width = values.shape[1]
    signs = torch.where(uniform(blocks, key, width) < 0.5, -1, 1).to(values.dtype)
    if inverse:
        return transformed(values, blocks) * signs
    return transformed(values * signs, blocks)


def transformed(values: Tensor, blocks: Tensor) -> Tensor:
    """Returns the orthonormal Hadamard transforms of the coordinates of blocks, [B, width], in parts of powers of
    two."""
    width = values.shape[1]
    values = values.clone()
    start = torch.zeros_like(blocks[:, LENGTH])
    # A Hadamard matrix of this kind has a power of two as its size. The binary digits of the length say which parts
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
