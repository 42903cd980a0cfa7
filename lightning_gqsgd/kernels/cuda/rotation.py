"""Random Hadamard rotations of blocks on GPUs, in Triton; `kernels.rotation` has the readable form."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from lightning_gqsgd.kernels.cuda.hashing import draws
from lightning_gqsgd.kernels.cuda.tiles import RAGGED, load_tile, store_tile, tile_of


class Rotation(NamedTuple):
    """The constants of a compiled kernel that only rotates.

    Attributes:
        inverse: whether the kernel rotates back.
    """

    inverse: bool


@triton.jit
def rotated(a, b, t, key, INVERSE: tl.constexpr, KIND: tl.constexpr, c: tl.constexpr):
    """Returns both halves after the rotation, or after its inverse if ``INVERSE`` is true. Raw rows do not change."""
    draw_a, draw_b = draws(t, key, KIND, c)
    sign_a = tl.where(draw_a < 32768, -1.0, 1.0)
    sign_b = tl.where(draw_b < 32768, -1.0, 1.0)
    if INVERSE:
        rotated_a, rotated_b = transformed(a, b, t.n, KIND, c)
        rotated_a = rotated_a * sign_a
        rotated_b = rotated_b * sign_b
    else:
        rotated_a, rotated_b = transformed(a * sign_a, b * sign_b, t.n, KIND, c)
    return tl.where(t.raw[:, None], a, rotated_a), tl.where(t.raw[:, None], b, rotated_b)


@triton.jit
def transformed(a, b, n, KIND: tl.constexpr, c: tl.constexpr):
    """Returns both halves of the Hadamard transforms of rows of length ``n``, in parts whose lengths are descending
    powers of two.

    Coordinate j of n belongs to a part of 2^k coordinates, with k the highest bit in which j and n differ. Parts begin
    at multiples of their length. So a butterfly of distance h applies to coordinate j if j ^ n is at least 2 h.
    """
    STAGES: tl.constexpr = c.shape.stages
    ROWS: tl.constexpr = c.shape.rows
    whole = tl.reshape(tl.trans(tl.join(a, b), 0, 2, 1), (ROWS, 2 * c.shape.half))
    for stage in tl.static_range(STAGES):
        whole = _butterflies(whole, n, stage, KIND, c)
    a, b = tl.split(tl.trans(tl.reshape(whole, (ROWS, 2, c.shape.half)), 0, 2, 1))
    if KIND == RAGGED:
        difference_a = tl.arange(0, c.shape.half)[None, :] ^ n[:, None]
        difference_b = (tl.arange(0, c.shape.half)[None, :] + c.shape.half) ^ n[:, None]
        is_whole = difference_a >= 2 * c.shape.half
        last_a = tl.where(is_whole, a + b, a) * _root(_highest_bit(difference_a), c)
        last_b = tl.where(is_whole, a - b, b) * _root(_highest_bit(difference_b), c)
    else:
        root = _root(tl.full((), STAGES + 1, tl.int32), c)
        last_a = (a + b) * root
        last_b = (a - b) * root
    return last_a, last_b


@triton.jit
def _root(k, c: tl.constexpr):
    """Returns 2^(-k/2), rounded to the compute type: 1 or 2^(-1/2), times a power of two."""
    bits = tl.where((k & 1) != 0, c.number.root, c.number.one).to(c.number.integer)
    return (bits - ((k >> 1).to(c.number.integer) << c.number.mantissa)).to(c.number.compute, bitcast=True)


@triton.jit
def _highest_bit(number):
    """Returns the number of the highest set bit of integers below 2^24, and 0 for 0."""
    exponent = (number.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return tl.maximum(exponent, 0)


@triton.jit
def _butterflies(v, n, STAGE: tl.constexpr, KIND: tl.constexpr, c: tl.constexpr):
    """Returns whole rows after butterflies of coordinates that are 2^STAGE apart."""
    DISTANCE: tl.constexpr = 1 << STAGE
    PAIRS: tl.constexpr = c.shape.half // DISTANCE
    ROWS: tl.constexpr = c.shape.rows
    left, right = tl.split(tl.trans(tl.reshape(v, (ROWS, PAIRS, 2, DISTANCE)), 0, 1, 3, 2))
    plus = left + right
    minus = left - right
    if KIND == RAGGED:
        j = tl.arange(0, PAIRS)[:, None] * (2 * DISTANCE) + tl.arange(0, DISTANCE)[None, :]
        in_larger_part = (j[None, :, :] ^ n[:, None, None]) >= 2 * DISTANCE
        plus = tl.where(in_larger_part, plus, left)
        minus = tl.where(in_larger_part, minus, right)
    return tl.reshape(tl.trans(tl.join(plus, minus), 0, 1, 3, 2), (ROWS, 2 * c.shape.half))


@triton.jit(do_not_specialize=["count", "origin", "key"])
def rotate_kernel(table, count, origin: tl.int64, x, key: tl.int64, KIND: tl.constexpr, c: tl.constexpr):
    """Rotate blocks by the randomised Hadamard transform, or back; see `protocol.Kernels.rotate`."""
    t = tile_of(table, count, origin, x, KIND, c)
    a, b = load_tile(x, t.start, t.n, KIND, c)
    a, b = rotated(a, b, t, key, c.family.inverse, KIND, c)
    store_tile(a, b, x, t, t.inside & (t.raw == 0), KIND, c)
