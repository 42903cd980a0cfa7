"""The dither in Triton: the hash that `wire` spells out.

A key is one integer of 64 bits, see `launch.packed`. ``t`` is a tile, see `tiles.Tile`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_gqsgd.kernels import wire
from lightning_gqsgd.kernels.cuda.tiles import INDEX, PARAMETER, RAGGED, column

_GOLDEN = tl.constexpr(wire.GOLDEN)
_MULTIPLY_1 = tl.constexpr(wire.MULTIPLY_1)
_MULTIPLY_2 = tl.constexpr(wire.MULTIPLY_2)


@triton.jit
def _start(h):
    return (h ^ (h >> 16)) * _MULTIPLY_1


@triton.jit
def _finish(h):
    h = (h ^ (h >> 15)) * _MULTIPLY_2
    return h ^ (h >> 16)


@triton.jit
def _mix(h):
    return _finish(_start(h))


@triton.jit
def block_keys(t, key):
    """Returns the words a and b of each block, uint32 [rows]."""
    parameter = column(t, PARAMETER).to(tl.uint32, bitcast=True)
    index = column(t, INDEX).to(tl.uint32, bitcast=True)
    first = key.to(tl.uint32)
    second = (key.to(tl.int64) >> 32).to(tl.uint32)
    a = _mix(_mix(first ^ parameter) + index * _GOLDEN)
    b = _mix(_mix(second + parameter) ^ index)
    return a, b


@triton.jit
def words(p, a, b):
    """Uniform 32-bit integers for the numbers ``p`` and the words ``a`` and ``b`` of each block, [rows, width]."""
    return _finish(_start(p.to(tl.uint32) + a[:, None]) ^ b[:, None])


@triton.jit
def draws(t, key, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the dither of both halves as integers of 16 bits, uint32 [rows, half]."""
    a, b = block_keys(t, key)
    p = tl.arange(0, c.shape.half)[None, :]
    if KIND == RAGGED:
        first = _draws_at(p, t.n, a, b)
        second = _draws_at(p + c.shape.half, t.n, a, b)
    else:
        h = words(p, a, b)
        first = h & 0xFFFF
        second = h >> 16
    return first, second


@triton.jit
def _draws_at(j, n, a, b):
    """Returns the dither of coordinates j, where blocks end anywhere."""
    half = ((n + 1) // 2)[:, None]
    in_second_half = j >= half
    h = words(tl.where(in_second_half, j - half, j), a, b)
    return tl.where(in_second_half, h >> 16, h & 0xFFFF)
