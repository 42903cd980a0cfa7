"""Scales of blocks in Triton: computes, sends and receives them. `wire` describes their format.

``t`` is the tile (`tiles.Tile`), and ``c`` has the kernel's constants (`constants.Constants`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lightning_gqsgd.kernels.cuda.constants import SHARE
from lightning_gqsgd.kernels.cuda.floats import magnitudes
from lightning_gqsgd.kernels.cuda.tiles import ROW, column, once, scale_places

_SHARE = tl.constexpr(SHARE)


class Scales(NamedTuple):
    """The scales of a tile's blocks, before they are sent.

    Attributes:
        value: the scales in the compute type, [rows]. If a scale is zero or not finite, its value has no meaning.
        used: 0 if a scale is zero or not finite, so that codes have to be 0, and 1 otherwise: int32 [rows].
        bits: the bits of the scales, [rows].
        code: the codes on the wire without the blocks' flags, [rows], for scales that are neither zero nor infinite.
        is_zero: whether each scale is zero, bool [rows].
        places: pointers to the places of scales in the message, [rows].
        sent: whether each scale is written, bool [rows].
    """

    value: Any
    used: Any
    bits: Any
    code: Any
    is_zero: Any
    places: Any
    sent: Any


@triton.jit
def scales_of(a, b, t, wire, given, c: tl.constexpr):
    """Returns the scales of blocks whose records are written into a message.

    Args:
        a, b, t: the tile.
        wire: the message.
        given: the bits of the scales of all blocks of the table. None: scales are the largest magnitudes, rounded up.
    """
    if given is None:
        largest = tl.max(_larger(a, b, c), axis=1)
        up = _rounded_up(largest, c)
        # A scale that was rounded up to infinity becomes the largest finite number, but its code is that of infinity.
        usable = tl.minimum(up << c.number.shift, c.number.infinity - 1).to(c.number.integer)
        value = usable.to(c.number.compute, bitcast=True)
        bits = tl.where(largest > 0, tl.where(largest < c.number.infinity, usable, c.number.infinity), 0)
        code = up << 1
        is_zero = largest <= 0
        is_finite = largest < c.number.infinity
    else:
        bits = tl.load(given + column(t, ROW))
        value = value_of(bits, c)
        code = code_of(bits, c)
        is_zero = bits <= 0
        is_finite = bits < c.number.infinity
    used = tl.where(is_zero, 0, is_finite.to(tl.int32))
    place = scale_places(t, c)
    places = (wire + place).to(tl.pointer_type(c.number.sent), bitcast=True)
    return Scales(value, used, bits, code, is_zero, places, t.inside & (t.raw == 0) & (place >= 0))


@triton.jit
def _larger(a, b, c: tl.constexpr):
    """Returns the larger of two magnitudes, as an integer."""
    if c.number.compute == tl.float64:
        larger = tl.maximum(magnitudes(a, c), magnitudes(b, c))
    else:  # a maximum of floats needs no mask; as an integer, NaN is the largest
        larger = magnitudes(tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL), c)
    return larger


@triton.jit
def code_of(bits, c: tl.constexpr):
    """Returns the codes on the wire of finite scales with these bits, without the blocks' flags; see `Scales.code`."""
    return (bits + 1) >> c.number.shift << 1


@triton.jit
def send_scales(s, flag, c: tl.constexpr):
    """Write scales and the blocks' flags into the message. ``flag`` is bool [rows]."""
    flag = flag.to(c.number.integer)
    sent = tl.where(s.is_zero, flag, s.code | flag)
    sent = tl.where(s.bits < c.number.infinity, sent, -1).to(c.number.sent)
    mask = once(s.sent, _SHARE, c)
    tl.store(s.places[:, None] + mask.to(tl.int32) * 0, sent[:, None], mask=mask)


@triton.jit
def received_scale(wire, place, coded, c: tl.constexpr):
    """Returns the codes of scales of coded rows, in the integer type that is as wide as coordinates; zero in other
    rows. ``place`` has positions in bytes from ``wire`` on."""
    code = tl.load((wire + place).to(tl.pointer_type(c.number.sent), bitcast=True), mask=coded, other=0)
    return code.to(c.number.integer)


@triton.jit
def value_of(bits, c: tl.constexpr):
    """Returns the scales with these bits. If a scale is zero or not finite, the result has no meaning."""
    usable = tl.minimum(tl.maximum(bits, c.number.tiny), c.number.infinity - 1)
    return usable.to(c.number.integer).to(c.number.compute, bitcast=True)


@triton.jit
def received_value(bits, c: tl.constexpr):
    """Returns the scales with these bits. If a scale is zero, the result is 0; if it is not finite, the result has no
    meaning.

    A product sets the result to 0. If a ``tl.where`` had the same condition as the load of codes, Triton 3.6 would
    generate code that it then refuses, in a few configurations.
    """
    return value_of(bits, c) * tl.minimum(bits, 1).to(c.number.compute)


@triton.jit
def _rounded_up(bits, c: tl.constexpr):
    """Returns the bits of scales that are sent, rounded up to the wire's format. If a scale is zero, they are the bits
    of the smallest scale; if it is not finite, they are those of infinity. See `wire.ScaleFormat.rounded_up`."""
    up = tl.minimum(tl.maximum(bits, c.number.tiny), c.number.infinity) + ((1 << c.number.shift) - 1)
    return up >> c.number.shift
