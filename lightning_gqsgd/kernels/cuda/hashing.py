"""The dither in Triton; `wire` has the formula of the hash.

A key is one integer of 64 bits, see `launch.packed`. ``t`` is a tile, see `tiles.Tile`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_gqsgd.kernels import wire
from lightning_gqsgd.kernels.cuda.tiles import RAGGED

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
    """Returns the words a and b of each block's hash, uint32 [rows]."""
    first = key.to(tl.uint32)
    second = (key.to(tl.int64) >> 32).to(tl.uint32)
    a = _mix(_mix(first ^ t.parameter) + t.index * _GOLDEN)
    b = _mix(_mix(second + t.parameter) ^ t.index)
    return a, b


@triton.jit
def words(p, a, b):
    """Returns uniform 32-bit integers for the numbers ``p`` and the words ``a`` and ``b`` of each block, [rows, width].

    ``b`` is shifted once for each block, instead of once for each number: (h ^ b) ^ (h ^ b) >> 15 is
    h ^ h >> 15 ^ (b ^ b >> 15).
    """
    h = _start(p.to(tl.uint32) + a[:, None])
    h = (h ^ (h >> 15) ^ (b ^ (b >> 15))[:, None]) * _MULTIPLY_2
    return h ^ (h >> 16)


@triton.jit
def draws(t, key, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the dither of both halves as integers of 16 bits, uint32 [rows, half]."""
    first, second = draws_in_words(t, key, KIND, c)
    return first & 0xFFFF, second >> 16


@triton.jit
def draws_in_words(t, key, KIND: tl.constexpr, c: tl.constexpr):
    """Returns words with the dither of both halves, uint32 [rows, half]. The dither of the first half is in the lower
    16 bits, and the dither of the second half is in the upper 16 bits. For blocks of full length, both results are the
    same words."""
    a, b = block_keys(t, key)
    p = tl.arange(0, c.shape.half)[None, :]
    if KIND == RAGGED:
        first = _word_at(p, t.n, a, b, False)
        second = _word_at(p + c.shape.half, t.n, a, b, True)
    else:
        first = words(p, a, b)
        second = first
    return first, second


@triton.jit
def _word_at(j, n, a, b, UPPER: tl.constexpr):
    """Returns words with the dither of coordinates j in their lower or upper half, for blocks of any length."""
    half = ((n + 1) // 2)[:, None]
    in_second_half = j >= half
    h = words(tl.where(in_second_half, j - half, j), a, b)
    return tl.where(in_second_half, h, h << 16) if UPPER else tl.where(in_second_half, h >> 16, h)
