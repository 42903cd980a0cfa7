"""Random Hadamard rotations of blocks, see `kernels.rotation`, which is the readable form."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import float32

from lightning_gqsgd.kernels.cpu.casts import part
from lightning_gqsgd.kernels.cpu.dither import FIRST, dither
from lightning_gqsgd.kernels.cpu.jit import inlined, kernel, loop
from lightning_gqsgd.kernels.cpu.scales import float_type
from lightning_gqsgd.kernels.wire import Key
from lightning_gqsgd.layout import LENGTH, RAW, START


class Turn(NamedTuple):
    """A rotation, typed for the kernels.

    Attributes:
        key: the two keys of the random signs, uint32 [2].
        roots: see `roots_of`.
    """

    key: np.ndarray
    roots: np.ndarray

    @classmethod
    def of(cls, key: Key, block_size: int, dtype: torch.dtype) -> Turn:
        """The rotation with a key, for blocks of at most ``block_size`` coordinates of a gradient dtype."""
        return cls(np.array(key, dtype=np.uint32), roots_of(block_size, dtype))


def roots_of(block_size: int, dtype: torch.dtype) -> np.ndarray:
    """2^(-e/2) for each exponent e of a power of two up to ``block_size``, in the compute dtype of a gradient dtype."""
    return (2.0 ** (-0.5 * np.arange(block_size.bit_length()))).astype(float_type(dtype))


@loop
def _first_stages(values):
    """The butterflies of distance 1, 2 and 4, on eight values at a time: loops that short are not vectorised."""
    for j in range(0, values.size, 8):
        a, b, c, d = values[j], values[j + 1], values[j + 2], values[j + 3]
        e, f, g, h = values[j + 4], values[j + 5], values[j + 6], values[j + 7]
        a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
        a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
        values[j], values[j + 1], values[j + 2], values[j + 3] = a + e, b + f, c + g, d + h
        values[j + 4], values[j + 5], values[j + 6], values[j + 7] = a - e, b - f, c - g, d - h


@loop
def _butterflies(left, right):
    """Replace two arrays by their sum and their difference."""
    for j in range(left.size):
        x, y = left[j], right[j]
        left[j] = x + y
        right[j] = x - y


@inlined
def hadamard(values, root):
    """Hadamard transform of a power of two of values, in place; ``root``: the factor that makes it orthonormal."""
    n, half = values.size, 1
    if n >= 8:
        _first_stages(values)
        half = 8
    while half < n:
        for first in range(0, n, 2 * half):
            _butterflies(part(values, first, half), part(values, first + half, half))
        half *= 2
    for j in range(n):
        values[j] *= root


@loop
def _flip(values, u):
    """Change the sign of the values whose dither is below 1/2."""
    for j in range(values.size):
        values[j] = -values[j] if u[j] < float32(0.5) else values[j]


@inlined
def turn_block(values, block, turn, inverse, u):
    """Turn the coordinates of a block in place, or back.

    Args:
        values: the coordinates.
        block: the block's row of the table.
        turn: the rotation, a `Turn`.
        inverse: whether to turn back.
        u: scratch space for the dither, fp32.
    """
    dither(turn.key, block, values.size, FIRST, u)
    if not inverse:
        _flip(values, u)
    start = 0
    for exponent in range(turn.roots.size - 1, -1, -1):
        if values.size & (1 << exponent):
            hadamard(part(values, start, 1 << exponent), turn.roots[exponent])
            start += 1 << exponent
    if inverse:
        _flip(values, u)


@kernel("rotate")
def rotate_blocks(x, blocks, turn, inverse, u):
    """Turn the coordinates of all blocks that are compressed; the arguments are those of `turn_block`."""
    for k in range(blocks.shape[0]):
        block = blocks[k]
        if not block[RAW]:
            turn_block(part(x, block[START], block[LENGTH]), block, turn, inverse, u)
