"""Kernels of EDEN codes for GPUs, in Triton; `codecs.eden.codec` has the readable form.

The lengths of blocks in a tile ``t`` are numbers of rotated coordinates, see `tiles.coded_tile`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from lightning_gqsgd.kernels import wire
from lightning_gqsgd.kernels.cuda.floats import clamped, divided, root
from lightning_gqsgd.kernels.cuda.hashing import block_keys, draws, words
from lightning_gqsgd.kernels.cuda.rotation import transformed
from lightning_gqsgd.kernels.cuda.scales import Scales, code_of, send_scales
from lightning_gqsgd.kernels.cuda.stages import ScaledFamily
from lightning_gqsgd.kernels.cuda.tiles import RAGGED
from lightning_gqsgd.kernels.rotation import FEW
from lightning_gqsgd.kernels.wire import float_type

_SCALE_PLACE = tl.constexpr(wire.SCALE_PLACE)
_FEW = tl.constexpr(FEW)


class Eden(NamedTuple):
    """The constants of the family, see `codecs.eden.codec.EdenQuantiser`.

    Attributes:
        magnitudes: magnitudes of the levels.
        thresholds: the smallest number that is rounded to each magnitude.
    """

    magnitudes: tuple[float, ...]
    thresholds: tuple[float, ...]


def numbers_of(q: Any, dtype: torch.dtype) -> Eden:
    """Returns the constants of the family for an `EdenQuantiser` and gradients of a dtype."""
    real = float_type(dtype)
    return Eden(tuple(float(real(size)) for size in q.magnitudes), tuple(float(real(size)) for size in q.thresholds))


class Rotated(NamedTuple):
    """A tile of rotated coordinates, in two halves.

    Attributes:
        a, b: rotated coordinates.
        width: width of each row's dither, which is 0 for rows with many coordinates that are not small, [rows].
        squares: sums of squares, [rows].
        deviation: root mean squares, [rows].
        up: the power of two by which scales are multiplied, [rows].
    """

    a: Any
    b: Any
    width: Any
    squares: Any
    deviation: Any
    up: Any


@triton.jit
def _to_codes(a, b, t, key, scales, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the codes of coordinates; see `ScaledFamily.to_codes`. The scale of a block follows from its codes, so it
    is sent after them."""
    rotated = rotated_tile(a, b, t, key, scales, KIND, c)
    moved_a, moved_b = with_dither(rotated, t, key, KIND, c)
    number_a, level_a = _nearest(moved_a, rotated.deviation, c)
    number_b, level_b = _nearest(moved_b, rotated.deviation, c)
    level_a = tl.where(moved_a < 0, -level_a, level_a)
    level_b = tl.where(moved_b < 0, -level_b, level_b)
    used = send_scales_of(rotated, level_a, level_b, t, key, scales, c)
    return _with_sign(number_a, moved_a, used, c), _with_sign(number_b, moved_b, used, c)


@triton.jit
def rotated_tile(a, b, t, key, scales, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the rotated coordinates of a tile. The arguments are like those of `ScaledFamily.to_codes`."""
    down, up = _powers_of_two(scales.bits, c)
    width = _dither_widths(a * down[:, None], b * down[:, None], t, scales.bits, down, c)
    a, b = _rotated(a * down[:, None], b * down[:, None], t, key, KIND, c)
    squares = _folded(a * a + b * b, c)
    deviation = root(divided(squares, t.n.to(c.number.compute), c), c)
    return Rotated(a, b, width, squares, deviation, up)


@triton.jit
def with_dither(rotated, t, key, KIND: tl.constexpr, c: tl.constexpr):
    """Returns both halves of the coordinates from which levels are chosen: rotated coordinates, plus a dither in rows
    with few coordinates that are not small."""
    draw_a, draw_b = draws(t, key, KIND, c)
    width = rotated.width[:, None]
    return rotated.a + _offsets(draw_a, c) * width, rotated.b + _offsets(draw_b, c) * width


@triton.jit
def send_scales_of(rotated, level_a, level_b, t, key, scales, c: tl.constexpr):
    """Write the scales of rotated blocks with these levels. Returns 1 for blocks whose codes have a meaning, and 0 for
    others: int32 [rows]."""
    products = _folded(rotated.a * level_a + rotated.b * level_b, c)
    is_coded = scales.used > 0
    scale = tl.where(is_coded, divided(rotated.squares, tl.where(is_coded, products, 1), c) * rotated.up, 0)
    word_a, word_b = block_keys(t, key)
    random = tl.sum(words(tl.full((1, 1), _SCALE_PLACE, tl.uint32), word_a, word_b), axis=1)
    bits = tl.where(is_coded, _rounded_at_random(scale, random, c), scales.bits)
    used = scales.used & (bits > 0).to(tl.int32)
    send_scales(Scales(scale, used, bits, code_of(bits, c), bits == 0, scales.places, scales.sent), t.n < 0, c)
    return used


@triton.jit
def _to_values(code_a, code_b, t, key, scale, flag, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the coordinates of codes; see `ScaledFamily.to_values`."""
    return rotated_back_tile(_levels(code_a, c), _levels(code_b, c), t, key, scale, KIND, c)


@triton.jit
def rotated_back_tile(a, b, t, key, scale, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the coordinates of blocks, both halves, from the levels of their rotated coordinates."""
    if KIND == RAGGED:
        p = tl.arange(0, c.shape.half)[None, :]
        a = tl.where(p < t.n[:, None], a, 0)
        b = tl.where(p + c.shape.half < t.n[:, None], b, 0)
    a, b = _rotated_back(a, b, t, tl.load(key), KIND, c)
    limit = tl.full((1, 1), c.mean.limit, c.number.compute)
    return clamped(a * scale[:, None], limit), clamped(b * scale[:, None], limit)


@triton.jit
def _powers_of_two(largest, c: tl.constexpr):
    """Returns the power of two by which each block is multiplied, and its inverse, [rows]; see
    `codecs.eden.codec.powers_of_two`. ``largest`` has the bits of the largest magnitudes, rounded up, [rows]."""
    INFINITY: tl.constexpr = c.number.infinity >> c.number.mantissa
    TINY: tl.constexpr = c.number.tiny >> c.number.mantissa
    exponent = tl.minimum(tl.maximum(largest >> c.number.mantissa, TINY), INFINITY - 2).to(c.number.integer)
    down = ((INFINITY - 1 - exponent) << c.number.mantissa).to(c.number.integer)
    up = (exponent << c.number.mantissa).to(c.number.integer)
    return down.to(c.number.compute, bitcast=True), up.to(c.number.compute, bitcast=True)


@triton.jit
def _dither_widths(a, b, t, largest, down, c: tl.constexpr):
    """Returns the width of each block's dither; see `codecs.eden.codec.dither_widths`. ``largest`` has the bits of the
    largest magnitudes, rounded up, [rows]."""
    STAGES: tl.constexpr = c.shape.stages + 1
    finite = tl.where(largest < c.number.infinity, largest, 0).to(c.number.integer)
    top = finite.to(c.number.compute, bitcast=True) * down
    exponent = tl.zeros(t.n.shape, tl.int32)
    for stage in tl.static_range(STAGES):
        exponent += (t.n > (1 << stage)).to(tl.int32)
    HALF: tl.constexpr = (c.number.infinity >> c.number.mantissa) // 2
    small = ((HALF - 1 - (exponent + 1) // 2).to(c.number.integer) << c.number.mantissa).to(c.number.integer)
    limit = (top * small.to(c.number.compute, bitcast=True))[:, None]
    count = tl.sum((tl.abs(a) >= limit).to(tl.int32) + (tl.abs(b) >= limit).to(tl.int32), axis=1)
    gap = ((HALF + 2 - exponent).to(c.number.integer) << c.number.mantissa).to(c.number.integer)
    return tl.where(count <= _FEW, top * gap.to(c.number.compute, bitcast=True), 0)


@triton.jit
def _offsets(draw, c: tl.constexpr):
    """Returns the dither of the coordinates of one half; see `codecs.eden.codec.offsets`."""
    unit = (draw & 0x3FFF).to(tl.int32).to(c.number.compute)
    return unit * 0.00006103515625 + (0.000030517578125 - 0.5)


@triton.jit
def _rotated(a, b, t, key, KIND: tl.constexpr, c: tl.constexpr):
    """Returns both halves after two rounds of signs and Hadamard transforms, see `codecs.eden.codec.signs`.

    The loop over rounds is not unrolled, because the transforms take long to compile.
    """
    draw_a, draw_b = draws(t, key, KIND, c)
    for number in range(2):
        a, b = transformed(a * _signs(draw_a, 15 - number), b * _signs(draw_b, 15 - number), t.n, KIND, c)
    return a, b


@triton.jit
def _rotated_back(a, b, t, key, KIND: tl.constexpr, c: tl.constexpr):
    """Returns both halves after the inverse of `_rotated`."""
    draw_a, draw_b = draws(t, key, KIND, c)
    for number in range(2):
        a, b = transformed(a, b, t.n, KIND, c)
        a = a * _signs(draw_a, 14 + number)
        b = b * _signs(draw_b, 14 + number)
    return a, b


@triton.jit
def _signs(draw, bit):
    """Returns 1 or -1 for each coordinate of one half, from one bit of its dither."""
    return tl.where(((draw >> bit) & 1) == 0, -1.0, 1.0)


@triton.jit
def _folded(v, c: tl.constexpr):
    """Returns the sum of each row's terms; see `codecs.eden.codec.folded`. ``v`` is the sum of the two halves of the
    terms, [rows, half]."""
    ROWS: tl.constexpr = c.shape.rows
    STAGES: tl.constexpr = c.shape.stages  # Triton before 3.9 takes no attribute here
    for stage in tl.static_range(STAGES):
        first, second = tl.split(tl.trans(tl.reshape(v, (ROWS, 2, c.shape.half >> (stage + 1))), 0, 2, 1))
        v = first + second
    return tl.reshape(v, (ROWS,))


@triton.jit
def _nearest(v, deviation, c: tl.constexpr):
    """Returns the number of the nearest magnitude of each coordinate of one half, and the magnitude."""
    number = tl.zeros(v.shape, tl.int32)
    level = tl.full(v.shape, c.family.magnitudes[0], c.number.compute)
    for k in tl.static_range(1, 1 << (c.codes.bits - 1)):
        reaches = tl.abs(v) >= (tl.full((), c.family.thresholds[k], c.number.compute) * deviation)[:, None]
        number += reaches.to(tl.int32)
        level = tl.where(reaches, tl.full((), c.family.magnitudes[k], c.number.compute), level)
    return number, level


@triton.jit
def _with_sign(number, v, used, c: tl.constexpr):
    """Returns the codes of one half, from the numbers of magnitudes and the signs."""
    return (number | ((v < 0).to(tl.int32) << (c.codes.bits - 1))) * used[:, None]


@triton.jit
def _levels(code, c: tl.constexpr):
    """Returns the levels of the codes of one half."""
    HIGHEST: tl.constexpr = 1 << (c.codes.bits - 1)
    number = code & (HIGHEST - 1)
    level = tl.full(code.shape, c.family.magnitudes[0], c.number.compute)
    for k in tl.static_range(1, HIGHEST):
        level = tl.where(number >= k, tl.full((), c.family.magnitudes[k], c.number.compute), level)
    return tl.where(code >= HIGHEST, -level, level)


@triton.jit
def _rounded_at_random(scale, random, c: tl.constexpr):
    """Returns scales rounded at random to the wire's format; see `wire.ScaleFormat.rounded_at_random`. ``random`` is
    uint32 [rows]."""
    TINY: tl.constexpr = c.number.tiny
    INFINITY: tl.constexpr = c.number.infinity
    INVERSE: tl.constexpr = (((INFINITY >> c.number.mantissa) - 1) << c.number.mantissa) - TINY
    bits = scale.to(c.number.integer, bitcast=True)
    rounded = (bits + (random >> (32 - c.number.shift)).to(c.number.integer)) >> c.number.shift << c.number.shift
    rounded = tl.minimum(rounded, INFINITY - 1)
    inverse = tl.full((), INVERSE, c.number.integer).to(c.number.compute, bitcast=True)
    unit = tl.full((), 2.0**-24, c.number.compute)
    is_tiny = scale * inverse > (random >> 8).to(tl.int32).to(c.number.compute) * unit
    return tl.where(bits < TINY, tl.where(is_tiny, TINY, 0), rounded).to(c.number.integer)


FAMILY = ScaledFamily(numbers_of, _to_codes, _to_values)
