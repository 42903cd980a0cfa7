"""Largest magnitudes and sums of blocks, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_gqsgd.kernels.cuda.floats import magnitudes
from lightning_gqsgd.kernels.cuda.tiles import ALIGNED, RAGGED, ROW, column, elements_per_access, load_tile, tile_of
from lightning_gqsgd.kernels.reference import LANES

_LANES = tl.constexpr(LANES)


@triton.jit(do_not_specialize=["count", "origin"])
def maxima_kernel(table, count, origin: tl.int64, x, out, c: tl.constexpr):
    """Find the largest magnitude of each block; see `protocol.Kernels.block_maxima`. Blocks may be longer than
    ``c.shape.block``."""
    t = tile_of(table, count, origin, None, RAGGED, c)
    longest = tl.max(t.n, axis=0)
    largest = (t.n * 0).to(c.number.integer)
    each = elements_per_access(x)
    is_aligned = tl.max(t.start % each, axis=0) == 0
    if (tl.min(t.n, axis=0) == longest) & (longest % c.shape.block == 0) & is_aligned:
        for first in range(0, longest, c.shape.block):
            # The start is divided and multiplied by its divisor, so that Triton sees the divisor. A hint
            # (`tl.multiple_of`) on an argument of a function is lost when the function is inlined.
            a, b = load_tile(x, (t.start + first) // each * each, t.n, ALIGNED, c)
            largest = _larger(largest, a, b, c)
    else:
        for first in range(0, longest, c.shape.block):
            a, b = load_tile(x, t.start + first, t.n - first, RAGGED, c)
            largest = _larger(largest, a, b, c)
    tl.store(out + column(t, ROW), largest, mask=t.inside)


@triton.jit
def _larger(largest, a, b, c: tl.constexpr):
    return tl.maximum(largest, tl.max(tl.maximum(magnitudes(a, c), magnitudes(b, c)), axis=1))


@triton.jit(do_not_specialize=["count", "origin"])
def moments_kernel(table, count, origin: tl.int64, x, out, c: tl.constexpr):
    """Sum |x| and x² of each block; see `protocol.Kernels.block_moments`."""
    ROWS: tl.constexpr = c.shape.rows
    LANES: tl.constexpr = _LANES
    t = tile_of(table, count, origin, None, RAGGED, c)
    lane = tl.arange(0, _LANES)[None, :]
    absolute = tl.zeros((ROWS, LANES), tl.float64)
    square = tl.zeros((ROWS, LANES), tl.float64)
    for first in range(0, tl.max(t.n, axis=0), _LANES):
        mask = first + lane < t.n[:, None]
        v = tl.load(x + t.start[:, None] + first + lane, mask=mask, other=0).to(c.number.compute).to(tl.float64)
        absolute += tl.abs(v)
        square += v * v
    places = out + 2 * column(t, ROW).to(tl.int64)
    _store_total(absolute, places, lane, t.inside)
    _store_total(square, places + 1, lane, t.inside)


@triton.jit
def _store_total(lanes, places, lane, rows):
    """Add the lanes in order, and write one sum for each row."""
    total = tl.sum(tl.where(lane == 0, lanes, 0), axis=1)
    for number in tl.static_range(1, _LANES):
        total += tl.sum(tl.where(lane == number, lanes, 0), axis=1)
    tl.store(places, total, mask=rows)
