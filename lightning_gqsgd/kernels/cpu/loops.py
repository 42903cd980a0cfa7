"""Loops over the coordinates of a block that every family of codes needs."""

from __future__ import annotations

from numba import int32, int64

from lightning_gqsgd.kernels.cpu.casts import clamped, fetch, larger, narrowed, numbers
from lightning_gqsgd.kernels.cpu.jit import inlined, loop
from lightning_gqsgd.kernels.layout import LENGTH, START

#: Memory is prefetched `_AHEAD` blocks ahead, and at most `_FETCHED` coordinates of a block are prefetched. With fewer
#: blocks, coordinates would arrive too late.
_AHEAD = 4
_FETCHED = 256
#: Number of bytes that a processor fetches together.
_LINE_BYTES = 64


@inlined
def fill(target, value):
    """Set all numbers of an array to a value."""
    for j in range(target.size):
        target[j] = value


@inlined
def fetch_ahead(x, blocks, k):
    """Prefetch the coordinates of the block `_AHEAD` blocks after block ``k``.

    Processors predict well what is read next within a page of memory. But without this function, they would wait for
    the next page, and for blocks with gaps between them.
    """
    block = blocks[min(k + _AHEAD, blocks.shape[0] - 1)]
    for j in range(0, min(block[LENGTH], _FETCHED), _LINE_BYTES // x.itemsize):
        fetch(x, block[START] + j)


@inlined
def copy(source, target):
    """Copy the numbers of ``source`` into ``target``."""
    for j in range(source.size):
        target[j] = source[j]


@loop
def add_scaled(values, factor, add, out):
    """Write the values times a factor into ``out``, or add them to ``out`` if ``add`` is true.

    If ``add`` is false, the products are added to zero, so that no zero is negative. Filling ``out`` with zeros first
    would cost the call of a function for each block. The loops that decode companded, exponential and EDEN codes do the
    same.
    """
    zero = out.dtype.type(0)
    if add:
        for j in range(out.size):
            out[j] += values[j] * factor
    else:
        for j in range(out.size):
            out[j] = zero + values[j] * factor


@inlined
def divide(values, divisor):
    """Divide all numbers of an array by ``divisor``."""
    for j in range(values.size):
        values[j] /= divisor


@loop
def maximum(bits, mask):
    """Returns the largest magnitude of floats, as an integer.

    Magnitudes are compared as integers, because LLVM does not vectorise a maximum of floats, and such a maximum loses
    NaN. `narrowed` keeps the width of the integers. Numba would widen them to 64 bits, and a vector would hold fewer.

    Args:
        bits: bits of the floats, as signed integers.
        mask: all bits except for the sign.
    """
    largest = narrowed(int64(mask & bits[0]), mask)
    for j in range(bits.size):
        largest = larger(largest, narrowed(int64(bits[j] & mask), mask))
    return largest


@loop
def maximum_and_zeros(bits, mask):
    """Returns the largest magnitude of floats, as in `maximum`, and the number of zeros."""
    largest = narrowed(int64(mask & bits[0]), mask)
    zeros = int32(0)
    for j in range(bits.size):
        magnitude = narrowed(int64(bits[j] & mask), mask)
        largest = larger(largest, magnitude)
        zeros = int32(zeros + int32(magnitude == 0))
    return largest, zeros


@inlined
def is_finite(values, form):
    """Returns whether all numbers of an array are finite. ``form`` is a `scales.Form`.

    Magnitudes are compared as integers, as in `maximum`. A test by a sum would be slower, because its additions have to
    wait for each other.
    """
    return maximum(numbers(values, 0, values.size, form.mask), form.mask) < form.infinity


@loop
def clamp(values, limit):
    """Clamp finite numbers to the range from -limit to limit. NaN and infinity stay."""
    for j in range(values.size):
        value = values[j]
        if value - value == 0:
            values[j] = clamped(value, limit)
