"""Tiles of blocks in a GPU's registers, in Triton: what `cuda` is made of.

A tile is some whole blocks, a row each, in two halves: coordinates p and p + half of a block are at the same place of
the two, and share a hash and, below 8 bits, a byte. ``FULL`` says that all blocks of a tile have the full length, so
that no access is masked, and ``ALIGNED`` that they begin at multiples of 16 bytes, too. The arithmetic is that of
`reference`.

Common arguments: ``table`` the block table; ``row``, ``inside`` numbers of the tile's blocks, int64 [rows], and which
of them there are; ``n``, ``raw`` their lengths and which are raw; ``a``, ``b`` the halves, [rows, half]; ``k0``,
``k1`` a key; ``at`` where records begin; ``c`` the constants.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from lightning_gqsgd import layout
from lightning_gqsgd.kernels import wire as format_

START = tl.constexpr(layout.START)
LENGTH = tl.constexpr(layout.LENGTH)
_PARAMETER = tl.constexpr(layout.PARAMETER)
_INDEX = tl.constexpr(layout.INDEX)
_SCALE = tl.constexpr(layout.SCALE)
CODES = tl.constexpr(layout.CODES)
RAW = tl.constexpr(layout.RAW)
_COLUMNS = tl.constexpr(layout.COLUMNS)
_ALIGNMENT = tl.constexpr(layout.ALIGNMENT)
_GOLDEN = tl.constexpr(format_.GOLDEN)
_MULTIPLY_1 = tl.constexpr(format_.MULTIPLY_1)
_MULTIPLY_2 = tl.constexpr(format_.MULTIPLY_2)
FIRST = tl.constexpr(format_.DITHER_FIRST)


class Constants(NamedTuple):
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
def column(table, row, inside, COLUMN: tl.constexpr):
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
def block_keys(table, row, inside, k0, k1):
    """a and b of the blocks' hash, see `wire`. Keys are int32, with the bits of unsigned ones."""
    parameter = column(table, row, inside, _PARAMETER).to(tl.uint32)
    index = column(table, row, inside, _INDEX).to(tl.uint32)
    a = _mix(_mix(k0.to(tl.uint32, bitcast=True) ^ parameter) + index * _GOLDEN)
    b = _mix(_mix(k1.to(tl.uint32, bitcast=True) + parameter) ^ index)
    return a, b


@triton.jit
def hash_of(p, a, b):
    return _finish(_start(p.to(tl.uint32) + a[:, None]) ^ b[:, None])


@triton.jit
def draws(table, row, inside, n, k0, k1, c: tl.constexpr, FULL: tl.constexpr):
    """The 16-bit integers of the dither, uint32, of both halves."""
    a, b = block_keys(table, row, inside, k0, k1)
    p = tl.arange(0, c.half)[None, :]
    if FULL:
        h = hash_of(p, a, b)
        first, second = h & 0xFFFF, h >> 16
    else:
        first, second = _draw_at(p, n, a, b), _draw_at(p + c.half, n, a, b)
    return first, second


@triton.jit
def _draw_at(j, n, a, b):
    half = ((n + 1) // 2)[:, None]
    beyond = j >= half
    h = hash_of(tl.where(beyond, j - half, j), a, b)
    return tl.where(beyond, h >> 16, h & 0xFFFF)


# --- numbers ----------------------------------------------------------------------------------------------------------


@triton.jit
def one_and(draw):
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
def magnitudes(v, c: tl.constexpr):
    """Magnitudes as integers, which are ordered like them."""
    return v.to(c.integer, bitcast=True) & c.mask


@triton.jit
def _rounded_up(bits, c: tl.constexpr):
    """See `wire.ScaleFormat.rounded_up`."""
    up = tl.minimum(tl.maximum(bits, c.tiny), c.infinity) + ((1 << c.shift) - 1)
    up = tl.minimum((up >> c.shift) << c.shift, c.infinity - 1)  # the largest finite number, if rounded up to infinity
    return tl.where(bits >= c.infinity, c.infinity, tl.where(bits > 0, up, 0)).to(c.integer)


@triton.jit
def scale_of(bits, c: tl.constexpr):
    """The scales with these bits; any number where they are zero or not finite."""
    return tl.minimum(tl.maximum(bits, c.tiny), c.infinity - 1).to(c.integer).to(c.compute, bitcast=True)


@triton.jit
def _clamped(v, limit):
    return tl.minimum(tl.maximum(v, -limit), limit)


@triton.jit
def any_not_finite(a, b, n, c: tl.constexpr, FULL: tl.constexpr):
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
def aligned(start, x):
    """Whether all blocks of a tile begin at multiples of 16 bytes, if ``x`` does."""
    ELEMENTS: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    return tl.max(start % ELEMENTS, axis=0) == 0


@triton.jit
def load_tile(x, start, n, c: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
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
def store_tile(a, b, x, start, n, some, c: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr):
    """Write both halves of some rows, in the type of ``x``."""
    ELEMENTS: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth if ALIGNED else 1
    p = tl.arange(0, c.half)[None, :]
    places = x + (start // ELEMENTS * ELEMENTS)[:, None] + p
    mask_a, mask_b = some[:, None], some[:, None]
    if not FULL:
        mask_a, mask_b = mask_a & (p < n[:, None]), mask_b & (p + c.half < n[:, None])
    tl.store(places, _finite_in(a, x.dtype.element_ty, c).to(x.dtype.element_ty), mask=mask_a)
    tl.store(places + c.half, _finite_in(b, x.dtype.element_ty, c).to(x.dtype.element_ty), mask=mask_b)


@triton.jit
def _finite_in(v, DTYPE: tl.constexpr, c: tl.constexpr):
    """See `wire.in_finite_range`."""
    if tl.float16 == DTYPE:
        v = tl.where((v - v) == 0, _clamped(v, tl.full((), 65504.0, c.compute)), v)
    elif tl.bfloat16 == DTYPE:
        v = tl.where((v - v) == 0, _clamped(v, tl.full((), 3.3895313892515355e38, c.compute)), v)
    return v


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
def rotated(
    a, b, table, row, inside, n, raw, r0, r1, roots, INVERSE: tl.constexpr, c: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """See `reference.rotate`; raw rows stay as they are."""
    draw_a, draw_b = draws(table, row, inside, n, r0, r1, c, FULL)
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
def pack(code_a, code_b, n, some, wire, at, c: tl.constexpr, FULL: tl.constexpr):
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
def unpack(wire, at, n, some, c: tl.constexpr, FULL: tl.constexpr):
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
        bits_a, bits_b = magnitudes(a, c), magnitudes(b, c)
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
        u = tl.where(v == 0, one_and(draw) + (FIRST - 1), 0.5) - less[:, None]
    else:
        u = one_and(draw) - (less + (1 - FIRST))[:, None]
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
    magnitude = ((magnitudes(y, c) + random) >> c.cut) - c.offset
    uniform = (one_and(draw) + (FIRST - 1)).to(c.compute)
    reaches = (y * tl.full((), c.per_smallest, c.compute) > uniform).to(c.integer)
    magnitude = tl.where(y < tl.full((), c.smallest, c.compute), reaches, magnitude).to(tl.int32)
    return tl.where((magnitude > 0) & (used > 0)[:, None], magnitude | ((v < 0).to(tl.int32) << (c.bits - 1)), 0)


@triton.jit
def linear_values(code, offset, scale, middle, stochastic, c: tl.constexpr):
    """Coordinates that (sums of) codes, int32, stand for; ``middle``: the code for zero, ``offset``: the same,
    dithered, [rows, half] or [rows, 1]."""
    step = _divided(scale, middle, c)
    short = stochastic & (step * middle < scale)  # the last level is to stand for the scale, exactly
    step = tl.where(short, step * tl.full((), c.up, c.compute), step)
    limit = tl.where(stochastic, scale, tl.full((), c.largest, c.compute))
    return _clamped((_byte_as_float(code) - offset).to(c.compute) * step[:, None], limit[:, None])


@triton.jit
def exponential_values(code, scale, c: tl.constexpr):
    magnitude = code & ((1 << (c.bits - 1)) - 1)
    y = ((magnitude + c.offset).to(c.integer) << c.cut).to(c.compute, bitcast=True)
    value = _clamped(y * scale[:, None], tl.full((), c.largest, c.compute))
    return tl.where(magnitude > 0, tl.where((code >> (c.bits - 1)) > 0, -value, value), 0)


@triton.jit
def write_records(
    a, b, table, row, inside, n, raw, wire, base, scale_bits, k0, k1, c: tl.constexpr, GIVEN: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """Write the records of a tile; ``scale_bits``: the scales, if they are given."""
    at = column(table, row, inside, CODES) - base
    if not FULL:
        places_a, places_b, mask_a, mask_b = _raw_places(wire, at, n, raw, c)
        tl.store(places_a, a, mask=mask_a)
        tl.store(places_b, b, mask=mask_b)
    if not GIVEN:
        largest = tl.maximum(tl.max(magnitudes(a, c), axis=1), tl.max(magnitudes(b, c), axis=1))
        scale_bits = _rounded_up(largest, c)
    coded = inside & (raw == 0)
    finite = scale_bits < c.infinity
    used = tl.minimum(tl.where(finite, scale_bits, 0), 1).to(tl.int32)  # 1 or 0: codes are 0 without a scale
    scale = scale_of(scale_bits, c)
    stochastic = _is_stochastic(a, b, n, c)
    place = column(table, row, inside, _SCALE)
    sent = ((scale_bits + 1) >> c.shift << 1) | stochastic.to(c.integer)
    scales = (wire + (place - base)).to(tl.pointer_type(c.scale), bitcast=True)
    tl.store(scales, tl.where(finite, sent, -1).to(c.scale), mask=coded & (place >= 0))

    draw_a, draw_b = draws(table, row, inside, n, k0, k1, c, FULL)
    if c.exponential:
        code_a, code_b = _exponential_codes(a, draw_a, scale, used, c), _exponential_codes(b, draw_b, scale, used, c)
    else:
        code_a = _linear_codes(a, draw_a, scale, used, stochastic, c)
        code_b = _linear_codes(b, draw_b, scale, used, stochastic, c)
    pack(code_a, code_b, n, coded, wire, at, c, FULL)


@triton.jit
def mean_of_messages(
    wires, stride, table, row, inside, n, raw, base, keys, sources, EACH: tl.constexpr, REST: tl.constexpr,
    c: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Mean of a tile over messages ``stride`` bytes apart, added up in their order; and which coded rows are NaN."""
    ROWS: tl.constexpr = c.rows
    HALF: tl.constexpr = c.half
    at = column(table, row, inside, CODES) - base
    place = column(table, row, inside, _SCALE) - base
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
        scale = tl.where(used, scale_of(bits, c) * EACH, 0)
        code_a, code_b = unpack(wire, at, n, used, c, FULL)
        if c.exponential:
            value_a, value_b = exponential_values(code_a, scale, c), exponential_values(code_b, scale, c)
        else:
            stochastic = (code & 1) == 1
            middle = _middle_of(stochastic, c)
            offset = middle.to(tl.float32)[:, None]
            if c.always_stochastic or c.nearest:
                offset_a, offset_b = offset, offset
            else:
                k0, k1 = tl.load(keys + 2 * source), tl.load(keys + 2 * source + 1)
                draw_a, draw_b = draws(table, row, inside, n, k0, k1, c, FULL)
                share = tl.where(stochastic, 0.0, 1.0)[:, None]
                offset += share * (FIRST - 1.5)
                offset_a, offset_b = tl.fma(one_and(draw_a), share, offset), tl.fma(one_and(draw_b), share, offset)
            value_a = linear_values(code_a, offset_a, scale, middle.to(c.compute), stochastic, c)
            value_b = linear_values(code_b, offset_b, scale, middle.to(c.compute), stochastic, c)
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


# --- top-k: a tile has blocks in one part -----------------------------------------------------------------------------


@triton.jit
def _kept_of(n, c: tl.constexpr):
    """See `wire.Quantiser.kept_of`."""
    return ((n.to(tl.int64) * c.kept + 65535) >> 16).to(tl.int32)


@triton.jit
def write_largest(v, table, row, inside, n, raw, wire, base, c: tl.constexpr):
    """The records of a tile: the largest coordinates of blocks, the first of equal ones, and their places."""
    BITS: tl.constexpr = c.compute.primitive_bitwidth
    j = tl.arange(0, 2 * c.half)[None, :]
    within = j < n[:, None]
    at = column(table, row, inside, CODES) - base
    tl.store(_record(wire, at, c.compute)[:, None] + j, v, mask=raw[:, None] & within)
    bits = tl.where(within, magnitudes(v, c), -1)
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
def mean_of_largest(
    wires, stride, table, row, inside, n, raw, base, sources, EACH: tl.constexpr, REST: tl.constexpr, c: tl.constexpr
):
    """As `mean_of_messages`, of what `write_largest` writes."""
    ROWS: tl.constexpr = c.rows
    WIDTH: tl.constexpr = 2 * c.half
    j = tl.arange(0, 2 * c.half)[None, :]
    within = j < n[:, None]
    at = column(table, row, inside, CODES) - base
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
