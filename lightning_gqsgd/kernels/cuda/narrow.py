"""Stochastic rounding of fp32 numbers to bf16 on GPUs, in Triton; `kernels.narrowing` has the readable form."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from lightning_gqsgd.kernels import narrowing
from lightning_gqsgd.kernels.cuda.hashing import draws
from lightning_gqsgd.kernels.cuda.tiles import load_tile, store_tile, tile_of

_INFINITY = tl.constexpr(narrowing.INFINITY)
_MAGNITUDE = tl.constexpr(narrowing.MAGNITUDE)
_SIGN = tl.constexpr(narrowing.SIGN)
_QUIET = tl.constexpr(narrowing.QUIET)


class Narrowing(NamedTuple):
    """The constants of a compiled kernel.

    Attributes:
        factor: factor of the coordinates.
        limit: bits of the largest magnitude that is written.
    """

    factor: float
    limit: int


@triton.jit
def _rounded(v, random, LIMIT: tl.constexpr):
    """Returns the bits of fp32 numbers that are rounded stochastically to bf16, uint32."""
    bits = v.to(tl.uint32, bitcast=True)
    magnitude = bits & _MAGNITUDE
    upper = (tl.minimum(magnitude, tl.full((), LIMIT, tl.uint32)) + random.to(tl.uint32)) >> 16
    special = (magnitude >> 16) | tl.where(magnitude > _INFINITY, _QUIET, 0).to(tl.uint32)
    return tl.where(magnitude >= _INFINITY, special, upper) | ((bits >> 16) & _SIGN)


@triton.jit(do_not_specialize=["count", "origin", "key"])
def narrow_kernel(table, count, origin: tl.int64, out, x, key: tl.int64, KIND: tl.constexpr, c: tl.constexpr):
    """Round coordinates to bf16 at random; see `protocol.Kernels.narrow`. ``out`` receives the bits of bf16 numbers,
    int16 [numel]."""
    t = tile_of(table, count, origin, out, KIND, c)
    a, b = load_tile(x, t.start, t.n, KIND, c)
    random_a, random_b = draws(t, key, KIND, c)
    factor = tl.full((), c.family.factor, tl.float32)
    a = _rounded(a * factor, random_a, c.family.limit)
    b = _rounded(b * factor, random_b, c.family.limit)
    store_tile(a, b, out, t, t.inside, KIND, c)
