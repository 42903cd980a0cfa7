"""Largest magnitudes and sums of blocks."""

from __future__ import annotations

from numba import float64

from lightning_gqsgd.kernels.cpu.casts import numbers, part
from lightning_gqsgd.kernels.cpu.jit import kernel
from lightning_gqsgd.kernels.cpu.loops import fetch_ahead, maximum
from lightning_gqsgd.kernels.layout import LENGTH, START

#: Number of lanes in which coordinates are added, see `protocol.Kernels.block_moments`.
LANES = 16


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
        lanes: scratch space, fp64 [3, LANES].
        out: the sums Σ x, Σ |x| and Σ x², fp64 [number of blocks, 3].
    """
    for k in range(blocks.shape[0]):
        values = part(x, blocks[k, START], blocks[k, LENGTH])
        plain = lanes[0]
        absolute = lanes[1]
        square = lanes[2]
        for lane in range(LANES):
            plain[lane] = absolute[lane] = square[lane] = 0.0
        for first in range(0, values.size, LANES):
            row = values[first : first + LANES]
            for lane in range(row.size):
                value = float64(row[lane])
                plain[lane] += value
                absolute[lane] += abs(value)
                square[lane] += value * value
        for kind in range(3):
            total = 0.0
            for lane in range(LANES):
                total += lanes[kind, lane]
            out[k, kind] = total
