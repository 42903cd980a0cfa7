"""Kernels of companded codes for GPUs, in Triton; `codecs.companded.codec` has the readable form."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from lightning_gqsgd.codecs.linear.cuda import is_stochastic, levels_per_unit, middle_of, step_and_limit
from lightning_gqsgd.kernels.cuda.floats import clamped, floor_plus, positive_root, rounded, with_sign_of
from lightning_gqsgd.kernels.cuda.hashing import draws_in_words
from lightning_gqsgd.kernels.cuda.ptx import (
    LOWER_SIGNED,
    LOWER_UNSIGNED,
    UPPER_SIGNED,
    UPPER_UNSIGNED,
    above_draws,
    half_above,
    less_128,
    unknown,
)
from lightning_gqsgd.kernels.cuda.scales import send_scales
from lightning_gqsgd.kernels.cuda.stages import ScaledFamily
from lightning_gqsgd.kernels.wire import float_type


class Companded(NamedTuple):
    """The constants of the family, see `codecs.companded.codec.CompandedQuantiser`. The first five are also in
    `codecs.linear.cuda.Levels`, because functions of that module handle the blocks that are rounded stochastically.

    Attributes:
        levels: number of codes of companded blocks.
        odd_levels: number of levels of blocks that are rounded stochastically.
        always_stochastic: whether every block is rounded stochastically: False.
        adaptive: whether a block is rounded stochastically if it has many zeros.
        stochastic_from: an adaptive block is rounded stochastically if its share of zeros is above this share.
        slope, shrink, stretch, root, root_squared: see `codecs.companded.codec.Curve`.
    """

    levels: int
    odd_levels: int
    always_stochastic: bool
    adaptive: bool
    stochastic_from: float
    slope: float
    shrink: float
    stretch: float
    root: float
    root_squared: float


def numbers_of(q: Any, dtype: torch.dtype) -> Companded:
    """Returns the constants of the family for a `CompandedQuantiser` and gradients of a dtype."""
    real = float_type(dtype)
    curve = q.curve
    return Companded(
        levels=q.levels,
        odd_levels=q.odd_levels,
        always_stochastic=False,
        adaptive=q.stochastic_from < 1,
        stochastic_from=float(real(q.stochastic_from)),
        slope=float(real(curve.slope)),
        shrink=float(real(curve.shrink)),
        stretch=float(real(curve.stretch)),
        root=float(real(curve.root)),
        root_squared=float(real(curve.root_squared)),
    )


@triton.jit
def _to_codes(a, b, t, key, scales, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the codes of coordinates; see `ScaledFamily.to_codes`. A block's flag is set if the block is rounded
    stochastically."""
    # With this order, and with one half after the other below, fewer values are computed twice for lack of registers:
    # there are 64.
    draw_a, draw_b = draws_in_words(t, key, KIND, c)
    stochastic = is_stochastic(a, b, t.n, c)
    send_scales(scales, stochastic, c)
    # The dither, k + 1/2 in units of 2^-16, is from 0 to 1 if a level lies at zero, and from -1/2 to 1/2 otherwise. In
    # the second case, k is signed, and its highest bit becomes the sign.
    flip = tl.where(stochastic, 0, -0x7FFF8000).to(tl.uint32, bitcast=True)[:, None]
    lower = tl.where(stochastic, LOWER_UNSIGNED, LOWER_SIGNED)[:, None]
    upper = tl.where(stochastic, UPPER_UNSIGNED, UPPER_SIGNED)[:, None]
    middle = middle_of(stochastic, c).to(c.number.compute)
    inverse = levels_per_unit(scales.value, middle, c)
    zero = tl.where(stochastic, c.family.odd_levels // 2 * 1.0, c.family.levels // 2 * 1.0)
    code_a = _codes(a, half_above(draw_a ^ flip, lower), inverse, middle, stochastic, c)
    code_a = floor_plus(code_a, scales.used, zero, c)
    code_b = _codes(b, half_above(draw_b ^ flip, upper), inverse, middle, stochastic, c)
    return code_a, floor_plus(code_b, scales.used, zero, c)


@triton.jit
def _to_values(code_a, code_b, t, key, scale, flag, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the coordinates of codes; see `ScaledFamily.to_values`."""
    draw_a, draw_b = draws_in_words(t, tl.load(key), KIND, c)
    # z = code - m + 1/2 - (k + 1/2)/2^16 for the draw k, with m = 2^(bits-1) - 1/2. That is code - 2^(bits-1) + (n +
    # 1/2)/2^16 with n = 2^16 - 1 - k. In blocks without dither, n becomes 0.
    mask = unknown(tl.where(flag, 0, -1)).to(tl.uint32, bitcast=True)[:, None]
    byte_a = code_a.to(tl.uint8)
    byte_b = code_b.to(tl.uint8)
    LESS: tl.constexpr = 128 if c.codes.bits == 8 else 0
    if LESS:
        byte_a = less_128(byte_a)
        byte_b = less_128(byte_b)
    offset = tl.where(flag, LESS - c.family.odd_levels // 2, LESS - c.family.levels // 2 + 1 / 131072)[:, None]
    n_a = above_draws(byte_a, ~draw_a & mask, False)
    n_b = above_draws(byte_b, ~draw_b & mask, True)
    offset = offset.to(c.number.compute)
    unit = tl.full((), 2.0**-16, c.number.compute)
    z_a = tl.fma(n_a.to(c.number.compute), unit, offset)
    z_b = tl.fma(n_b.to(c.number.compute), unit, offset)
    step, limit = step_and_limit(scale, flag, c)
    return _values(z_a, step, limit, flag, c), _values(z_b, step, limit, flag, c)


@triton.jit
def _codes(v, dither, inverse, middle, stochastic, c: tl.constexpr):
    """Returns the codes of one half before they are rounded down, minus the code of the first level above zero.

    Args:
        v: coordinates, [rows, half].
        dither: 2^24 times the dither, int32 [rows, half].
        inverse: levels per unit, [rows].
        middle: the last level, [rows].
        stochastic: which blocks are rounded stochastically, [rows].
    """
    x = v * inverse[:, None]
    stretched = tl.abs(x) * tl.full((), c.family.stretch, c.number.compute)
    y = positive_root(stretched + tl.full((), c.family.root_squared, c.number.compute), c)
    y -= tl.full((), c.family.root, c.number.compute)
    if c.family.adaptive:
        y = tl.where(stochastic[:, None], tl.abs(x), y)
    y = tl.minimum(y, middle[:, None])  # the last level, also for NaN, the root of infinity
    unit = tl.full((), 2.0**-24, c.number.compute)
    return tl.fma(dither.to(c.number.compute), unit, with_sign_of(y, x, c))


@triton.jit
def _values(z, step, limit, stochastic, c: tl.constexpr):
    """Returns the coordinates of one half.

    Args:
        z: numbers of levels without dither, counted from zero, [rows, half].
        step: distances of levels, [rows].
        limit: the largest magnitudes, [rows].
        stochastic: which blocks were rounded stochastically, [rows].
    """
    slope = tl.full((), c.family.slope, c.number.compute)
    shrink = tl.full((), c.family.shrink, c.number.compute)
    rounder = tl.full((), 1.5 * 2.0**c.number.mantissa, c.number.compute)
    if c.family.adaptive:
        # Blocks without a curve use the same formula with other constants instead of a branch: z 1 + 0 (2 z - 0),
        # times 1, is z.
        slope = tl.where(stochastic, 1.0, slope)[:, None]
        shrink = tl.where(stochastic, 1.0, shrink)[:, None]
        rounder = tl.where(stochastic, 2.0**100, rounder)[:, None]
    r = rounded(z, rounder)  # floor(z + 1/2): z is never halfway, because the dither is odd in units of 2^-17
    value = z * slope + tl.abs(r) * tl.fma(z, tl.full((), 2.0, c.number.compute), -r)  # 2 z - r is exact
    return clamped(value * shrink * step[:, None], limit[:, None])


FAMILY = ScaledFamily(numbers_of, _to_codes, _to_values)
