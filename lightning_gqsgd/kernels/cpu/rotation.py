from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import float32

from lightning_gqsgd.kernels.cpu.casts import part
from lightning_gqsgd.kernels.cpu.dither import FIRST, dither
from lightning_gqsgd.kernels.cpu.jit import inlined, inlined_mid, inlined_tiny, inlined_top


class Turn(NamedTuple):
    key: np.ndarray
    roots: np.ndarray  # 2^(-e/2) for each exponent e, in the compute type


@inlined
def _first_stages(values):
    """The butterflies of distance 1, 2 and 4, on eight values at a time: loops that short are not vectorised."""
    for j in range(0, values.size, 8):
        a, b, c, d = values[j], values[j + 1], values[j + 2], values[j + 3]
        e, f, g, h = values[j + 4], values[j + 5], values[j + 6], values[j + 7]
        a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
        a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
        values[j], values[j + 1], values[j + 2], values[j + 3] = a + e, b + f, c + g, d + h
        values[j + 4], values[j + 5], values[j + 6], values[j + 7] = a - e, b - f, c - g, d - h


@inlined
def _butterflies(left, right):
    for j in range(left.size):
        x, y = left[j], right[j]
        left[j] = x + y
        right[j] = x - y


@inlined_mid
def _hadamard(values, root):
    """Hadamard transform of a power of two of values, in place; ``root``: factor that makes it orthonormal."""
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


@inlined
def _flip(values, u):
    for j in range(values.size):
        values[j] = -values[j] if u[j] < float32(0.5) else values[j]


@inlined_mid
def turn_block(values, block, turn, inverse, u):
    """Turn the coordinates of a block"""
    dither(turn.key, block, values.size, FIRST, u)
    if not inverse:
        _flip(values, u)
    start = 0
    for exponent in range(turn.roots.size - 1, -1, -1):
        if values.size & (1 << exponent):
            _hadamard(part(values, start, 1 << exponent), turn.roots[exponent])
            start += 1 << exponent
    if inverse:
        _flip(values, u)
