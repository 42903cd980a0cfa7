"""Vector instructions for the search in a trellis: the costs of a step, a step of all states, and tables of levels.

Levels, subsets and windows are constants of the machine code. Instructions that depend on them are built for each
number of bits. Words, places and bits are vectors of 32-bit integers, with one number for each sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from lightning_gqsgd.codecs.trellis.codec import (
    FAR_WINDOWS,
    FARTHEST,
    MAGNITUDES,
    MEMORY,
    NEVER,
    PATH,
    STATES,
    WINDOWS,
    alphabets,
    costs_of,
    subset_of,
    thresholds_of,
)
from lightning_gqsgd.kernels.cpu.jit import instruction
from lightning_gqsgd.kernels.cpu.vectors import (
    EIGHT,
    Vector,
    bit_is_set,
    by_bits,
    features_of,
    filled_with,
    in_parts,
    joined,
    looked_up,
    permuted,
    repeated,
    shuffled,
)

#: Adding this number to a float below 2^22 rounds the float to an integer, which is then in the lowest bits.
_ROUNDER = 1.5 * 2**23


def _variant(window: int) -> tuple[int, bool]:
    """Returns the two properties of a window that determine its costs: its subset, and whether its outermost level is
    farther out."""
    return subset_of(window), window in FAR_WINDOWS


#: The different results of `_variant`. Windows with the same variant have the same costs.
_VARIANTS = sorted({_variant(window) for window in range(WINDOWS)})


@instruction(lambda vector, inverse: Vector(types.float32, vector.lanes)(vector, inverse))
def units(code, vector, inverse):
    """Returns rotated coordinates times ``inverse``, which is one over their root mean square, as fp32 numbers within
    ±`FARTHEST`. NaN stays NaN."""
    product = code.fmul(vector, filled_with(code, inverse, vector.type))
    product = code.fptrunc(product, code.form) if product.type != code.form else product
    highest = repeated(code.form, FARTHEST)
    lowest = repeated(code.form, -FARTHEST)
    product = code.select(code.fcmp_ordered("<", product, lowest), lowest, product)
    return code.select(code.fcmp_ordered(">", product, highest), highest, product)


@instruction(lambda vector, number: vector(vector, types.int64))
def swapped(code, vector, number):
    """Returns a vector of floats with pairs swapped: place p gets the float from place p ^ ``number``."""
    places = code.trunc(number, ir.IntType(32))
    if vector.type.element == ir.DoubleType():
        # Doubles are moved as pairs of 32-bit halves. The halves of a pair stay in order.
        halves = code.bitcast(vector, ir.VectorType(ir.FloatType(), 2 * vector.type.count))
        moved = _swapped(code, halves, code.shl(places, places.type(1)))
        return code.bitcast(moved, vector.type)
    return _swapped(code, vector, places)


def _swapped(code, vector, number):
    """Generate code for `swapped` with sixteen numbers of 32 bits."""
    features = features_of(code)
    if "+avx512f" in features:
        return permuted(code, "llvm.x86.avx512.permvar.sf.512", vector, _places_swapped(code, WINDOWS, number))
    if "+avx2" in features:
        places = _places_swapped(code, EIGHT, code.and_(number, number.type(EIGHT - 1)))
        halves = [shuffled(code, vector, range(first, first + EIGHT)) for first in (0, EIGHT)]
        halves = [permuted(code, "llvm.x86.avx2.permps", half, places) for half in halves]
        vector = joined(code, halves)
        distances = [EIGHT]
    else:
        distances = [1, 2, 4, EIGHT]
    for distance in distances:
        is_set = code.icmp_unsigned("!=", code.and_(number, number.type(distance)), number.type(0))
        other = shuffled(code, vector, [place ^ distance for place in range(vector.type.count)])
        vector = code.select(is_set, other, vector)
    return vector


def _places_swapped(code, count, number):
    """Generate code for the vector of ``count`` integers 0 ^ ``number``, 1 ^ ``number``, 2 ^ ``number``, ..."""
    form = ir.VectorType(ir.IntType(32), count)
    return code.xor(ir.Constant(form, list(range(count))), filled_with(code, number, form))


@lru_cache
def costs(bits: int) -> Any:
    """Returns the instruction ``costs(x)``. It returns the costs of a step for all `_VARIANTS`, shifted so that they
    can be added to words."""
    *inner, near, far = MAGNITUDES[bits]

    @instruction(lambda x: types.UniTuple(Vector(types.int32, x.lanes), len(_VARIANTS))(x))
    def costs_of_step(code, x):
        negative = code.fcmp_ordered("<", x, repeated(x.type, 0.0))
        lines = _Lines(code, code.select(negative, code.fneg(x), x))
        found = {}
        for subset, is_far in _VARIANTS:
            levels = _near_positive([*inner, far if is_far else near], subset)
            found[subset, is_far] = _rounded(code, _smallest(code, [lines.at(level) for level in levels]))
        # Opposite numbers have the costs of opposite subsets.
        listed = [
            code.select(negative, found[3 - subset, is_far], found[subset, is_far]) for subset, is_far in _VARIANTS
        ]
        return code.context.make_tuple(code, code.result, listed)

    return costs_of_step


class _Lines:
    """Generates the costs of non-negative numbers at levels. A cost is a linear function of the number. Each product is
    generated once."""

    def __init__(self, code, sizes):
        self._code = code
        self._sizes = sizes
        self._products = {}

    def at(self, level):
        """Generate code for the costs at a level."""
        size = abs(level)
        constant, slope = (repeated(self._sizes.type, float(number)) for number in costs_of(np.float64(size)))
        if size not in self._products:
            self._products[size] = self._code.fmul(self._sizes, slope)
        combine = self._code.fsub if level > 0 else self._code.fadd
        return combine(constant, self._products[size])


def _near_positive(magnitudes: Sequence[float], subset: int) -> list[float]:
    """Returns the levels of a subset that can be nearest to a non-negative number."""
    levels = [-size for size in reversed(magnitudes)] + list(magnitudes)
    own = levels[subset::4]
    positive = [level for level in own if level > 0]
    negative = max((level for level in own if level < 0), default=-math.inf)
    return positive if positive and -negative > positive[0] else [negative, *positive]


def _smallest(code, vectors):
    """Generate code for the elementwise minimum of vectors of floats."""
    least, *others = vectors
    for other in others:
        least = code.select(code.fcmp_ordered("<", other, least), other, least)
    return least


def _rounded(code, cost):
    """Generate code for costs rounded to integers, times 2^`PATH`."""
    integer = ir.VectorType(ir.IntType(32), cost.type.count)
    bits = code.bitcast(code.fadd(cost, repeated(cost.type, _ROUNDER)), integer)
    return code.shl(bits, repeated(integer, PATH))


@instruction(lambda like: types.UniTuple(Vector(types.int32, like.lanes), STATES)(like))
def first_words(code, like):
    """Returns the words of all states before the first step, as vectors with as many numbers as ``like``."""
    form = ir.VectorType(ir.IntType(32), like.type.count)
    words = [repeated(form, NEVER << PATH if state else 0) for state in range(STATES)]
    return code.context.make_tuple(code, code.result, words)


@instruction(lambda words: words(words))
def renewed(code, words):
    """Returns the words at the start of a segment, from the words at the end of the segment before."""
    old = cgutils.unpack_tuple(code, words)
    mask = repeated(old[0].type, -1 << PATH)
    first = code.and_(old[0], mask)
    costs = [code.sub(code.and_(word, mask), first) for word in old]
    new = [code.or_(cost, repeated(cost.type, state)) for state, cost in enumerate(costs)]
    return code.context.make_tuple(code, code.result, new)


@instruction(lambda words, costs, step: words(words, costs, types.int64))
def advanced(code, words, costs, step):
    """Returns the words of all states after one more step. ``step`` is the number of the step in its segment."""
    old = cgutils.unpack_tuple(code, words)
    costs = dict(zip(_VARIANTS, cgutils.unpack_tuple(code, costs), strict=True))
    form = old[0].type
    # A window's lower bits are the state before, its upper bits are the state after.
    through = [code.add(old[window & (STATES - 1)], costs[_variant(window)]) for window in range(WINDOWS)]
    place = code.add(code.trunc(step, form.element), form.element(MEMORY))
    bit = filled_with(code, code.shl(form.element(1), place), form)
    new = []
    for state, (left, right) in enumerate(zip(through[::2], through[1::2], strict=True)):
        word = code.select(code.icmp_signed("<", right, left), right, left)
        new.append(code.or_(word, bit) if state >> (MEMORY - 1) else word)
    return code.context.make_tuple(code, code.result, new)


@instruction(lambda words: words.dtype(words))
def smallest_bits(code, words):
    """Returns the bits of the best sequence among all states."""
    least, *others = cgutils.unpack_tuple(code, words)
    for other in others:
        least = code.select(code.icmp_signed("<", other, least), other, least)
    return code.and_(least, repeated(least.type, (1 << PATH) - 1))


@instruction(lambda words, bits: words.dtype(words, bits))
def bits_of_state(code, words, bits):
    """Returns, for each sequence, the bits of the word of one state. The lowest bits of ``bits``, which are the bits of
    the segment that follows, select the state."""
    listed = cgutils.unpack_tuple(code, words)
    for place in range(MEMORY):
        is_set = bit_is_set(code, bits, place)
        listed = [code.select(is_set, *pair) for pair in zip(listed[1::2], listed[::2], strict=True)]
    return code.and_(listed[0], repeated(listed[0].type, (1 << PATH) - 1))


@lru_cache
def numbers_of_levels(bits: int) -> Any:
    """Returns the instruction ``numbers(x, windows)``. It returns the number of the level nearest to each x in the
    alphabet of its window."""
    thresholds = thresholds_of(alphabets(MAGNITUDES[bits]))

    @instruction(lambda x, windows: windows(x, windows))
    def numbers(code, x, windows):
        look_up = _finder(code, windows, single=True)
        form = windows.type
        number = ir.Constant(form, [0] * form.count)
        for place in reversed(range(bits - 1)):
            # The middle thresholds of the remaining ranges: one for each value of the bits that are already found.
            middle = thresholds[:, (1 << place) - 1 :: 2 << place]
            tables = [look_up(column, x.type) for column in middle.T]
            threshold = by_bits(code, tables, number, place + 1)
            bit = code.select(code.fcmp_ordered(">=", x, threshold), repeated(form, 1 << place), repeated(form, 0))
            number = code.or_(number, bit)
        return number

    return numbers


@lru_cache
def levels(bits: int) -> Any:
    """Returns the instruction ``levels(codes, windows, like)``. It returns the levels of codes, as a vector like
    ``like``."""
    alphabet = alphabets(MAGNITUDES[bits])

    @instruction(lambda codes, windows, like: like(codes, windows, like))
    def levels_of_codes(code, codes, windows, like):
        look_up = _finder(code, windows, single=isinstance(like.type.element, ir.FloatType))
        tables = [look_up(column, like.type) for column in alphabet.T]
        return by_bits(code, tables, codes, 0)

    return levels_of_codes


def _finder(code, windows, *, single: bool):
    """Returns a function that generates code to look up the numbers of windows, from a table with one for each window.

    One instruction looks up fp32 numbers in a table of sixteen, another in a table of eight. Windows with the same
    alphabet have the same numbers, so eight are enough.

    Args:
        code: see `instruction`.
        windows: the windows.
        single: whether the numbers are fp32.
    """
    features = features_of(code)
    if single and "+avx512f" in features and windows.type.count == WINDOWS:
        return lambda table, form: permuted(
            code, "llvm.x86.avx512.permvar.sf.512", ir.Constant(form, [float(number) for number in table]), windows
        )
    variants = [_VARIANTS.index(_variant(window)) for window in range(WINDOWS)]
    firsts = [variants.index(place) for place in range(len(_VARIANTS))]
    places = _sixteen(code, variants, windows, has_permutes="+avx2" in features)

    def look_up(table, form):
        numbers = [float(table[first]) for first in firsts]
        numbers += [0.0] * (EIGHT - len(numbers))
        return looked_up(code, places, ir.Constant(form, numbers * (form.count // EIGHT)))

    return look_up


def _sixteen(code, table, windows, *, has_permutes: bool):
    """Generate code that looks up an integer for each window, in a table of sixteen."""
    if not has_permutes:
        return by_bits(code, [repeated(windows.type, number) for number in table], windows, 0)
    eight = ir.VectorType(windows.type.element, EIGHT)
    low, high = (ir.Constant(eight, half) for half in (table[:EIGHT], table[EIGHT:]))

    def of_part(part):
        halves = [permuted(code, "llvm.x86.avx2.permd", half, part) for half in (low, high)]
        return code.select(bit_is_set(code, part, MEMORY), halves[1], halves[0])

    return in_parts(code, windows, of_part)
