"""Packs codes into messages, and unpacks them, in Triton; `kernels.packing` describes the layout.

Codes are int32, in the two halves of a tile: ``code_a`` and ``code_b``, [rows, half]. Common arguments: ``n``, the
lengths of the blocks; ``rows``, whether each row is written or read; ``at``, the positions of the records, in bytes
from ``wire`` on; ``KIND``, the kind of the tile; ``c``, the kernel's constants.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_gqsgd.kernels.cuda.ptx import lower_nibbles, upper_nibbles
from lightning_gqsgd.kernels.cuda.tiles import RAGGED, record, within


@triton.jit
def pack(code_a, code_b, n, rows, wire, at, KIND: tl.constexpr, c: tl.constexpr):
    """Write codes."""
    if c.codes.in_words:
        _pack_words(code_a, code_b, n, rows, record(wire, at, tl.int64)[:, None], c)
    else:
        places = record(wire, at, tl.uint8)[:, None]
        for level in tl.static_range(4):
            if c.codes.bits & (8 >> level):
                _pack_plane(code_a, code_b, n, rows, places, 8 >> level, KIND, c)


@triton.jit
def unpack(wire, at, n, rows, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the codes of both halves. In ragged tiles, and if codes are in words, the codes are zero in rows that are
    not read and beyond the ends of blocks. In other tiles, all rows are read."""
    ROWS: tl.constexpr = c.shape.rows
    HALF: tl.constexpr = c.shape.half
    code_a = tl.zeros((ROWS, HALF), tl.int32)
    code_b = tl.zeros((ROWS, HALF), tl.int32)
    if c.codes.in_words:
        p = tl.arange(0, c.shape.half)[None, :]
        places = record(wire, at, tl.int64)[:, None]
        code_a = _word_lane(places, p, n, rows, c)
        code_b = _word_lane(places, p + c.shape.half, n, rows, c)
    else:
        places = record(wire, at, tl.uint8)[:, None]
        for level in tl.static_range(4):
            if c.codes.bits & (1 << level):
                part_a, part_b = _unpack_plane(n, rows, places, 1 << level, KIND, c)
                code_a |= part_a
                code_b |= part_b
    return code_a, code_b


# --- bit planes -------------------------------------------------------------------------------------------------------


@triton.jit
def _plane_start(n, LOW: tl.constexpr, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the number of bytes of the bit planes with the lower LOW bits of codes, [rows, 1] or one number."""
    if KIND == RAGGED:
        first = (n * 0)[:, None]
        for level in tl.static_range(3):
            if LOW & (8 >> level):
                first += ((n * (8 >> level) + 7) // 8)[:, None]
    else:
        first = LOW * (c.shape.half // 4)
    return first


@triton.jit
def _pack_plane(code_a, code_b, n, rows, places, PLANE: tl.constexpr, KIND: tl.constexpr, c: tl.constexpr):
    """Write PLANE bits of every code. ``places`` are pointers to the start of each block's codes."""
    LOW: tl.constexpr = c.codes.bits & (16 - 2 * PLANE)
    places = places + _plane_start(n, LOW, KIND, c)
    if PLANE == 8:
        _pack_bytes(code_a, code_b, n, rows, places, KIND, c)
    elif KIND == RAGGED:
        _pack_gathered(code_a >> LOW, code_b >> LOW, n, rows, places, PLANE, c)
    else:
        _pack_lanes(code_a >> LOW, code_b >> LOW, rows, places, PLANE, c)


@triton.jit
def _pack_bytes(code_a, code_b, n, rows, places, KIND: tl.constexpr, c: tl.constexpr):
    """Write the plane of 8 bits of every code."""
    p = tl.arange(0, c.shape.half)[None, :]
    mask_a = rows[:, None]
    mask_b = rows[:, None]
    if KIND == RAGGED:
        inside_a, inside_b = within(n, c)
        mask_a = mask_a & inside_a
        mask_b = mask_b & inside_b
    tl.store(places + p, code_a.to(tl.uint8), mask=mask_a)
    tl.store(places + c.shape.half + p, code_b.to(tl.uint8), mask=mask_b)


@triton.jit
def _pack_lanes(code_a, code_b, rows, places, PLANE: tl.constexpr, c: tl.constexpr):
    """Write a plane of full blocks. The first half of a block is in the lower four bits of every byte, and the second
    half is in the upper four bits."""
    LANES: tl.constexpr = 4 // PLANE
    ROWS: tl.constexpr = c.shape.rows
    WORDS: tl.constexpr = c.shape.half // LANES
    words = (code_a & ((1 << PLANE) - 1)) | ((code_b & ((1 << PLANE) - 1)) << 4)
    if LANES > 1:
        lane = tl.arange(0, LANES)[None, :, None]
        words = tl.sum(tl.reshape(words, (ROWS, LANES, WORDS)) << (lane * PLANE), axis=1)
    tl.store(places + tl.arange(0, WORDS)[None, :], words.to(tl.uint8), mask=rows[:, None])


@triton.jit
def _pack_gathered(code_a, code_b, n, rows, places, PLANE: tl.constexpr, c: tl.constexpr):
    """Write a plane of blocks of any length."""
    ROWS: tl.constexpr = c.shape.rows
    WIDTH: tl.constexpr = c.shape.half * PLANE // 4
    w = tl.arange(0, WIDTH)[None, :]
    count = ((n * PLANE + 7) // 8)[:, None]
    words = tl.zeros((ROWS, WIDTH), tl.int32)
    for lane in tl.static_range(8 // PLANE):
        part = _codes_at(code_a, code_b, w + lane * count, n, c) & ((1 << PLANE) - 1)
        words |= part << (lane * PLANE)
    tl.store(places + w, words.to(tl.uint8), mask=rows[:, None] & (w < count))


@triton.jit
def _unpack_plane(n, rows, places, PLANE: tl.constexpr, KIND: tl.constexpr, c: tl.constexpr):
    """Returns PLANE bits of every code, at their place in the code."""
    LOW: tl.constexpr = c.codes.bits & (16 - 2 * PLANE)
    MASK: tl.constexpr = (1 << PLANE) - 1
    places = places + _plane_start(n, LOW, KIND, c)
    p = tl.arange(0, c.shape.half)[None, :]
    if KIND == RAGGED:
        code_a = _plane_lane(places, p, n, rows, PLANE)
        code_b = _plane_lane(places, p + c.shape.half, n, rows, PLANE)
    elif PLANE == 8:
        code_a = tl.load(places + p).to(tl.int32)
        code_b = tl.load(places + c.shape.half + p).to(tl.int32)
    elif PLANE == 4:
        word = tl.load(places + p)
        code_a = lower_nibbles(word).to(tl.int32)
        code_b = upper_nibbles(word).to(tl.int32)
    else:
        COUNT: tl.constexpr = c.shape.half * PLANE // 4
        word = tl.load(places + p % COUNT).to(tl.int32) >> (p // COUNT * PLANE)
        code_a = word & MASK
        code_b = (word >> 4) & MASK
    return code_a << LOW, code_b << LOW


@triton.jit
def _plane_lane(places, j, n, rows, PLANE: tl.constexpr):
    """Returns PLANE bits of the codes of coordinates j, for blocks of any length."""
    count = tl.maximum((n * PLANE + 7) // 8, 1)[:, None]
    word = tl.load(places + j % count, mask=rows[:, None] & (j < n[:, None]), other=0).to(tl.int32)
    return (word >> (j // count * PLANE)) & ((1 << PLANE) - 1)


# --- lanes of words, which can be added up ----------------------------------------------------------------------------


@triton.jit
def _pack_words(code_a, code_b, n, rows, places, c: tl.constexpr):
    """Write codes in words of 64 bits. ``places`` are pointers to each block's first word."""
    LANES: tl.constexpr = 64 // c.codes.bits  # 9 or more
    ROWS: tl.constexpr = c.shape.rows
    WIDTH: tl.constexpr = c.shape.half // 4
    w = tl.arange(0, WIDTH)[None, :]
    count = ((n + LANES - 1) // LANES)[:, None]
    words = tl.zeros((ROWS, WIDTH), tl.int64)
    for lane in tl.static_range(LANES):
        words |= _codes_at(code_a, code_b, w + lane * count, n, c).to(tl.int64) << (lane * c.codes.bits)
    tl.store(places + w, words, mask=rows[:, None] & (w < count))


@triton.jit
def _word_lane(places, j, n, rows, c: tl.constexpr):
    """Returns the codes of coordinates j from words of 64 bits."""
    LANES: tl.constexpr = 64 // c.codes.bits
    count = tl.maximum((n + LANES - 1) // LANES, 1)[:, None]
    word = tl.load(places + j % count, mask=rows[:, None] & (j < n[:, None]), other=0)
    return (word >> (j // count * c.codes.bits).to(tl.int64)).to(tl.int32) & ((1 << c.codes.bits) - 1)


@triton.jit
def _codes_at(code_a, code_b, j, n, c: tl.constexpr):
    """Returns the codes of coordinates j, gathered from both halves. They are zero beyond the ends of blocks."""
    from_a = tl.gather(code_a, tl.minimum(j, c.shape.half - 1), axis=1)
    from_b = tl.gather(code_b, tl.minimum(tl.maximum(j - c.shape.half, 0), c.shape.half - 1), axis=1)
    return tl.where(j < n[:, None], tl.where(j < c.shape.half, from_a, from_b), 0)
