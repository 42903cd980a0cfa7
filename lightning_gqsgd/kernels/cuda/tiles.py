"""Tiles of blocks in a GPU's registers, in Triton: their positions and lengths, and functions to load and store them.

A tile has several whole blocks, one in each row, in two halves ``a`` and ``b`` of shape [rows, half]. Coordinates p and
p + half of a block are at the same place in the two halves. They share a hash and, below 8 bits, a byte of codes.

There are three kinds of tiles. In an `ALIGNED` tile, all blocks have the full length and begin at multiples of 16
bytes, so no load of coordinates is masked, and coordinates and codes are moved 16 bytes at a time. In a `FULL` tile,
all blocks have the full length, so codes are still moved 16 bytes at a time. A `RAGGED` tile has shorter or raw blocks,
and is slower. The host puts blocks into one table for each kind (see `launch`), and each kind has its own kernels.
Below, ``KIND`` is the kind, and ``c`` has the kernel's constants, see `constants.Constants`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lightning_gqsgd.kernels import layout
from lightning_gqsgd.kernels.cuda.constants import SHARE
from lightning_gqsgd.kernels.cuda.floats import is_finite
from lightning_gqsgd.kernels.rotation import SHORTEST

RAGGED = tl.constexpr(0)
FULL = tl.constexpr(1)
ALIGNED = tl.constexpr(2)

#: Columns of a table of tiles, int32. The 32 bytes of a block are contiguous, because a GPU reads 32 bytes together.
#: Columns are also at fixed distances from one address.
START_LOW = tl.constexpr(0)  # first coordinate, lower and upper 32 bits; for aligned tiles, in units of 16 bytes
START_HIGH = tl.constexpr(1)
PARAMETER = tl.constexpr(2)  # as in the block table
INDEX = tl.constexpr(3)
SCALE = tl.constexpr(4)  # position of the scale in the message, in units of a scale; -1: no scale is sent
CODES = tl.constexpr(5)  # position of the record in the message, in units of 16 bytes
LENGTH = tl.constexpr(6)  # twice the number of coordinates, plus 1 if they are sent uncompressed
ROW = tl.constexpr(7)  # number of the block in the block table
COLUMNS = 8

_COLUMNS = tl.constexpr(COLUMNS)
_SHARE = tl.constexpr(SHARE)
_SHORTEST = tl.constexpr(SHORTEST)
_ALIGNMENT = tl.constexpr(layout.ALIGNMENT)


class Tile(NamedTuple):
    """The blocks of one program, one in each row.

    Attributes:
        entries: pointers to the blocks' entries in the table of tiles, [rows]. Rows beyond the end of the table have
            the entry of the last block.
        inside: whether each row is within the table, bool [rows].
        n: lengths of the blocks, int32 [rows]; 0 beyond the end of a table of ragged tiles.
        raw: whether each block is sent uncompressed, bool [rows].
        start: numbers of the blocks' first coordinates, int64 [rows].
        parameter, index: as in the block table, plus its origin, uint32 [rows].
    """

    entries: Any
    inside: Any
    n: Any
    raw: Any
    start: Any
    parameter: Any
    index: Any


@triton.jit
def column(t, COLUMN: tl.constexpr):
    """Returns a column of the table of tiles, int32 [rows]."""
    return tl.load(t.entries + COLUMN)


@triton.jit
def _two_columns(entries, FIRST: tl.constexpr):
    """Returns two adjacent columns, int32 [rows], from one load of 8 bytes."""
    both = tl.load((entries + FIRST).to(tl.pointer_type(tl.int64), bitcast=True))
    return both.to(tl.int32), (both >> 32).to(tl.int32)


@triton.jit
def record_places(t):
    """Returns the positions of the blocks' records, in bytes from the start of a message, int64 [rows]."""
    return column(t, CODES).to(tl.uint32, bitcast=True).to(tl.int64) * _ALIGNMENT


@triton.jit
def scale_places(t, c: tl.constexpr):
    """Returns the positions of the blocks' scales, in bytes from the start of a message, int64 [rows]. A position is
    negative if no scale is sent."""
    BYTES: tl.constexpr = c.number.sent.primitive_bitwidth // 8
    return column(t, SCALE).to(tl.int64) * BYTES


@triton.jit
def tile_of(table, count, origin, x, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the tile of this program, from a table of ``count`` blocks, whose coordinates are in ``x``. ``origin`` is
    the origin of the table, see `launch.packed`."""
    ROWS: tl.constexpr = c.shape.rows
    FULL_LENGTH: tl.constexpr = c.shape.block
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    # Rows beyond the end read the entry of the last block, so that no load needs a mask.
    entries = table + tl.minimum(row, count - 1).to(tl.int64) * _COLUMNS
    start = tl.load(entries + START_LOW).to(tl.uint32, bitcast=True).to(tl.int64)
    if KIND == ALIGNED:
        start *= elements_per_access(x)
    else:
        start |= tl.load(entries + START_HIGH).to(tl.int64) << 32
    # These columns are loaded here, because a loop over messages would load them in each iteration.
    parameter, index = _two_columns(entries, PARAMETER)
    parameter = parameter.to(tl.uint32, bitcast=True) + origin.to(tl.uint32)
    index = index.to(tl.uint32, bitcast=True) + (origin.to(tl.int64) >> 32).to(tl.uint32)
    if KIND == RAGGED:
        length = tl.load(entries + LENGTH)
        n = tl.where(inside, length >> 1, 0)
        raw = inside & ((length & 1) == 1)
    else:
        n = tl.full((ROWS,), FULL_LENGTH, tl.int32)
        raw = tl.zeros((ROWS,), tl.int1)
    return Tile(entries, inside, n, raw, start, parameter, index)


@triton.jit
def coded_tile(t, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the tile, with the number of codes in each record as the length of the block; see `constants.Codes`."""
    if c.codes.padded and KIND == RAGGED:
        STAGES: tl.constexpr = c.shape.stages
        n = tl.where(t.n > 0, _SHORTEST, 0)
        for _ in tl.static_range(STAGES):
            n = tl.where(n < t.n, 2 * n, n)
        t = Tile(t.entries, t.inside, n, t.raw, t.start, t.parameter, t.index)
    return t


@triton.jit
def elements_per_access(x):
    """Returns the number of elements of ``x`` in 16 bytes."""
    ELEMENTS: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    return ELEMENTS


@triton.jit
def within(n, c: tl.constexpr):
    """Returns whether each coordinate of both halves is within a block of length ``n``."""
    p = tl.arange(0, c.shape.half)[None, :]
    return p < n[:, None], p + c.shape.half < n[:, None]


@triton.jit
def load_tile(x, start, n, KIND: tl.constexpr, c: tl.constexpr):
    """Returns both halves in the compute type; zero beyond the ends of blocks of length ``n``."""
    places = _coordinates(x, start, c)
    if KIND == RAGGED:
        inside_a, inside_b = within(n, c)
        a = tl.load(places, mask=inside_a, other=0)
        b = tl.load(places + c.shape.half, mask=inside_b, other=0)
    else:
        a = tl.load(places)
        b = tl.load(places + c.shape.half)
    return a.to(c.number.compute), b.to(c.number.compute)


@triton.jit
def store_tile(a, b, x, t, rows, KIND: tl.constexpr, c: tl.constexpr):
    """Write both halves of the rows for which ``rows`` is true, rounded to the type of ``x``."""
    places = _coordinates(x, t.start, c)
    mask_a = rows[:, None]
    mask_b = rows[:, None]
    if KIND == RAGGED:
        inside_a, inside_b = within(t.n, c)
        mask_a = mask_a & inside_a
        mask_b = mask_b & inside_b
    tl.store(places, a.to(x.dtype.element_ty), mask=mask_a)
    tl.store(places + c.shape.half, b.to(x.dtype.element_ty), mask=mask_b)


@triton.jit
def _coordinates(x, start, c: tl.constexpr):
    """Returns pointers to the coordinates of the first half, [rows, half]."""
    return (x + tl.arange(0, c.shape.half))[None, :] + start[:, None]


@triton.jit
def record(wire, at, ELEMENT: tl.constexpr):
    """Returns pointers of the type ``ELEMENT`` to the start of blocks' codes or raw coordinates. ``at`` has positions
    in bytes from ``wire`` on."""
    return (wire + at).to(tl.pointer_type(ELEMENT), bitcast=True)


@triton.jit
def message_at(wires, stride, source):
    """Returns a pointer to a message. ``stride`` is the distance of messages in units of 16 bytes, int64."""
    return wires + source * (stride * _ALIGNMENT)


@triton.jit
def load_raw(wire, at, t, c: tl.constexpr):
    """Returns both halves of raw blocks from their records; zero in other rows and beyond the ends of blocks."""
    places = record(wire, at, c.number.compute)[:, None] + tl.arange(0, c.shape.half)[None, :]
    inside_a, inside_b = within(t.n, c)
    a = tl.load(places, mask=t.raw[:, None] & inside_a, other=0)
    b = tl.load(places + c.shape.half, mask=t.raw[:, None] & inside_b, other=0)
    return a, b


@triton.jit
def store_raw(a, b, wire, at, t, c: tl.constexpr):
    """Write both halves of raw blocks into their records."""
    places = record(wire, at, c.number.compute)[:, None] + tl.arange(0, c.shape.half)[None, :]
    inside_a, inside_b = within(t.n, c)
    tl.store(places, a, mask=t.raw[:, None] & inside_a)
    tl.store(places + c.shape.half, b, mask=t.raw[:, None] & inside_b)


@triton.jit
def any_not_finite(a, b, n, KIND: tl.constexpr, c: tl.constexpr):
    """Returns whether each row has a coordinate that is NaN or infinite."""
    bad_a = is_finite(a) == 0
    bad_b = is_finite(b) == 0
    if KIND == RAGGED:
        inside_a, inside_b = within(n, c)
        bad_a = bad_a & inside_a
        bad_b = bad_b & inside_b
    return tl.max((bad_a | bad_b).to(tl.int32), axis=1) > 0


@triton.jit
def once(rows, EACH: tl.constexpr, c: tl.constexpr):
    """Returns flags of the shape [rows, threads]. For each row, if ``rows``, bool [rows], is true, one flag is true.

    Numbers that belong to a row are written in this shape, by one of the threads that have the row's coordinates, with
    ``EACH`` coordinates in a thread. For numbers of the shape [rows], Triton would first move each row to another
    thread through shared memory, which takes as many instructions as two coordinates.
    """
    THREADS: tl.constexpr = 2 * c.shape.half // EACH if 2 * c.shape.half > EACH else 1
    return rows[:, None] & (tl.arange(0, THREADS)[None, :] == 0)


@triton.jit
def count_rows(rows, counter, KIND: tl.constexpr, c: tl.constexpr):
    """Add the number of rows for which ``rows`` is true to a counter in memory. Usually, it is true for no row."""
    # `rows` is compared once more, because Triton's interpreter keeps some conditions as integers, and does not accept
    # integers as a mask.
    counted = once(rows.to(tl.int32) != 0, c.share if KIND == ALIGNED else _SHARE, c)
    tl.atomic_add(counter + counted.to(tl.int32) * 0, counted.to(tl.int32), mask=counted, sem="relaxed")
