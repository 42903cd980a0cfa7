"""Kernels of exponential codes for GPUs, in Triton; `codecs.exponential.codec` has the readable form."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from lightning_gqsgd.kernels.cuda.floats import clamped, divided, one_and
from lightning_gqsgd.kernels.cuda.hashing import draws
from lightning_gqsgd.kernels.cuda.ptx import unknown
from lightning_gqsgd.kernels.cuda.scales import send_scales
from lightning_gqsgd.kernels.cuda.stages import ScaledFamily
from lightning_gqsgd.kernels.wire import DITHER_FIRST, float_type, integer_type, scale_format

_FIRST = tl.constexpr(DITHER_FIRST)


class Magnitudes(NamedTuple):
    """The constants of the family, see `codecs.exponential.codec.ExponentialQuantiser`.

    Attributes:
        magnitudes: number of non-zero magnitudes.
        cut: number of mantissa bits that a code drops.
        offset: the bits of 1.0 without the dropped bits, minus the magnitude that stands for 1.
        smallest: the smallest level.
        per_smallest: 1/smallest.
        shrink: 2^-headroom, by which a rank's coordinates are multiplied before encoding.
    """

    magnitudes: int
    cut: int
    offset: int
    smallest: float
    per_smallest: float
    shrink: float


def magnitudes_of(q: Any, dtype: torch.dtype) -> Magnitudes:
    """Returns the constants of the family for an `ExponentialQuantiser` and gradients of a dtype."""
    form = scale_format(dtype)
    real = float_type(dtype)
    cut = form.mantissa - q.mantissa
    offset = (form.infinity >> form.mantissa >> 1 << q.mantissa) - q.magnitudes
    smallest = integer_type(dtype)((offset + 1) << cut).view(real)
    return Magnitudes(q.magnitudes, cut, offset, float(smallest), float(real(1) / smallest), 2.0**-q.headroom)


@triton.jit
def _to_codes(a, b, t, key, scales, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the codes of coordinates; see `ScaledFamily.to_codes`. The flag of a block is never set."""
    send_scales(scales, t.n < 0, c)
    draw_a, draw_b = draws(t, key, KIND, c)
    return _codes(a, draw_a, scales, c), _codes(b, draw_b, scales, c)


@triton.jit
def _to_values(code_a, code_b, t, key, scale, flag, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the coordinates of codes; see `ScaledFamily.to_values`. Decoding needs no dither."""
    return _values(code_a, scale, 1, c), _values(code_b, scale, 1, c)


@triton.jit
def _sums_to_values(code_a, code_b, t, keys, ranks, scale, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the mean from sums of codes; see `ScaledFamily.sums_to_values`. The sums are codes, see
    `_pairs_to_codes`."""
    SHARE: tl.constexpr = 1 / c.family.shrink / c.mean.ranks
    return _values(code_a, scale, SHARE, c), _values(code_b, scale, SHARE, c)


@triton.jit
def _pairs_to_codes(code, other, word, c: tl.constexpr):
    """Returns unbiased codes of the sums of two codes' numbers; see
    `codecs.exponential.codec.ExponentialQuantiser.combine`."""
    MASK: tl.constexpr = (1 << (c.codes.bits - 1)) - 1
    is_smaller = (other & MASK) > (code & MASK)
    large = tl.where(is_smaller, other, code)
    small = tl.where(is_smaller, code, other)
    a = large & MASK
    b = small & MASK
    opposite = ((large ^ small) >> (c.codes.bits - 1)) != 0
    distance = a - b - opposite.to(tl.int32)
    shift = tl.minimum(tl.maximum(32 - distance, 0), 31).to(tl.uint32)
    fires = ((distance <= 0) | ((distance <= 32) & ((word >> shift) == 0))).to(tl.int32)
    moved = tl.where(opposite, a - fires, tl.minimum(a + fires, c.family.magnitudes))
    moved = tl.where(opposite & (distance < 0), 0, moved)
    result = tl.where(b == 0, a, moved)
    return tl.where(result == 0, 0, (large & (1 << (c.codes.bits - 1))) | result)


@triton.jit
def _codes(v, draw, scales, c: tl.constexpr):
    """Returns the codes of one half."""
    inverse = divided(scales.value * 0 + 1, scales.value, c)
    y = tl.minimum(tl.abs(v) * inverse[:, None], 1) * tl.full((), c.family.shrink, c.number.compute)
    UNIT: tl.constexpr = 1 << (c.family.cut - 16)
    random = draw.to(c.number.integer) * UNIT + UNIT // 2  # the dither in units of the last bit
    magnitude = ((y.to(c.number.integer, bitcast=True) + random) >> c.family.cut) - c.family.offset
    uniform = (one_and(draw) + (_FIRST - 1)).to(c.number.compute)
    reaches = (y * tl.full((), c.family.per_smallest, c.number.compute) > uniform).to(c.number.integer)
    smallest = tl.full((), c.family.smallest, c.number.compute)
    # If the compiler knew how few bits there are, it would compute in bytes, and a GPU has no instructions for bytes.
    magnitude = unknown(tl.where(y < smallest, reaches, magnitude).to(tl.int32))
    sign = v.to(c.number.integer, bitcast=True) >> (c.number.integer.primitive_bitwidth - c.codes.bits)
    sign = sign.to(tl.int32) & (1 << (c.codes.bits - 1))
    return tl.where(magnitude > 0, magnitude | sign, 0) * scales.used[:, None]


@triton.jit
def _values(code, scale, SHARE: tl.constexpr, c: tl.constexpr):
    """Returns the coordinates of one half for codes under scales, [rows], times ``SHARE``."""
    magnitude = code & ((1 << (c.codes.bits - 1)) - 1)
    y = ((magnitude + c.family.offset).to(c.number.integer) << c.family.cut).to(c.number.compute, bitcast=True)
    y = tl.where(magnitude > 0, y, 0)
    if SHARE != 1:  # the product with the scale may be infinite
        y = y * tl.full((), SHARE, c.number.compute)
    value = clamped(y * scale[:, None], tl.full((), c.mean.limit, c.number.compute))
    return tl.where((code >> (c.codes.bits - 1)) > 0, -value, value)


FAMILY = ScaledFamily(magnitudes_of, _to_codes, _to_values, _sums_to_values, _pairs_to_codes)
