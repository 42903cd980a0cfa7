"""Scales of blocks in Triton: from the largest magnitudes to the wire, and back.

``t`` is the tile (`tiles.Tile`), and ``c`` are the kernel's constants (`constants.Constants`). `wire` has the format.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lightning_gqsgd.kernels.cuda.floats import magnitudes
from lightning_gqsgd.kernels.cuda.tiles import ROW, column, scale_places


class Scales(NamedTuple):
    """The scales of a tile's blocks, before they are sent.

    Attributes:
        value: the scales in the compute type, [rows]; any number where a scale is zero or not finite.
        used: 0 where a scale is zero or not finite, so that codes have to be 0, and else 1: int32 [rows].
        bits: the bits of the scales, [rows].
        places: where scales are written, pointers [rows].
        sent: which scales are written, bool [rows].
    """

    value: Any
    used: Any
    bits: Any
    places: Any
    sent: Any


@triton.jit
def scales_of(a, b, t, wire, given, c: tl.constexpr):
    """Returns the scales of blocks whose records go to a message.

    Args:
        a, b, t: the tile.
        wire: the message.
        given: the bits of the scales of all blocks of the table. None: scales are the largest magnitudes, rounded up.
    """
    if given is None:
        largest = tl.max(_larger(a, b, c), axis=1)
        bits = _rounded_up(largest, c)
    else:
        bits = tl.load(given + column(t, ROW))
    used = tl.minimum(tl.where(bits < c.number.infinity, bits, 0), 1).to(tl.int32)
    place = scale_places(t, c)
    places = (wire + place).to(tl.pointer_type(c.number.sent), bitcast=True)
    return Scales(value_of(bits, c), used, bits, places, t.inside & (t.raw == 0) & (place >= 0))


@triton.jit
def _larger(a, b, c: tl.constexpr):
    """Returns the larger of two magnitudes, as integers."""
    if c.number.compute == tl.float64:
        larger = tl.maximum(magnitudes(a, c), magnitudes(b, c))
    else:  # as floats, where no bit has to be masked; NaN is the largest integer
        larger = magnitudes(tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL), c)
    return larger


@triton.jit
def send_scales(s, flag, c: tl.constexpr):
    """Write scales and the blocks' flags, bool [rows]."""
    sent = ((s.bits + 1) >> c.number.shift << 1) | flag.to(c.number.integer)
    tl.store(s.places, tl.where(s.bits < c.number.infinity, sent, -1).to(c.number.sent), mask=s.sent)


@triton.jit
def received_scale(wire, place, coded, c: tl.constexpr):
    """Returns the scales' codes of coded rows, in the integer type that is as wide as coordinates; zero in other rows.
    ``place``: in bytes from ``wire`` on."""
    code = tl.load((wire + place).to(tl.pointer_type(c.number.sent), bitcast=True), mask=coded, other=0)
    return code.to(c.number.integer)


@triton.jit
def value_of(bits, c: tl.constexpr):
    """Returns the scales with these bits; any number where the scale is zero or not finite."""
    usable = tl.minimum(tl.maximum(bits, c.number.tiny), c.number.infinity - 1)
    return usable.to(c.number.integer).to(c.number.compute, bitcast=True)


@triton.jit
def received_value(bits, c: tl.constexpr):
    """Returns the scales with these bits: 0 where it is zero, and any number where it is not finite.

    A product makes it 0: of a ``tl.where`` on the condition that codes are loaded with, Triton 3.6 makes code that it
    then refuses, in a few configurations.
    """
    return value_of(bits, c) * tl.minimum(bits, 1).to(c.number.compute)


@triton.jit
def _rounded_up(bits, c: tl.constexpr):
    """Returns scales rounded up to the wire's format; see `wire.ScaleFormat.rounded_up`."""
    up = tl.minimum(tl.maximum(bits, c.number.tiny), c.number.infinity) + ((1 << c.number.shift) - 1)
    # What was rounded up to infinity is the largest finite number.
    up = tl.minimum((up >> c.number.shift) << c.number.shift, c.number.infinity - 1)
    return tl.where(bits >= c.number.infinity, c.number.infinity, tl.where(bits > 0, up, 0)).to(c.number.integer)
