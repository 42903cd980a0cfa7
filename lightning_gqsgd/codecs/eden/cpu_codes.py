"""EDEN codes on the CPU: from rotated coordinates to the nearest levels and their codes on the wire, and back.

There is one loop for each number of bits, so that choosing a level needs no inner loop over levels. With n coordinates,
a loop takes the vectors of coordinates j, j + n/4, j + n/2 and j + 3n/4 together. Their codes share bytes on the wire,
see `kernels.packing`, and the sum of their products is the result of the first two steps of `codec.folded`.

Common arguments: ``t`` are thresholds and ``m`` are magnitudes of levels, both as vectors that repeat them, see
`table_of`; ``wire`` is the message, and ``at`` is the position of the block's codes in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lightning_gqsgd.kernels.cpu.jit import inlined, loop
from lightning_gqsgd.kernels.cpu.packing import pack_planes
from lightning_gqsgd.kernels.cpu.vectors import (
    VECTOR_BYTES,
    are_at_least,
    are_negative,
    chosen,
    code_of,
    entry,
    filled_codes,
    has_bit,
    lanes,
    load,
    load_codes,
    magnitudes_of,
    negated_by,
    negated_where,
    one_of_eight,
    shifted_down,
    shifted_up,
    store,
)


def table_of(numbers: Sequence[float], real: type[np.floating]) -> np.ndarray:
    """Returns 1, 2, 4 or 8 numbers, repeated until they fill a vector of the type ``real``."""
    return np.resize(np.array(numbers).astype(real), VECTOR_BYTES // np.dtype(real).itemsize)


@inlined
def _nearest_of_1(size, t, m):
    """Returns the number of the magnitude nearest to each size, and the magnitude, if there is one magnitude."""
    return filled_codes(0, size), entry(m, 0)


@inlined
def _nearest_of_2(size, t, m):
    """Returns the number of the magnitude nearest to each size, and the magnitude, if there are two magnitudes."""
    c0 = are_at_least(size, entry(t, 1))
    return code_of(c0, 1), chosen(c0, entry(m, 1), entry(m, 0))


@inlined
def _nearest_of_4(size, t, m):
    """Returns the number of the magnitude nearest to each size, and the magnitude, if there are four magnitudes. The
    bits of the number are found one after the other."""
    c1 = are_at_least(size, entry(t, 2))
    c0 = are_at_least(size, chosen(c1, entry(t, 3), entry(t, 1)))
    number = code_of(c1, 2) | code_of(c0, 1)
    return number, one_of_eight(number, m)


@inlined
def _nearest_of_8(size, t, m):
    """Returns the number of the magnitude nearest to each size, and the magnitude, if there are eight magnitudes."""
    c2 = are_at_least(size, entry(t, 4))
    c1 = are_at_least(size, chosen(c2, entry(t, 6), entry(t, 2)))
    high = code_of(c2, 4) | code_of(c1, 2)
    c0 = are_at_least(size, one_of_eight(high | filled_codes(1, size), t))
    number = high | code_of(c0, 1)
    return number, one_of_eight(number, m)


def _chooser(bits: int, nearest: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the compiled function ``choose(z, moved, t, m, terms, codes, wire, at)`` for a number of bits, which
    writes the codes of a block.

    Arguments of the function: ``z`` are rotated coordinates; ``moved`` are the coordinates from which levels are
    chosen, with or without a dither; ``t`` are thresholds in units of coordinates; ``terms`` receives sums of products
    of coordinates and levels, and may overlap the beginning of ``moved``; ``codes`` is scratch space.
    """

    @inlined
    def one(z, moved, j, t, m):
        """Returns the codes of the vector that starts at ``j``, and the products of its coordinates and levels."""
        v = load(moved, j)
        number, level = nearest(magnitudes_of(v), t, m)
        is_negative = are_negative(v)
        code = number | code_of(is_negative, 1 << (bits - 1))
        return code, load(z, j) * negated_where(is_negative, level)

    @loop
    def choose(z, moved, t, m, terms, codes, wire, at):
        quarter = z.size // 4
        for j in range(0, quarter, lanes(z)):
            code_a, a = one(z, moved, j, t, m)
            code_b, b = one(z, moved, j + quarter, t, m)
            code_c, c = one(z, moved, j + 2 * quarter, t, m)
            code_d, d = one(z, moved, j + 3 * quarter, t, m)
            store(terms, j, (a + c) + (b + d))
            if bits == 2:
                low = code_a | shifted_up(code_b, 2)
                high = shifted_up(code_c, 4) | shifted_up(code_d, 6)
                store(wire, at + j, low | high)
            elif bits == 4:
                store(wire, at + j, code_a | shifted_up(code_c, 4))
                store(wire, at + quarter + j, code_b | shifted_up(code_d, 4))
            else:
                store(codes, j, code_a)
                store(codes, j + quarter, code_b)
                store(codes, j + 2 * quarter, code_c)
                store(codes, j + 3 * quarter, code_d)
        if bits not in (2, 4):
            pack_planes(codes, z.size, bits, wire, at)

    return choose


_choose_1 = _chooser(1, _nearest_of_1)
_choose_2 = _chooser(2, _nearest_of_2)
_choose_3 = _chooser(3, _nearest_of_4)
_choose_4 = _chooser(4, _nearest_of_8)


@inlined
def choose_levels(bits, z, moved, t, m, terms, codes, wire, at):
    """Write the codes of the levels that are nearest to a block's coordinates; see `_chooser`."""
    if bits == 2:
        _choose_2(z, moved, t, m, terms, codes, wire, at)
    elif bits == 4:
        _choose_4(z, moved, t, m, terms, codes, wire, at)
    elif bits == 3:
        _choose_3(z, moved, t, m, terms, codes, wire, at)
    else:
        _choose_1(z, moved, t, m, terms, codes, wire, at)


@loop
def _look_up_1(wire, at, m, z):
    """Write the levels of codes of one bit, which is the sign, into ``z``."""
    eighth = z.size // 8
    for j in range(0, eighth, lanes(z)):
        word = load_codes(wire, at + j, m)
        for lane in range(8):
            store(z, j + lane * eighth, negated_by(entry(m, 0), word, 31 - lane))


@loop
def _look_up_2(wire, at, m, z):
    """Write the levels of codes of two bits into ``z``."""
    quarter = z.size // 4
    for j in range(0, quarter, lanes(z)):
        word = load_codes(wire, at + j, m)
        for lane in range(4):
            level = chosen(has_bit(word, 2 * lane), entry(m, 1), entry(m, 0))
            store(z, j + lane * quarter, negated_by(level, word, 30 - 2 * lane))


@loop
def _look_up_3(wire, at, m, z):
    """Write the levels of codes of three bits into ``z``. On the wire, all numbers of magnitudes precede all signs.

    There are four magnitudes, so the table of eight has each of them twice.
    """
    quarter = z.size // 4
    eighth = z.size // 8
    for j in range(0, eighth, lanes(z)):
        signs = load_codes(wire, at + quarter + j, m)
        for odd in range(2):
            word = load_codes(wire, at + odd * eighth + j, m)
            for lane in range(4):
                level = one_of_eight(shifted_down(word, 2 * lane), m)
                lane_of_sign = 2 * lane + odd
                store(z, j + lane_of_sign * eighth, negated_by(level, signs, 31 - lane_of_sign))


@loop
def _look_up_4(wire, at, m, z):
    """Write the levels of codes of four bits into ``z``."""
    half = z.size // 2
    for j in range(0, half, lanes(z)):
        word = load_codes(wire, at + j, m)
        for lane in range(2):
            level = one_of_eight(shifted_down(word, 4 * lane), m)
            store(z, j + lane * half, negated_by(level, word, 28 - 4 * lane))


@inlined
def look_up_levels(bits, wire, at, m, z):
    """Write the levels of the codes of a block into ``z``."""
    if bits == 2:
        _look_up_2(wire, at, m, z)
    elif bits == 4:
        _look_up_4(wire, at, m, z)
    elif bits == 3:
        _look_up_3(wire, at, m, z)
    else:
        _look_up_1(wire, at, m, z)
