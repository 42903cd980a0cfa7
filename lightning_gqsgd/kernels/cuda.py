"""Fast kernels on CUDA devices, in Triton: one pass over memory per stage, and no wait for the device.

The functions and their arguments are those of `reference`, where they are described; the codes are the same. Block
tables are on the device; `decode` and `decode_sum` return the number of non-finite blocks as a tensor there.

A program has a tile of whole blocks, of 4096 coordinates or one block, in two halves: coordinates p and p + half of a
block are at the same place of the two, and share a hash and, below 8 bits, a byte. Coordinates are read once, and stay
in registers until codes leave. Tiles are of one of three kinds: where all blocks have the full length, no access is
masked, and codes move 16 bytes at a time; where they also begin at multiples of 16 bytes, so do coordinates. The third
kind, with the ends of parameters, is slower. What a codec fixes is a constant of a compiled kernel, so that each has
kernels of its own.

Arithmetic is that of `reference`: products and sums are not contracted, divisions are rounded correctly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gqsgd import layout
from lightning_gqsgd.kernels import wire as format_
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, Key, Kind, Quantiser, Share, scale_format

#: Coordinates of a tile, where blocks are not larger: 32 for each of 128 threads.
_TILE = 4096

_START = tl.constexpr(layout.START)
_LENGTH = tl.constexpr(layout.LENGTH)
_PARAMETER = tl.constexpr(layout.PARAMETER)
_INDEX = tl.constexpr(layout.INDEX)
_SCALE = tl.constexpr(layout.SCALE)
_CODES = tl.constexpr(layout.CODES)
_RAW = tl.constexpr(layout.RAW)
_COLUMNS = tl.constexpr(layout.COLUMNS)
_ALIGNMENT = tl.constexpr(layout.ALIGNMENT)
_GOLDEN = tl.constexpr(format_.GOLDEN)
_MULTIPLY_1 = tl.constexpr(format_.MULTIPLY_1)
_MULTIPLY_2 = tl.constexpr(format_.MULTIPLY_2)
_FIRST = tl.constexpr(format_.DITHER_FIRST)
_LANES = tl.constexpr(16)  # of sums, see `reference.block_moments`


class _Constants(NamedTuple):
    """The quantiser, the number format and the shape of tiles; ``c`` below.

    Entries without a comment are those of `wire.Quantiser` and `wire.ScaleFormat`.
    """

    compute: tl.dtype  # what coordinates are computed in
    integer: tl.dtype  # as wide
    shift: int
    infinity: int
    tiny: int
    mask: int  # all bits but the sign's
    scale: tl.dtype  # of a scale on the wire
    largest: float  # the largest finite number
    up: float  # 1 + 2 ulp
    rows: int  # blocks of a tile, a power of two
    stages: int  # log2 of half
    half: int  # coordinates of a tile's half of a block, a power of two
    block: int  # coordinates of a full block
    may_be_full: bool  # whether full blocks fill their halves, and are handled apart
    exponential: bool
    bits: int
    words: bool  # lanes are those of 64-bit words
    nearest: bool
    always_stochastic: bool
    adaptive: bool
    stochastic_from: float
    levels: int
    odd_levels: int
    magnitudes: int
    cut: int  # bits that an exponential code drops of a float
    offset: int  # what is left of 1.0, less its magnitude
    smallest: float  # the smallest exponential level
    per_smallest: float  # its inverse
    shrink: float  # 2^-headroom
    kept: int


# --- the table and the hash ------------------------------------------------------------------------------------------


@triton.jit
def _column(table, row, inside, COLUMN: tl.constexpr):
    return tl.load(table + row * _COLUMNS + COLUMN, mask=inside, other=0)


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
def _block_keys(table, row, inside, k0, k1):
    """a and b of the blocks' hash, see `wire`. Keys are int32, with the bits of unsigned ones."""
    parameter = _column(table, row, inside, _PARAMETER).to(tl.uint32)
    index = _column(table, row, inside, _INDEX).to(tl.uint32)
    a = _mix(_mix(k0.to(tl.uint32, bitcast=True) ^ parameter) + index * _GOLDEN)
    b = _mix(_mix(k1.to(tl.uint32, bitcast=True) + parameter) ^ index)
    return a, b


@triton.jit
def _hash(p, a, b):
    return _finish(_start(p.to(tl.uint32) + a[:, None]) ^ b[:, None])


@triton.jit
def _draws(table, row, inside, n, k0, k1, c: tl.constexpr, FULL: tl.constexpr):
    """The 16-bit integers of the dither, uint32, of both halves."""
    a, b = _block_keys(table, row, inside, k0, k1)
    p = tl.arange(0, c.half)[None, :]
    if FULL:
        h = _hash(p, a, b)
        first, second = h & 0xFFFF, h >> 16
    else:
        first, second = _draw_at(p, n, a, b), _draw_at(p + c.half, n, a, b)
    return first, second


@triton.jit
def _draw_at(j, n, a, b):
    half = ((n + 1) // 2)[:, None]
    beyond = j >= half
    h = _hash(tl.where(beyond, j - half, j), a, b)
    return tl.where(beyond, h >> 16, h & 0xFFFF)


# --- numbers ----------------------------------------------------------------------------------------------------------


@triton.jit
def _one_and(draw):
    """1 + draw/2^16, by its bits: a GPU converts integers at a quarter of the speed of other arithmetic."""
    return ((draw << 7) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _byte_as_float(code):
    """An int32 from 0 to 255, in the same way."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _divided(x, y, c: tl.constexpr):
    return x / y if c.compute == tl.float64 else tl.div_rn(x, y)


@triton.jit
def _magnitudes(v, c: tl.constexpr):
    """Magnitudes as integers, which are ordered like them."""
    return v.to(c.integer, bitcast=True) & c.mask


@triton.jit
def _rounded_up(bits, c: tl.constexpr):
    """See `wire.ScaleFormat.rounded_up`."""
    up = tl.minimum(tl.maximum(bits, c.tiny), c.infinity) + ((1 << c.shift) - 1)
    up = tl.minimum((up >> c.shift) << c.shift, c.infinity - 1)  # the largest finite number, if rounded up to infinity
    return tl.where(bits >= c.infinity, c.infinity, tl.where(bits > 0, up, 0)).to(c.integer)


@triton.jit
def _scale_of(bits, c: tl.constexpr):
    """The scales with these bits; any number where they are zero or not finite."""
    return tl.minimum(tl.maximum(bits, c.tiny), c.infinity - 1).to(c.integer).to(c.compute, bitcast=True)


@triton.jit
def _clamped(v, limit):
    return tl.minimum(tl.maximum(v, -limit), limit)


@triton.jit
def _any_not_finite(a, b, n, c: tl.constexpr, FULL: tl.constexpr):
    """Which rows have a coordinate that is NaN or infinite."""
    bad_a, bad_b = (a - a) != 0, (b - b) != 0
    if not FULL:
        p = tl.arange(0, c.half)[None, :]
        bad_a, bad_b = bad_a & (p < n[:, None]), bad_b & (p + c.half < n[:, None])
    return tl.max((bad_a | bad_b).to(tl.int32), axis=1) > 0


# --- coordinates ------------------------------------------------------------------------------------------------------
# Places are divided and multiplied by what they are multiples of, so that Triton sees it: a hint (`tl.multiple_of`) on
# what a function is given is lost when the function is inlined.


@triton.jit
def _aligned(start, x):
    """Whether all blocks of a tile begin at multiples of 16 bytes, if ``x`` does."""
    ELEMENTS: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    return tl.max(start % ELEMENTS, axis=0) == 0


@triton.jit
def _load(x, start, n, c: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    """Both halves in the compute type, zero beyond the ends of blocks; ``start``: of each block, in elements."""
    ELEMENTS: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth if ALIGNED else 1
    p = tl.arange(0, c.half)[None, :]
    places = x + (start // ELEMENTS * ELEMENTS)[:, None] + p
    if FULL:
        a, b = tl.load(places), tl.load(places + c.half)
    else:
        a = tl.load(places, mask=p < n[:, None], other=0)
        b = tl.load(places + c.half, mask=p + c.half < n[:, None], other=0)
    return a.to(c.compute), b.to(c.compute)


@triton.jit
def _store(a, b, x, start, n, some, c: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    """Write both halves of some rows, in the type of ``x``."""
    ELEMENTS: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth if ALIGNED else 1
    p = tl.arange(0, c.half)[None, :]
    places = x + (start // ELEMENTS * ELEMENTS)[:, None] + p
    mask_a, mask_b = some[:, None], some[:, None]
    if not FULL:
        mask_a, mask_b = mask_a & (p < n[:, None]), mask_b & (p + c.half < n[:, None])
    tl.store(places, a.to(x.dtype.element_ty), mask=mask_a)
    tl.store(places + c.half, b.to(x.dtype.element_ty), mask=mask_b)


@triton.jit
def _record(wire, at, ELEMENT: tl.constexpr):
    """Where blocks' codes, or raw coordinates, begin: pointers to a type. ``at``: bytes from ``wire`` on."""
    return (wire + at // _ALIGNMENT * _ALIGNMENT).to(tl.pointer_type(ELEMENT), bitcast=True)


@triton.jit
def _raw_places(wire, at, n, some, c: tl.constexpr):
    """Pointers to raw coordinates of both halves, and which of them there are."""
    p = tl.arange(0, c.half)[None, :]
    places = _record(wire, at, c.compute)[:, None] + p
    return places, places + c.half, some[:, None] & (p < n[:, None]), some[:, None] & (p + c.half < n[:, None])


# --- rotation ---------------------------------------------------------------------------------------------------------


@triton.jit
def _turn(a, b, n, roots, c: tl.constexpr, FULL: tl.constexpr):
    """Hadamard transforms of rows, in parts of descending powers of two.

    Coordinate j of n belongs to a part of 2^k coordinates, where k is the highest bit in which j and n differ; parts
    begin at multiples of their length. So a butterfly of distance h concerns it if j ^ n is at least 2 h.
    ``roots``: 2^(-k/2) for each k, in the compute type.
    """
    STAGES: tl.constexpr = c.stages
    for stage in tl.static_range(STAGES):
        a = _butterflies(a, n, 0, stage, c, FULL)
        b = _butterflies(b, n, c.half, stage, c, FULL)
    if FULL:
        root = tl.load(roots + c.stages + 1)
        turned_a, turned_b = (a + b) * root, (a - b) * root
    else:
        difference_a = tl.arange(0, c.half)[None, :] ^ n[:, None]
        difference_b = (tl.arange(0, c.half)[None, :] + c.half) ^ n[:, None]
        far = difference_a >= 2 * c.half
        turned_a = tl.where(far, a + b, a) * _roots_at(difference_a, roots)
        turned_b = tl.where(far, a - b, b) * _roots_at(difference_b, roots)
    return turned_a, turned_b


@triton.jit
def _roots_at(difference, roots):
    exponent = (difference.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return tl.load(roots + tl.maximum(exponent, 0))


@triton.jit
def _butterflies(v, n, first, STAGE: tl.constexpr, c: tl.constexpr, FULL: tl.constexpr):
    DISTANCE: tl.constexpr = 1 << STAGE
    PAIRS: tl.constexpr = c.half // (2 * DISTANCE)
    ROWS: tl.constexpr = c.rows
    HALF: tl.constexpr = c.half
    left, right = tl.split(tl.trans(tl.reshape(v, (ROWS, PAIRS, 2, DISTANCE)), 0, 1, 3, 2))
    plus, minus = left + right, left - right
    if not FULL:
        j = first + tl.arange(0, PAIRS)[:, None] * (2 * DISTANCE) + tl.arange(0, DISTANCE)[None, :]
        some = (j[None, :, :] ^ n[:, None, None]) >= 2 * DISTANCE
        plus, minus = tl.where(some, plus, left), tl.where(some, minus, right)
    return tl.reshape(tl.trans(tl.join(plus, minus), 0, 1, 3, 2), (ROWS, HALF))


@triton.jit
def _rotate(
    a, b, table, row, inside, n, raw, r0, r1, roots, INVERSE: tl.constexpr, c: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """See `reference.rotate`; raw rows stay as they are."""
    draw_a, draw_b = _draws(table, row, inside, n, r0, r1, c, FULL)
    sign_a, sign_b = tl.where(draw_a < 32768, -1.0, 1.0), tl.where(draw_b < 32768, -1.0, 1.0)
    if INVERSE:
        turned_a, turned_b = _turn(a, b, n, roots, c, FULL)
        turned_a, turned_b = turned_a * sign_a, turned_b * sign_b
    else:
        turned_a, turned_b = _turn(a * sign_a, b * sign_b, n, roots, c, FULL)
    return tl.where(raw[:, None], a, turned_a), tl.where(raw[:, None], b, turned_b)


# --- packing: see `layout.code_bytes` and `reference._runs` -----------------------------------------------------------


@triton.jit
def _plane_start(n, LOW: tl.constexpr, c: tl.constexpr, FULL: tl.constexpr):
    """Bytes of the bit planes that have the codes' lower LOW bits, [rows, 1] or a number."""
    if FULL:
        first = LOW * (c.half // 4)
    else:
        first = (n * 0)[:, None]
        for level in tl.static_range(3):
            if LOW & (8 >> level):
                first += ((n * (8 >> level) + 7) // 8)[:, None]
    return first


@triton.jit
def _pack(code_a, code_b, n, some, wire, at, c: tl.constexpr, FULL: tl.constexpr):
    """Write the codes of some rows, int32."""
    if c.words:
        _pack_words(code_a, code_b, n, some, wire, at, c)
    else:
        record = _record(wire, at, tl.uint8)[:, None]
        for level in tl.static_range(4):
            if c.bits & (8 >> level):
                _pack_plane(code_a, code_b, n, some, record, 8 >> level, c, FULL)


@triton.jit
def _pack_plane(code_a, code_b, n, some, record, PLANE: tl.constexpr, c: tl.constexpr, FULL: tl.constexpr):
    LOW: tl.constexpr = c.bits & (16 - 2 * PLANE)
    places = record + _plane_start(n, LOW, c, FULL)
    if PLANE == 8:
        _pack_bytes(code_a, code_b, n, some, places, c, FULL)
    elif FULL:
        _pack_lanes(code_a >> LOW, code_b >> LOW, some, places, PLANE, c)
    else:
        _pack_gathered(code_a >> LOW, code_b >> LOW, n, some, places, PLANE, c)


@triton.jit
def _pack_bytes(code_a, code_b, n, some, places, c: tl.constexpr, FULL: tl.constexpr):
    p = tl.arange(0, c.half)[None, :]
    mask_a, mask_b = some[:, None], some[:, None]
    if not FULL:
        mask_a, mask_b = mask_a & (p < n[:, None]), mask_b & (p + c.half < n[:, None])
    tl.store(places + p, code_a.to(tl.uint8), mask=mask_a)
    tl.store(places + c.half + p, code_b.to(tl.uint8), mask=mask_b)


@triton.jit
def _pack_lanes(code_a, code_b, some, places, PLANE: tl.constexpr, c: tl.constexpr):
    """Of full blocks: the first half of a block has the lower four bits of every byte, the second half the upper."""
    LANES: tl.constexpr = 4 // PLANE
    ROWS: tl.constexpr = c.rows
    WORDS: tl.constexpr = c.half // LANES
    words = (code_a & ((1 << PLANE) - 1)) | ((code_b & ((1 << PLANE) - 1)) << 4)
    if LANES > 1:
        lane = tl.arange(0, LANES)[None, :, None]
        words = tl.sum(tl.reshape(words, (ROWS, LANES, WORDS)) << (lane * PLANE), axis=1)
    tl.store(places + tl.arange(0, c.half // LANES)[None, :], words.to(tl.uint8), mask=some[:, None])


@triton.jit
def _pack_gathered(code_a, code_b, n, some, places, PLANE: tl.constexpr, c: tl.constexpr):
    """Of blocks of any length."""
    ROWS: tl.constexpr = c.rows
    WIDTH: tl.constexpr = c.half * PLANE // 4
    w = tl.arange(0, c.half * PLANE // 4)[None, :]
    count = ((n * PLANE + 7) // 8)[:, None]
    words = tl.zeros((ROWS, WIDTH), tl.int32)
    for lane in tl.static_range(8 // PLANE):
        part = _codes_at(code_a, code_b, w + lane * count, n, c) & ((1 << PLANE) - 1)
        words |= part << (lane * PLANE)
    tl.store(places + w, words.to(tl.uint8), mask=some[:, None] & (w < count))


@triton.jit
def _pack_words(code_a, code_b, n, some, wire, at, c: tl.constexpr):
    LANES: tl.constexpr = 64 // c.bits  # 9 or more
    ROWS: tl.constexpr = c.rows
    WIDTH: tl.constexpr = c.half // 4
    w = tl.arange(0, c.half // 4)[None, :]
    count = ((n + LANES - 1) // LANES)[:, None]
    words = tl.zeros((ROWS, WIDTH), tl.int64)
    for lane in tl.static_range(LANES):
        words |= _codes_at(code_a, code_b, w + lane * count, n, c).to(tl.int64) << (lane * c.bits)
    tl.store(_record(wire, at, tl.int64)[:, None] + w, words, mask=some[:, None] & (w < count))


@triton.jit
def _codes_at(code_a, code_b, j, n, c: tl.constexpr):
    """Codes of coordinates j, zero beyond the ends of blocks."""
    one = tl.gather(code_a, tl.minimum(j, c.half - 1), axis=1)
    other = tl.gather(code_b, tl.minimum(tl.maximum(j - c.half, 0), c.half - 1), axis=1)
    return tl.where(j < n[:, None], tl.where(j < c.half, one, other), 0)


@triton.jit
def _unpack(wire, at, n, some, c: tl.constexpr, FULL: tl.constexpr):
    """Codes of both halves, int32; zero in other rows than some, and beyond the ends of blocks."""
    ROWS: tl.constexpr = c.rows
    HALF: tl.constexpr = c.half
    p = tl.arange(0, c.half)[None, :]
    code_a = tl.zeros((ROWS, HALF), tl.int32)
    code_b = tl.zeros((ROWS, HALF), tl.int32)
    if c.words:
        words = _record(wire, at, tl.int64)[:, None]
        code_a = _word_lane(words, p, n, some, c)
        code_b = _word_lane(words, p + c.half, n, some, c)
    else:
        record = _record(wire, at, tl.uint8)[:, None]
        for level in tl.static_range(4):
            if c.bits & (8 >> level):
                part_a, part_b = _unpack_plane(n, some, record, 8 >> level, c, FULL)
                code_a |= part_a
                code_b |= part_b
    return code_a, code_b


@triton.jit
def _unpack_plane(n, some, record, PLANE: tl.constexpr, c: tl.constexpr, FULL: tl.constexpr):
    LOW: tl.constexpr = c.bits & (16 - 2 * PLANE)
    MASK: tl.constexpr = (1 << PLANE) - 1
    places = record + _plane_start(n, LOW, c, FULL)
    p = tl.arange(0, c.half)[None, :]
    if FULL and PLANE == 8:
        code_a = tl.load(places + p, mask=some[:, None], other=0).to(tl.int32)
        code_b = tl.load(places + c.half + p, mask=some[:, None], other=0).to(tl.int32)
    elif FULL:
        COUNT: tl.constexpr = c.half * PLANE // 4
        word = tl.load(places + p % COUNT, mask=some[:, None], other=0).to(tl.int32) >> (p // COUNT * PLANE)
        code_a, code_b = word & MASK, (word >> 4) & MASK
    else:
        code_a, code_b = _plane_lane(places, p, n, some, PLANE), _plane_lane(places, p + c.half, n, some, PLANE)
    return code_a << LOW, code_b << LOW


@triton.jit
def _plane_lane(places, j, n, some, PLANE: tl.constexpr):
    count = tl.maximum((n * PLANE + 7) // 8, 1)[:, None]
    word = tl.load(places + j % count, mask=some[:, None] & (j < n[:, None]), other=0).to(tl.int32)
    return (word >> (j // count * PLANE)) & ((1 << PLANE) - 1)


@triton.jit
def _word_lane(places, j, n, some, c: tl.constexpr):
    LANES: tl.constexpr = 64 // c.bits
    count = tl.maximum((n + LANES - 1) // LANES, 1)[:, None]
    word = tl.load(places + j % count, mask=some[:, None] & (j < n[:, None]), other=0)
    return (word >> (j // count * c.bits).to(tl.int64)).to(tl.int32) & ((1 << c.bits) - 1)


# --- codes ------------------------------------------------------------------------------------------------------------


@triton.jit
def _is_stochastic(a, b, n, c: tl.constexpr):
    """Which blocks are rounded stochastically, see `wire.Quantiser`."""
    if c.adaptive:
        bits_a, bits_b = _magnitudes(a, c), _magnitudes(b, c)
        others = tl.sum((tl.minimum(bits_a, 1) + tl.minimum(bits_b, 1)).to(tl.int32), axis=1)
        stochastic = (n - others).to(tl.float64) > n.to(tl.float64) * tl.full((), c.stochastic_from, tl.float64)
    else:
        stochastic = (n >= 0) & c.always_stochastic
    return stochastic


@triton.jit
def _middle_of(stochastic, c: tl.constexpr):
    """The code for zero, as a number."""
    return tl.where(stochastic, (c.odd_levels - 1) * 0.5, (c.levels - 1) * 0.5)


@triton.jit
def _linear_codes(v, draw, scale, used, stochastic, c: tl.constexpr):
    zero = tl.where(stochastic, c.odd_levels // 2, c.levels // 2)
    less = zero.to(tl.float32) - _middle_of(stochastic, c).to(tl.float32)
    middle = _middle_of(stochastic, c).to(c.compute)
    inverse = _divided(middle, scale, c)
    # The largest coordinate is to reach the last level.
    inverse = tl.where(scale * inverse < middle, inverse * tl.full((), c.up, c.compute), inverse)
    y = _clamped(v * inverse[:, None], middle[:, None])
    if c.nearest:
        u = tl.where(v == 0, _one_and(draw) + (_FIRST - 1), 0.5) - less[:, None]
    else:
        u = _one_and(draw) - (less + (1 - _FIRST))[:, None]
    y += u.to(c.compute)
    code = tl.floor(y).to(tl.int32)
    if c.nearest:
        code = tl.where((y < 0) & (code == 0), -1, code)  # a GPU's floor takes denormal numbers for zero
    return code * used[:, None] + (zero * used)[:, None]


@triton.jit
def _exponential_codes(v, draw, scale, used, c: tl.constexpr):
    inverse = _divided(scale * 0 + 1, scale, c)
    y = tl.minimum(tl.abs(v) * inverse[:, None], 1) * tl.full((), c.shrink, c.compute)
    random = (2 * draw + 1).to(c.integer) << (c.cut - 17)  # the dither in units of the last bit
    magnitude = ((_magnitudes(y, c) + random) >> c.cut) - c.offset
    uniform = (_one_and(draw) + (_FIRST - 1)).to(c.compute)
    reaches = (y * tl.full((), c.per_smallest, c.compute) > uniform).to(c.integer)
    magnitude = tl.where(y < tl.full((), c.smallest, c.compute), reaches, magnitude).to(tl.int32)
    return tl.where((magnitude > 0) & (used > 0)[:, None], magnitude | ((v < 0).to(tl.int32) << (c.bits - 1)), 0)


@triton.jit
def _linear_values(code, offset, scale, middle, stochastic, c: tl.constexpr):
    """Coordinates that (sums of) codes, int32, stand for; ``middle``: the code for zero, ``offset``: the same,
    dithered, [rows, half] or [rows, 1]."""
    step = _divided(scale, middle, c)
    short = stochastic & (step * middle < scale)  # the last level is to stand for the scale, exactly
    step = tl.where(short, step * tl.full((), c.up, c.compute), step)
    limit = tl.where(stochastic, scale, tl.full((), c.largest, c.compute))
    return _clamped((_byte_as_float(code) - offset).to(c.compute) * step[:, None], limit[:, None])


@triton.jit
def _exponential_values(code, scale, c: tl.constexpr):
    magnitude = code & ((1 << (c.bits - 1)) - 1)
    y = ((magnitude + c.offset).to(c.integer) << c.cut).to(c.compute, bitcast=True)
    value = _clamped(y * scale[:, None], tl.full((), c.largest, c.compute))
    return tl.where(magnitude > 0, tl.where((code >> (c.bits - 1)) > 0, -value, value), 0)


@triton.jit
def _write(
    a, b, table, row, inside, n, raw, wire, base, scale_bits, k0, k1, c: tl.constexpr, GIVEN: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Write the records of a tile; ``scale_bits``: the scales, if they are given."""
    at = _column(table, row, inside, _CODES) - base
    if not FULL:
        places_a, places_b, mask_a, mask_b = _raw_places(wire, at, n, raw, c)
        tl.store(places_a, a, mask=mask_a)
        tl.store(places_b, b, mask=mask_b)
    if not GIVEN:
        largest = tl.maximum(tl.max(_magnitudes(a, c), axis=1), tl.max(_magnitudes(b, c), axis=1))
        scale_bits = _rounded_up(largest, c)
    coded = inside & (raw == 0)
    finite = scale_bits < c.infinity
    used = tl.minimum(tl.where(finite, scale_bits, 0), 1).to(tl.int32)  # 1 or 0: codes are 0 without a scale
    scale = _scale_of(scale_bits, c)
    stochastic = _is_stochastic(a, b, n, c)
    place = _column(table, row, inside, _SCALE)
    sent = ((scale_bits + 1) >> c.shift << 1) | stochastic.to(c.integer)
    scales = (wire + (place - base)).to(tl.pointer_type(c.scale), bitcast=True)
    tl.store(scales, tl.where(finite, sent, -1).to(c.scale), mask=coded & (place >= 0))

    draw_a, draw_b = _draws(table, row, inside, n, k0, k1, c, FULL)
    if c.exponential:
        code_a, code_b = _exponential_codes(a, draw_a, scale, used, c), _exponential_codes(b, draw_b, scale, used, c)
    else:
        code_a = _linear_codes(a, draw_a, scale, used, stochastic, c)
        code_b = _linear_codes(b, draw_b, scale, used, stochastic, c)
    _pack(code_a, code_b, n, coded, wire, at, c, FULL)


@triton.jit
def _mean(
    wires, stride, table, row, inside, n, raw, base, keys, sources, EACH: tl.constexpr, REST: tl.constexpr,
    c: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Mean of a tile over messages ``stride`` bytes apart, added up in their order; and which coded rows are NaN."""
    ROWS: tl.constexpr = c.rows
    HALF: tl.constexpr = c.half
    at = _column(table, row, inside, _CODES) - base
    place = _column(table, row, inside, _SCALE) - base
    coded = inside & (raw == 0)
    first = tl.zeros((ROWS,), c.compute)  # of all sums of a row: NaN, if a message's scale is not finite
    for source in range(sources):
        code = _scale_code(wires + source * stride, place, coded, c)
        first = tl.where((code >> 1) > (c.infinity >> c.shift), float("nan"), first)
    a = tl.zeros((ROWS, HALF), c.compute) + first[:, None]
    b = a
    for source in range(sources):
        wire = wires + source * stride
        if not FULL:
            places_a, places_b, mask_a, mask_b = _raw_places(wire, at, n, raw, c)
            a += tl.load(places_a, mask=mask_a, other=0) * EACH
            b += tl.load(places_b, mask=mask_b, other=0) * EACH
        code = _scale_code(wire, place, coded, c)
        bits = (code >> 1) << c.shift
        used = (bits > 0) & (bits <= c.infinity)  # the largest finite number travels as if it were infinity
        scale = tl.where(used, _scale_of(bits, c) * EACH, 0)
        code_a, code_b = _unpack(wire, at, n, used, c, FULL)
        if c.exponential:
            value_a, value_b = _exponential_values(code_a, scale, c), _exponential_values(code_b, scale, c)
        else:
            stochastic = (code & 1) == 1
            middle = _middle_of(stochastic, c)
            offset = middle.to(tl.float32)[:, None]
            if c.always_stochastic or c.nearest:
                offset_a, offset_b = offset, offset
            else:
                k0, k1 = tl.load(keys + 2 * source), tl.load(keys + 2 * source + 1)
                draw_a, draw_b = _draws(table, row, inside, n, k0, k1, c, FULL)
                share = tl.where(stochastic, 0.0, 1.0)[:, None]
                offset += share * (_FIRST - 1.5)
                offset_a, offset_b = tl.fma(_one_and(draw_a), share, offset), tl.fma(_one_and(draw_b), share, offset)
            value_a = _linear_values(code_a, offset_a, scale, middle.to(c.compute), stochastic, c)
            value_b = _linear_values(code_b, offset_b, scale, middle.to(c.compute), stochastic, c)
        a += value_a
        b += value_b
    if REST != 1:
        rest = tl.full((1, 1), REST, c.compute)
        a, b = _divided(a, rest, c), _divided(b, rest, c)
    if not FULL:
        p = tl.arange(0, c.half)[None, :]
        a, b = tl.where(p < n[:, None], a, 0), tl.where(p + c.half < n[:, None], b, 0)
    return a, b, first != first


@triton.jit
def _scale_code(wire, place, coded, c: tl.constexpr):
    """Scales on the wire, int64; zero in other rows."""
    return tl.load((wire + place).to(tl.pointer_type(c.scale), bitcast=True), mask=coded, other=0).to(tl.int64)


@triton.jit
def _count_bad(bad, counter):
    found = tl.sum(bad.to(tl.int32), axis=0)
    if found > 0:
        tl.atomic_add(counter, found)


# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _shape_of(table, count, c: tl.constexpr):
    """Numbers of this program's blocks, which of them there are, their lengths, and which are raw."""
    row = tl.program_id(0).to(tl.int64) * c.rows + tl.arange(0, c.rows)
    inside = row < count
    return row, inside, _column(table, row, inside, _LENGTH).to(tl.int32), _column(table, row, inside, _RAW) == 1


@triton.jit
def _kind_of(n, raw, start, x, c: tl.constexpr):
    """Kind of a tile: 2, all blocks are full, and aligned in ``x``; 1, they are full; 0, neither."""
    full = tl.min(tl.where(raw, 0, n), axis=0) == c.block
    return full.to(tl.int32) + (full & _aligned(start, x)).to(tl.int32)


@triton.jit
def _encode_tile(
    x, start, table, wire, maxima, row, inside, n, raw, base, k0, k1, r0, r1, roots, c: tl.constexpr,
    GIVEN: tl.constexpr, ROTATED: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    a, b = _load(x, start, n, c, FULL, ALIGNED)
    if ROTATED:
        a, b = _rotate(a, b, table, row, inside, n, raw, r0, r1, roots, False, c, FULL)
    scale_bits = tl.load(maxima + row, mask=inside, other=0) if GIVEN else n
    _write(a, b, table, row, inside, n, raw, wire, base, scale_bits, k0, k1, c, GIVEN, FULL)


@triton.jit(do_not_specialize=["count", "base", "k0", "k1", "r0", "r1"])
def _encode_kernel(
    x, table, wire, maxima, roots, count, base: tl.int64, k0, k1, r0, r1, c: tl.constexpr, GIVEN: tl.constexpr,
    ROTATED: tl.constexpr,
):  # fmt: skip
    row, inside, n, raw = _shape_of(table, count, c)
    start = _column(table, row, inside, _START)
    kind = _kind_of(n, raw, start, x, c) if c.may_be_full else 0
    if kind == 2:
        _encode_tile(
            x, start, table, wire, maxima, row, inside, n, raw, base, k0, k1, r0, r1, roots, c, GIVEN, ROTATED,
            True, True,
        )  # fmt: skip
    elif kind == 1:
        _encode_tile(
            x, start, table, wire, maxima, row, inside, n, raw, base, k0, k1, r0, r1, roots, c, GIVEN, ROTATED,
            True, False,
        )  # fmt: skip
    else:
        _encode_tile(
            x, start, table, wire, maxima, row, inside, n, raw, base, k0, k1, r0, r1, roots, c, GIVEN, ROTATED,
            False, False,
        )  # fmt: skip


@triton.jit
def _decode_tile(
    wires, stride, table, x, start, counter, row, inside, n, raw, base, keys, sources, r0, r1, roots,
    EACH: tl.constexpr, REST: tl.constexpr, c: tl.constexpr, ROTATED: tl.constexpr, FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    a, b, bad = _mean(wires, stride, table, row, inside, n, raw, base, keys, sources, EACH, REST, c, FULL)
    if ROTATED:
        a, b = _rotate(a, b, table, row, inside, n, raw, r0, r1, roots, True, c, FULL)
        bad |= _any_not_finite(a, b, n, c, FULL)
    elif not FULL:
        bad |= raw & _any_not_finite(a, b, n, c, FULL)
    _store(a, b, x, start, n, inside, c, FULL, ALIGNED)
    _count_bad(bad, counter)


@triton.jit(do_not_specialize=["count", "base", "r0", "r1"])
def _decode_kernel(
    wires, stride: tl.int64, table, x, counter, keys, roots, sources, count, base: tl.int64, r0, r1,
    EACH: tl.constexpr, REST: tl.constexpr, c: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    row, inside, n, raw = _shape_of(table, count, c)
    start = _column(table, row, inside, _START)
    kind = _kind_of(n, raw, start, x, c) if c.may_be_full else 0
    if kind == 2:
        _decode_tile(
            wires, stride, table, x, start, counter, row, inside, n, raw, base, keys, sources, r0, r1, roots, EACH,
            REST, c, ROTATED, True, True,
        )  # fmt: skip
    elif kind == 1:
        _decode_tile(
            wires, stride, table, x, start, counter, row, inside, n, raw, base, keys, sources, r0, r1, roots, EACH,
            REST, c, ROTATED, True, False,
        )  # fmt: skip
    else:
        _decode_tile(
            wires, stride, table, x, start, counter, row, inside, n, raw, base, keys, sources, r0, r1, roots, EACH,
            REST, c, ROTATED, False, False,
        )  # fmt: skip


@triton.jit
def _reduce_tile(
    wires, stride, table, out, row, inside, n, raw, base, keys, sources, k0, k1, EACH: tl.constexpr,
    REST: tl.constexpr, c: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    a, b, _ = _mean(wires, stride, table, row, inside, n, raw, base, keys, sources, EACH, REST, c, FULL)
    _write(a, b, table, row, inside, n, raw, out, base, n, k0, k1, c, False, FULL)


@triton.jit(do_not_specialize=["count", "base", "k0", "k1"])
def _reduce_kernel(
    wires, stride: tl.int64, table, out, keys, sources, count, base: tl.int64, k0, k1, EACH: tl.constexpr,
    REST: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    row, inside, n, raw = _shape_of(table, count, c)
    kind = _kind_of(n, raw, row, out, c) if c.may_be_full else 0
    if kind > 0:
        _reduce_tile(wires, stride, table, out, row, inside, n, raw, base, keys, sources, k0, k1, EACH, REST, c, True)
    else:
        _reduce_tile(wires, stride, table, out, row, inside, n, raw, base, keys, sources, k0, k1, EACH, REST, c, False)


@triton.jit
def _decode_sum_tile(
    wire, maxima, table, x, start, counter, row, inside, n, keys, sources, MIDDLE: tl.constexpr, c: tl.constexpr,
    FULL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = c.rows
    HALF: tl.constexpr = c.half
    bits = tl.load(maxima + row, mask=inside, other=0)
    bad, used = bits >= c.infinity, (bits > 0) & (bits < c.infinity)
    scale = tl.where(used, _scale_of(bits, c), 0)
    code_a, code_b = _unpack(wire, _column(table, row, inside, _CODES), n, used, c, FULL)
    middle = tl.full((ROWS,), MIDDLE, c.compute)
    if c.exponential:
        a, b = _exponential_values(code_a, scale * middle, c), _exponential_values(code_b, scale * middle, c)
    else:
        offset_a = tl.zeros((ROWS, HALF), tl.float32) + MIDDLE
        offset_b = offset_a
        if not c.always_stochastic:
            for source in range(sources):
                k0, k1 = tl.load(keys + 2 * source), tl.load(keys + 2 * source + 1)
                draw_a, draw_b = _draws(table, row, inside, n, k0, k1, c, FULL)
                offset_a += _one_and(draw_a) + (_FIRST - 1.5)
                offset_b += _one_and(draw_b) + (_FIRST - 1.5)
        stochastic = (n >= 0) & c.always_stochastic
        a = _linear_values(code_a, offset_a, scale, middle, stochastic, c)
        b = _linear_values(code_b, offset_b, scale, middle, stochastic, c)
    a, b = tl.where(bad[:, None], float("nan"), a), tl.where(bad[:, None], float("nan"), b)
    _store(a, b, x, start, n, inside, c, FULL, ALIGNED)
    _count_bad(bad, counter)


@triton.jit(do_not_specialize=["count"])
def _decode_sum_kernel(wire, maxima, table, x, counter, keys, sources, count, MIDDLE: tl.constexpr, c: tl.constexpr):
    row, inside, n, raw = _shape_of(table, count, c)
    start = _column(table, row, inside, _START)
    kind = _kind_of(n, raw, start, x, c) if c.may_be_full else 0
    if kind == 2:
        _decode_sum_tile(
            wire, maxima, table, x, start, counter, row, inside, n, keys, sources, MIDDLE, c,
            True, True,
        )  # fmt: skip
    elif kind == 1:
        _decode_sum_tile(
            wire, maxima, table, x, start, counter, row, inside, n, keys, sources, MIDDLE, c,
            True, False,
        )  # fmt: skip
    else:
        _decode_sum_tile(
            wire, maxima, table, x, start, counter, row, inside, n, keys, sources, MIDDLE, c,
            False, False,
        )  # fmt: skip


@triton.jit
def _rotate_tile(
    x, start, table, row, inside, n, raw, r0, r1, roots, INVERSE: tl.constexpr, c: tl.constexpr, FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    a, b = _load(x, start, n, c, FULL, ALIGNED)
    a, b = _rotate(a, b, table, row, inside, n, raw, r0, r1, roots, INVERSE, c, FULL)
    _store(a, b, x, start, n, inside & (raw == 0), c, FULL, ALIGNED)


@triton.jit(do_not_specialize=["count", "r0", "r1"])
def _rotate_kernel(x, table, roots, count, r0, r1, INVERSE: tl.constexpr, c: tl.constexpr):
    row, inside, n, raw = _shape_of(table, count, c)
    start = _column(table, row, inside, _START)
    kind = _kind_of(n, raw, start, x, c) if c.may_be_full else 0
    if kind == 2:
        _rotate_tile(
            x, start, table, row, inside, n, raw, r0, r1, roots, INVERSE, c,
            True, True,
        )  # fmt: skip
    elif kind == 1:
        _rotate_tile(
            x, start, table, row, inside, n, raw, r0, r1, roots, INVERSE, c,
            True, False,
        )  # fmt: skip
    else:
        _rotate_tile(
            x, start, table, row, inside, n, raw, r0, r1, roots, INVERSE, c,
            False, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count", "base", "k0", "k1"])
def _combine_kernel(mine, theirs, table, count, base: tl.int64, k0, k1, c: tl.constexpr):
    """See `reference.combine`."""
    row, inside, n, raw = _shape_of(table, count, c)
    at = _column(table, row, inside, _CODES) - base
    key_a, key_b = _block_keys(table, row, inside, k0, k1)
    p = tl.arange(0, c.half)[None, :]
    mine_a, mine_b = _unpack(mine, at, n, inside, c, False)
    theirs_a, theirs_b = _unpack(theirs, at, n, inside, c, False)
    code_a = _combined(mine_a, theirs_a, _hash(p, key_a, key_b), c)
    code_b = _combined(mine_b, theirs_b, _hash(p + c.half, key_a, key_b), c)
    _pack(code_a, code_b, n, inside, mine, at, c, False)


@triton.jit
def _combined(one, other, word, c: tl.constexpr):
    MASK: tl.constexpr = (1 << (c.bits - 1)) - 1
    swap = (other & MASK) > (one & MASK)
    large, small = tl.where(swap, other, one), tl.where(swap, one, other)
    a, b = large & MASK, small & MASK
    opposite = ((large ^ small) >> (c.bits - 1)) != 0
    distance = a - b - opposite.to(tl.int32)
    shift = tl.minimum(tl.maximum(32 - distance, 0), 31).to(tl.uint32)
    fires = ((distance <= 0) | ((distance <= 32) & ((word >> shift) == 0))).to(tl.int32)
    moved = tl.where(opposite, a - fires, tl.minimum(a + fires, c.magnitudes))
    moved = tl.where(opposite & (distance < 0), 0, moved)
    result = tl.where(b == 0, a, moved)
    return tl.where(result == 0, 0, (large & (1 << (c.bits - 1))) | result)


@triton.jit(do_not_specialize=["count"])
def _maxima_kernel(x, table, out, count, c: tl.constexpr):
    row, inside, n, raw = _shape_of(table, count, c)
    start, longest = _column(table, row, inside, _START), tl.max(n, axis=0)
    largest = (n * 0).to(c.integer)
    if (tl.min(n, axis=0) == longest) & (longest % c.block == 0) & _aligned(start, x):
        for first in range(0, longest, c.block):
            a, b = _load(x, start + first, n, c, True, True)
            largest = tl.maximum(largest, tl.max(tl.maximum(_magnitudes(a, c), _magnitudes(b, c)), axis=1))
    else:
        for first in range(0, longest, c.block):
            a, b = _load(x, start + first, n - first, c, False, False)
            largest = tl.maximum(largest, tl.max(tl.maximum(_magnitudes(a, c), _magnitudes(b, c)), axis=1))
    tl.store(out + row, largest, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _moments_kernel(x, table, out, count, c: tl.constexpr):
    """See `reference.block_moments`."""
    ROWS: tl.constexpr = c.rows
    LANES: tl.constexpr = _LANES
    row, inside, n, raw = _shape_of(table, count, c)
    start = _column(table, row, inside, _START)
    lane = tl.arange(0, _LANES)[None, :]
    plain = tl.zeros((ROWS, LANES), tl.float64)
    absolute = tl.zeros((ROWS, LANES), tl.float64)
    square = tl.zeros((ROWS, LANES), tl.float64)
    for first in range(0, tl.max(n, axis=0), _LANES):
        mask = first + lane < n[:, None]
        v = tl.load(x + start[:, None] + first + lane, mask=mask, other=0).to(c.compute).to(tl.float64)
        plain += v
        absolute += tl.abs(v)
        square += v * v
    _store_total(plain, out + 3 * row, lane, inside)
    _store_total(absolute, out + 3 * row + 1, lane, inside)
    _store_total(square, out + 3 * row + 2, lane, inside)


@triton.jit
def _store_total(lanes, places, lane, inside):
    total = tl.sum(tl.where(lane == 0, lanes, 0), axis=1)
    for number in tl.static_range(1, _LANES):
        total += tl.sum(tl.where(lane == number, lanes, 0), axis=1)
    tl.store(places, total, mask=inside)


# --- top-k: a tile has blocks in one part -----------------------------------------------------------------------------


@triton.jit
def _kept_of(n, c: tl.constexpr):
    """See `wire.Quantiser.kept_of`."""
    return ((n.to(tl.int64) * c.kept + 65535) >> 16).to(tl.int32)


@triton.jit
def _write_largest(v, table, row, inside, n, raw, wire, base, c: tl.constexpr):
    """The records of a tile: the largest coordinates of blocks, the first of equal ones, and their places."""
    BITS: tl.constexpr = c.compute.primitive_bitwidth
    j = tl.arange(0, 2 * c.half)[None, :]
    within = j < n[:, None]
    at = _column(table, row, inside, _CODES) - base
    tl.store(_record(wire, at, c.compute)[:, None] + j, v, mask=raw[:, None] & within)
    bits = tl.where(within, _magnitudes(v, c), -1)
    count = _kept_of(n, c)
    least = (n * 0).to(c.integer)  # what so many reach, bit by bit from the highest on
    for step in range(BITS - 1):
        more = least | ((least * 0 + 1) << (BITS - 2 - step))
        reached = tl.sum((bits >= more[:, None]).to(tl.int32), axis=1)
        least = tl.where(reached >= count, more, least)
    larger, equal = bits > least[:, None], (bits == least[:, None]).to(tl.int32)
    ties = count - tl.sum(larger.to(tl.int32), axis=1)
    kept = larger | ((equal == 1) & (tl.cumsum(equal, axis=1) <= ties[:, None]))
    order = tl.cumsum(kept.to(tl.int32), axis=1) - 1
    kept = kept & (inside & (raw == 0))[:, None]
    tl.store(_record(wire, at, c.compute)[:, None] + order, v, mask=kept)
    places = (wire + at + count * (BITS // 8)).to(tl.pointer_type(tl.int16), bitcast=True)
    tl.store(places[:, None] + order, (j + order * 0).to(tl.int16), mask=kept)


@triton.jit
def _mean_largest(
    wires, stride, table, row, inside, n, raw, base, sources, EACH: tl.constexpr, REST: tl.constexpr, c: tl.constexpr
):
    """As `_mean`, of what `_write_largest` writes."""
    ROWS: tl.constexpr = c.rows
    WIDTH: tl.constexpr = 2 * c.half
    j = tl.arange(0, 2 * c.half)[None, :]
    within = j < n[:, None]
    at = _column(table, row, inside, _CODES) - base
    coded = inside & (raw == 0)
    count = _kept_of(n, c)
    total = tl.zeros((ROWS, WIDTH), c.compute)
    bad = row < 0
    for source in range(sources):
        wire = wires + source * stride
        record = _record(wire, at, c.compute)
        places = (wire + at + count * (c.compute.primitive_bitwidth // 8)).to(tl.pointer_type(tl.int16), bitcast=True)
        total += tl.load(record[:, None] + j, mask=raw[:, None] & within, other=0) * EACH
        for k in range(tl.max(count, axis=0)):
            some = coded & (k < count)
            value = tl.load(record + k, mask=some, other=0)
            place = tl.load(places + k, mask=some, other=0).to(tl.int32) & 0xFFFF
            bad |= some & ((place >= n) | ((value - value) != 0))
            total += tl.where(some[:, None] & (j == place[:, None]), (value * EACH)[:, None], 0)
    if REST != 1:
        total = _divided(total, tl.full((1, 1), REST, c.compute), c)
    total = tl.where(bad[:, None], float("nan"), total)
    bad |= raw & (tl.max((within & ((total - total) != 0)).to(tl.int32), axis=1) > 0)
    return total, bad


@triton.jit(do_not_specialize=["count", "base"])
def _encode_largest_kernel(x, table, wire, count, base: tl.int64, c: tl.constexpr):
    row, inside, n, raw = _shape_of(table, count, c)
    j = tl.arange(0, 2 * c.half)[None, :]
    places = x + _column(table, row, inside, _START)[:, None] + j
    v = tl.load(places, mask=j < n[:, None], other=0).to(c.compute)
    _write_largest(v, table, row, inside, n, raw, wire, base, c)


@triton.jit(do_not_specialize=["count", "base"])
def _reduce_largest_kernel(
    wires, stride: tl.int64, table, out, sources, count, base: tl.int64, EACH: tl.constexpr, REST: tl.constexpr,
    c: tl.constexpr,
):  # fmt: skip
    row, inside, n, raw = _shape_of(table, count, c)
    mean, _ = _mean_largest(wires, stride, table, row, inside, n, raw, base, sources, EACH, REST, c)
    _write_largest(mean, table, row, inside, n, raw, out, base, c)


@triton.jit(do_not_specialize=["count", "base"])
def _decode_largest_kernel(
    wires, stride: tl.int64, table, x, counter, sources, count, base: tl.int64, EACH: tl.constexpr, REST: tl.constexpr,
    c: tl.constexpr,
):  # fmt: skip
    row, inside, n, raw = _shape_of(table, count, c)
    mean, bad = _mean_largest(wires, stride, table, row, inside, n, raw, base, sources, EACH, REST, c)
    j = tl.arange(0, 2 * c.half)[None, :]
    places = x + _column(table, row, inside, _START)[:, None] + j
    tl.store(places, mean.to(x.dtype.element_ty), mask=j < n[:, None])
    _count_bad(bad, counter)


# --- the functions of `reference` ------------------------------------------------------------------------------------


def block_maxima(x: Tensor, blocks: Tensor) -> Tensor:
    """See `reference.block_maxima`."""
    out = torch.empty(len(blocks), dtype=scale_format(x.dtype).integer, device=x.device)
    _launch(_maxima_kernel, blocks, _constants(_ANY, x.dtype), x, blocks, out, len(blocks))
    return out


def block_moments(x: Tensor, blocks: Tensor) -> Tensor:
    """See `reference.block_moments`."""
    out = torch.empty(len(blocks), 3, dtype=torch.float64, device=x.device)
    _launch(_moments_kernel, blocks, _constants(_ANY, x.dtype), x, blocks, out, len(blocks))
    return out


def rotate(x: Tensor, blocks: Tensor, key: Key, block_size: int, *, inverse: bool = False) -> None:
    """See `reference.rotate`."""
    c = _constants(_ANY._replace(block_size=block_size), x.dtype)
    r0, r1 = _signed(key)
    roots = _roots(x.dtype, x.device)
    _launch(_rotate_kernel, blocks, c, x, blocks, roots, len(blocks), r0, r1, INVERSE=inverse)


def combine(mine: Tensor, theirs: Tensor, blocks: Tensor, base: int, key: Key, q: Quantiser) -> None:
    """See `reference.combine`."""
    c = _constants(q, torch.float32)
    _launch(_combine_kernel, blocks, c, mine, theirs, blocks, len(blocks), base, *_signed(key))


def encode(
    x: Tensor,
    blocks: Tensor,
    wire: Tensor,
    key: Key,
    q: Quantiser,
    maxima: Tensor | None = None,
    base: int = 0,
    rotation: Key | None = None,
) -> None:
    """See `reference.encode`."""
    c, count = _constants(q, x.dtype), len(blocks)
    if q.kind == Kind.TOP_K:
        _launch(_encode_largest_kernel, blocks, c, x, blocks, wire, count, base)
        return
    scales = wire if maxima is None else maxima
    numbers = (count, base, *_signed(key), *_signed(rotation or key))
    roots = _roots(x.dtype, x.device)
    modes = {"GIVEN": maxima is not None, "ROTATED": rotation is not None}
    _launch(_encode_kernel, blocks, c, x, blocks, wire, scales, roots, *numbers, **modes)


def reduce(
    wires: Tensor,
    blocks: Tensor,
    base: int,
    out: Tensor,
    keys: Sequence[Key],
    out_key: Key,
    q: Quantiser,
    dtype: torch.dtype,
) -> None:
    """See `reference.reduce`."""
    c, count, stride, shares = _constants(q, dtype), len(blocks), wires.shape[1], _shares(len(keys))
    if q.kind == Kind.TOP_K:
        _launch(_reduce_largest_kernel, blocks, c, wires, stride, blocks, out, len(keys), count, base, **shares)
        return
    on_device, numbers = _keys(tuple(keys), wires.device), (len(keys), count, base, *_signed(out_key))
    _launch(_reduce_kernel, blocks, c, wires, stride, blocks, out, on_device, *numbers, **shares)


def decode(
    wires: Tensor,
    blocks: Tensor,
    x: Tensor,
    keys: Sequence[Key],
    q: Quantiser,
    base: int = 0,
    rotation: Key | None = None,
) -> Tensor:
    """See `reference.decode`; the number is a tensor on the device, int32 []."""
    c, count, stride, shares = _constants(q, x.dtype), len(blocks), wires.shape[1], _shares(len(keys))
    bad = torch.zeros((), dtype=torch.int32, device=x.device)
    if q.kind == Kind.TOP_K:
        _launch(_decode_largest_kernel, blocks, c, wires, stride, blocks, x, bad, len(keys), count, base, **shares)
        return bad
    tables = _keys(tuple(keys), x.device), _roots(x.dtype, x.device)
    numbers = (len(keys), count, base, *_signed(rotation or keys[0]))
    modes = {"ROTATED": rotation is not None, **shares}
    _launch(_decode_kernel, blocks, c, wires, stride, blocks, x, bad, *tables, *numbers, **modes)
    return bad


def decode_sum(wire: Tensor, maxima: Tensor, blocks: Tensor, x: Tensor, keys: Sequence[Key], q: Quantiser) -> Tensor:
    """See `reference.decode_sum`; the number is a tensor on the device, int32 []."""
    c, ranks = _constants(q, x.dtype), len(keys)
    middle = 2.0**q.headroom / ranks if q.kind == Kind.EXPONENTIAL else ranks * (q.levels - 1) / 2
    bad = torch.zeros((), dtype=torch.int32, device=x.device)
    on_device = _keys(tuple(keys), x.device)
    _launch(_decode_sum_kernel, blocks, c, wire, maxima, blocks, x, bad, on_device, ranks, len(blocks), MIDDLE=middle)
    return bad


_ANY = Quantiser(bits=8, levels=256, odd_levels=255, stochastic_from=1.0, summable=False, block_size=256)


def _launch(kernel: Any, blocks: Tensor, c: _Constants, *arguments: Any, **modes: Any) -> None:
    """Run a kernel on a block table: a program for each tile."""
    if len(blocks):
        kernel[(-(-len(blocks) // c.rows),)](*arguments, c=c, **launch_options(c), **modes)


def launch_options(c: _Constants) -> dict[str, int]:
    """How kernels are compiled for tiles of this shape."""
    warps = min(max(c.rows * c.half >> 9, 1), 32)  # 32 coordinates per thread
    # What tiles with the ends of parameters need beyond 128 registers would leave the others too few threads.
    return {"num_warps": warps, "maxnreg": min(128, 2048 // warps), "enable_fp_fusion": False}


def _signed(key: Key) -> tuple[int, int]:
    """The same bits as signed integers: Triton would widen others, and compile anew."""
    return key[0] - (key[0] >> 31 << 32), key[1] - (key[1] >> 31 << 32)


def _shares(sources: int) -> dict[str, float]:
    share = Share.of(sources)
    return {"EACH": share.each, "REST": share.rest}


def _keys(keys: tuple[Key, ...], device: torch.device) -> Tensor:
    """Keys on the device, int32 [sources, 2]; sent there once per step and stream, without waiting."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _sent_keys(keys, device, stream)


@lru_cache(maxsize=64)
def _sent_keys(keys: tuple[Key, ...], device: torch.device, stream: int) -> Tensor:
    table = torch.tensor([_signed(key) for key in keys], dtype=torch.int32)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@lru_cache(maxsize=64)
def _roots(dtype: torch.dtype, device: torch.device) -> Tensor:
    """2^(-k/2) for k up to 16, in the compute type."""
    roots = torch.from_numpy(2.0 ** (-0.5 * np.arange(17)))
    return roots.to(COMPUTE_DTYPES[dtype]).to(device)


@lru_cache(maxsize=256)
def _constants(q: Quantiser, dtype: torch.dtype) -> _Constants:
    form, compute = scale_format(dtype), COMPUTE_DTYPES[dtype]
    double = compute == torch.float64
    real = np.float64 if double else np.float32
    cut = form.mantissa - q.mantissa
    offset = (form.infinity >> form.mantissa >> 1 << q.mantissa) - q.magnitudes
    smallest = np.array([offset + 1 << cut]).astype(np.int64 if double else np.int32).view(real)[0]
    smallest = smallest if q.kind == Kind.EXPONENTIAL else real(1)
    half = triton.next_power_of_2(-(-q.block_size // 2))
    words = q.summable and 8 % q.bits != 0
    return _Constants(
        compute=tl.float64 if double else tl.float32,
        integer=tl.int64 if double else tl.int32,
        shift=form.shift,
        infinity=form.infinity,
        tiny=form.tiny,
        mask=2 ** (8 * compute.itemsize - 1) - 1,
        scale=tl.uint32 if double else tl.uint16,
        largest=torch.finfo(compute).max,
        up=1 + 2 * torch.finfo(compute).eps,
        rows=max(1, _TILE // (2 * half)),
        stages=half.bit_length() - 1,
        half=half,
        block=q.block_size,
        may_be_full=q.block_size == 2 * half and not words,
        exponential=q.kind == Kind.EXPONENTIAL,
        bits=q.bits,
        words=words,
        nearest=q.nearest,
        always_stochastic=q.always_stochastic,
        adaptive=0 <= q.stochastic_from < 1,
        stochastic_from=float(real(q.stochastic_from)),
        levels=q.levels,
        odd_levels=q.odd_levels,
        magnitudes=q.magnitudes,
        cut=cut,
        offset=offset,
        smallest=float(smallest),
        per_smallest=float(real(1) / smallest),
        shrink=2.0**-q.headroom,
        kept=q.kept,
    )
