"""Records of blocks in Triton: a scale and codes, or uncompressed coordinates; and the mean of several messages.

``t`` is the tile (`tiles.Tile`), ``a`` and ``b`` are its two halves, ``KIND`` is its kind, and ``c`` are the kernel's
constants (`constants.Constants`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lightning_gqsgd import layout
from lightning_gqsgd.kernels.cuda.floats import divided
from lightning_gqsgd.kernels.cuda.packing import pack, unpack
from lightning_gqsgd.kernels.cuda.scales import received_scale, scales_of, value_of
from lightning_gqsgd.kernels.cuda.tiles import CODES, RAGGED, coded, column, load_raw, store_raw, within

_SCALE = tl.constexpr(layout.SCALE)


class Messages(NamedTuple):
    """One message of each source.

    Attributes:
        wires: the first message, uint8.
        stride: bytes from the start of a message to the start of the next one, int64.
        ranks: number of messages. Their mean's constants have that number, too; a loop with a constant end takes more
            registers.
        keys: the dither key of each source, int64 [count].
        to_values: the family's function, see `stages.ScaledFamily`.
    """

    wires: Any
    stride: Any
    ranks: Any
    keys: Any
    to_values: Any


@triton.jit
def write_records(a, b, t, wire, given, key, to_codes: tl.constexpr, KIND: tl.constexpr, c: tl.constexpr):
    """Write the records of a tile.

    Args:
        a, b, t: the tile.
        wire: the message.
        given: the bits of the scales of all blocks of the table. None: scales are the largest magnitudes.
        key: the dither key.
        to_codes: the family's function, see `stages.ScaledFamily`.
    """
    at = column(t, CODES)
    if KIND == RAGGED:
        store_raw(a, b, wire, at, t, c)
    t = coded(t, KIND, c)
    code_a, code_b = to_codes(a, b, t, key, scales_of(a, b, t, wire, given, c), KIND, c)
    pack(code_a, code_b, t.n, t.inside & (t.raw == 0), wire, at, KIND, c)


@triton.jit
def mean_of_messages(m, t, KIND: tl.constexpr, c: tl.constexpr):
    """Both halves of the mean of `Messages`, added up in their order; and which coded rows are NaN."""
    ROWS: tl.constexpr = c.shape.rows
    HALF: tl.constexpr = c.shape.half
    at = column(t, CODES)
    place = column(t, _SCALE)
    has_codes, whole = t.inside & (t.raw == 0), coded(t, KIND, c)
    first = tl.zeros((ROWS,), c.number.compute)  # of all sums of a row: NaN, if a message's scale is not finite
    for source in range(m.ranks):
        code = received_scale(m.wires + source * m.stride, place, has_codes, c)
        first = tl.where((code >> 1) > (c.number.infinity >> c.number.shift), float("nan"), first)
    a = tl.zeros((ROWS, HALF), c.number.compute) + first[:, None]
    b = a
    for source in range(m.ranks):
        wire = m.wires + source * m.stride
        if KIND == RAGGED:
            raw_a, raw_b = load_raw(wire, at, t, c)
            a += raw_a * c.mean.each
            b += raw_b * c.mean.each
        code = received_scale(wire, place, has_codes, c)
        bits = (code >> 1) << c.number.shift
        used = (bits > 0) & (bits <= c.number.infinity)  # the largest finite number travels as if it were infinity
        scale = tl.where(used, value_of(bits, c) * c.mean.each, 0)
        code_a, code_b = unpack(wire, at, whole.n, used, KIND, c)
        value_a, value_b = m.to_values(code_a, code_b, whole, m.keys + source, scale, (code & 1) == 1, KIND, c)
        a += value_a
        b += value_b
    if c.mean.rest != 1:
        rest = tl.full((1, 1), c.mean.rest, c.number.compute)
        a, b = divided(a, rest, c), divided(b, rest, c)
    if KIND == RAGGED:
        inside_a, inside_b = within(t.n, c)
        a, b = tl.where(inside_a, a, 0), tl.where(inside_b, b, 0)
    return a, b, first != first
