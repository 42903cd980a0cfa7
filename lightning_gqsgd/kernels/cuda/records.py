"""Writes records of blocks, and adds several messages, in Triton. A record is a scale and codes, or raw coordinates.

``t`` is the tile (`tiles.Tile`), ``a`` and ``b`` are its two halves, ``KIND`` is its kind, and ``c`` has the kernel's
constants (`constants.Constants`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lightning_gqsgd.kernels.cuda.floats import divided
from lightning_gqsgd.kernels.cuda.packing import pack, unpack
from lightning_gqsgd.kernels.cuda.rotation import rotated
from lightning_gqsgd.kernels.cuda.scales import received_scale, received_value, scales_of
from lightning_gqsgd.kernels.cuda.tiles import (
    RAGGED,
    any_not_finite,
    coded_tile,
    load_raw,
    load_tile,
    message_at,
    record_places,
    scale_places,
    store_raw,
    within,
)


class Messages(NamedTuple):
    """One message of each source.

    Attributes:
        wires: the first message, uint8.
        stride: units of 16 bytes from the start of a message to the start of the next one, int64.
        ranks: number of messages. ``c.mean`` has this number, too, but a loop with a constant end takes more registers.
        keys: the dither key of each source, int64 [count].
        own: number of the source whose coordinates are given, see `protocol.Kernels.decode`. It is used only if
            ``c.mean.has_own`` is true.
        to_values: the family's function, see `stages.ScaledFamily`.
    """

    wires: Any
    stride: Any
    ranks: Any
    keys: Any
    own: Any
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
    at = record_places(t)
    if KIND == RAGGED:
        store_raw(a, b, wire, at, t, c)
    t = coded_tile(t, KIND, c)
    code_a, code_b = to_codes(a, b, t, key, scales_of(a, b, t, wire, given, c), KIND, c)
    pack(code_a, code_b, t.n, t.inside & (t.raw == 0), wire, at, KIND, c)


@triton.jit
def sum_of_messages(m, t, KIND: tl.constexpr, c: tl.constexpr):
    """Returns both halves of the sum of `Messages` times ``c.mean.each``, added in order. Only raw rows are taken from
    the message of source ``m.own``. A coded row becomes NaN if its scale in a message is not finite."""
    ROWS: tl.constexpr = c.shape.rows
    HALF: tl.constexpr = c.shape.half
    at = record_places(t)
    place = scale_places(t, c)
    a = tl.zeros((ROWS, HALF), c.number.compute)
    b = a
    if c.mean.ranks == 1 and not c.mean.has_own:
        a, b = _with_message(a, b, m.wires, place, at, 0, m, t, KIND, c)
    else:
        for source in range(m.ranks):
            wire = message_at(m.wires, m.stride, source)
            if c.mean.has_own:
                if KIND == RAGGED:
                    a, b = _with_raw(a, b, wire, at, t, c)
                if source != m.own:
                    a, b = _with_coded(a, b, wire, place, at, source, m, t, KIND, c)
            else:
                a, b = _with_message(a, b, wire, place, at, source, m, t, KIND, c)
    if KIND == RAGGED:
        inside_a, inside_b = within(t.n, c)
        a = tl.where(inside_a, a, 0)
        b = tl.where(inside_b, b, 0)
    return a, b


@triton.jit
def rows_not_finite(m, t, c: tl.constexpr):
    """Returns whether `sum_of_messages` sets each coded row to NaN, because its scale in a message is not finite."""
    place = scale_places(t, c)
    coded = t.inside & (t.raw == 0)
    if c.mean.ranks == 1 and not c.mean.has_own:
        bad = _is_infinite(received_scale(m.wires, place, coded, c), c)
    else:
        bad = t.n < 0
        for source in range(m.ranks):
            infinite = _is_infinite(received_scale(message_at(m.wires, m.stride, source), place, coded, c), c)
            if c.mean.has_own:
                infinite = infinite & (source != m.own)
            bad = bad | infinite
    return bad


@triton.jit
def _is_infinite(code, c: tl.constexpr):
    """Returns whether each block is not finite, from the codes of scales."""
    return (code >> 1) > (c.number.infinity >> c.number.shift)


@triton.jit
def _with_message(a, b, wire, place, at, source, m, t, KIND: tl.constexpr, c: tl.constexpr):
    """Returns both halves of a sum plus the coordinates of one message times ``c.mean.each``.

    Args:
        a, b, t: the sum, and the tile.
        wire: the message.
        place: positions of scales, in bytes from ``wire`` on.
        at: positions of records, in bytes from ``wire`` on.
        source: number of the message.
        m: all messages.
    """
    if KIND == RAGGED:
        a, b = _with_raw(a, b, wire, at, t, c)
    return _with_coded(a, b, wire, place, at, source, m, t, KIND, c)


@triton.jit
def _with_raw(a, b, wire, at, t, c: tl.constexpr):
    """Returns both halves of a sum plus the raw coordinates of one message; see `_with_message`."""
    raw_a, raw_b = load_raw(wire, at, t, c)
    return a + raw_a * c.mean.each, b + raw_b * c.mean.each


@triton.jit
def _with_coded(a, b, wire, place, at, source, m, t, KIND: tl.constexpr, c: tl.constexpr):
    """Returns both halves of a sum plus the coded coordinates of one message; see `_with_message`."""
    code = received_scale(wire, place, t.inside & (t.raw == 0), c)
    bits = (code >> 1) << c.number.shift
    used = (bits > 0) & (bits <= c.number.infinity)  # the largest finite number is sent as infinity
    scale = tl.where(_is_infinite(code, c), float("nan"), received_value(bits, c) * c.mean.each)
    t = coded_tile(t, KIND, c)
    code_a, code_b = unpack(wire, at, t.n, used, KIND, c)
    value_a, value_b = m.to_values(code_a, code_b, t, m.keys + source, scale, (code & 1) == 1, KIND, c)
    return a + value_a, b + value_b


@triton.jit
def with_own(a, b, x, t, rotation, KIND: tl.constexpr, c: tl.constexpr):
    """Returns both halves of the sum of `sum_of_messages` plus this rank's coordinates in coded rows, and whether each
    of these rows is NaN because one of its coordinates is not finite.

    Args:
        a, b, t: the sum, and the tile.
        x: this rank's coordinates.
        rotation: key of the rotation that is applied to them first, or None.
    """
    own_a, own_b = load_tile(x, t.start, t.n, KIND, c)
    if rotation is not None:
        own_a, own_b = rotated(own_a, own_b, t, rotation, False, KIND, c)
    bad = any_not_finite(own_a, own_b, t.n, KIND, c)
    own_a = tl.where(bad[:, None], float("nan"), own_a * c.mean.each)
    own_b = tl.where(bad[:, None], float("nan"), own_b * c.mean.each)
    if KIND == RAGGED:
        bad &= t.raw == 0
        own_a = tl.where(t.raw[:, None], 0, own_a)
        own_b = tl.where(t.raw[:, None], 0, own_b)
    return a + own_a, b + own_b, bad


@triton.jit
def divided_by_rest(a, b, c: tl.constexpr):
    """Returns both halves of the mean from a sum, see `wire.Share`."""
    if c.mean.rest != 1:
        rest = tl.full((1, 1), c.mean.rest, c.number.compute)
        a = divided(a, rest, c)
        b = divided(b, rest, c)
    return a, b
