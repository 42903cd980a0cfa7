"""Largest magnitudes and sums of blocks."""

from __future__ import annotations

from numba import float64

from lightning_gqsgd.kernels.cpu.casts import numbers, part
from lightning_gqsgd.kernels.cpu.jit import kernel
from lightning_gqsgd.kernels.cpu.loops import fetch_ahead, maximum
from lightning_gqsgd.kernels.layout import LENGTH, START
from lightning_gqsgd.kernels.reference import LANES


@kernel("maxima")
def maxima(x, blocks, mask, out):
    """Write the bits of the largest magnitude of each block into ``out``. For ``mask``, see `loops.maximum`."""
    for k in range(blocks.shape[0]):
        fetch_ahead(x, blocks, k)
        block = blocks[k]
        out[k] = maximum(numbers(part(x, block[START], 0), 0, block[LENGTH], mask), mask)


@kernel("moments")
def moments(x, blocks, lanes, out):
    """Write the sums of each block into ``out``.

    Args:
        x: coordinates.
        blocks: block table.
        lanes: scratch space, fp64 [2, LANES].
        out: the sums Σ |x| and Σ x², fp64 [number of blocks, 2].
    """
    for k in range(blocks.shape[0]):
        values = part(x, blocks[k, START], blocks[k, LENGTH])
        absolute = lanes[0]
        square = lanes[1]
        for lane in range(LANES):
            absolute[lane] = square[lane] = 0.0
        for first in range(0, values.size, LANES):
            row = values[first : first + LANES]
            for lane in range(row.size):
                value = float64(row[lane])
                absolute[lane] += abs(value)
                square[lane] += value * value
        for kind in range(2):
            total = 0.0
            for lane in range(LANES):
                total += lanes[kind, lane]
            out[k, kind] = total
