"""Loops over one array each."""
from __future__ import annotations

from numba import int32

from lightning_gqsgd.kernels.cpu.casts import clamped, larger
from lightning_gqsgd.kernels.cpu.jit import inlined, inlined_tiny


@inlined_tiny
def fill(target, value):
    for j in range(target.size):
        target[j] = value


@inlined_tiny
def copy(source, target):
    for j in range(source.size):
        target[j] = source[j]


@inlined_tiny
def add_scaled(values, factor, add, out):
    """Set, or add to, what is in ``out``: the values times a factor."""
    if not add:
        for j in range(out.size):
            out[j] = 0
    for j in range(out.size):
        out[j] += values[j] * factor


@inlined_tiny
def divide(values, divisor):
    for j in range(values.size):
        values[j] /= divisor


@inlined_tiny
def maximum(bits, mask):
    largest = mask & bits[0]
    for j in range(bits.size):
        largest = larger(largest, bits[j] & mask)
    return largest


@inlined
def maximum_and_zeros(bits, mask):
    largest = mask & bits[0]
    zeros = int32(0)
    for j in range(bits.size):
        magnitude = bits[j] & mask
        largest = larger(largest, magnitude)
        zeros = int32(zeros + int32(magnitude == 0))
    return largest, zeros


@inlined_tiny
def is_finite(values):
    check = values[0] - values[0]
    for j in range(values.size):
        check += values[j] - values[j]
    return check == 0


@inlined_tiny
def clamp(values, limit):
    """Clamp finite numbers; NaN and infinity stay."""
    for j in range(values.size):
        value = values[j]
        if value - value == 0:
            values[j] = clamped(value, limit)
