"""Kernels of linear codes for GPUs, in Triton; `codecs.linear.codec` has the readable form."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from lightning_gqsgd.kernels.cuda.floats import (
    byte_as_float,
    clamped,
    divided,
    divided_by_scale,
    not_zero,
    one_and,
    quotient,
)
from lightning_gqsgd.kernels.cuda.hashing import draws
from lightning_gqsgd.kernels.cuda.scales import send_scales
from lightning_gqsgd.kernels.cuda.stages import ScaledFamily
from lightning_gqsgd.kernels.wire import DITHER_FIRST, float_type

_FIRST = tl.constexpr(DITHER_FIRST)


class Levels(NamedTuple):
    """The constants of the family, see `codecs.linear.codec.LinearQuantiser`.

    Attributes:
        levels: number of levels under subtractive dither.
        odd_levels: number of levels under stochastic rounding.
        nearest: whether codes are the numbers of the nearest levels.
        always_stochastic: whether every block is rounded stochastically.
        adaptive: whether a block is rounded stochastically if it has many zeros.
        stochastic_from: an adaptive block is rounded stochastically if its share of zeros is above this share.
    """

    levels: int
    odd_levels: int
    nearest: bool
    always_stochastic: bool
    adaptive: bool
    stochastic_from: float


def levels_of(q: Any, dtype: torch.dtype) -> Levels:
    """Returns the constants of the family for a `LinearQuantiser` and gradients of a dtype."""
    real = float_type(dtype)
    return Levels(
        levels=q.levels,
        odd_levels=q.odd_levels,
        nearest=q.nearest,
        always_stochastic=q.always_stochastic,
        adaptive=0 <= q.stochastic_from < 1,
        stochastic_from=float(real(q.stochastic_from)),
    )


@triton.jit
def _to_codes(a, b, t, key, scales, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the codes of coordinates; see `ScaledFamily.to_codes`. A block's flag is set if the block is rounded
    stochastically."""
    stochastic = is_stochastic(a, b, t.n, c)
    send_scales(scales, stochastic, c)
    draw_a, draw_b = draws(t, key, KIND, c)
    return _codes(a, draw_a, scales, stochastic, c), _codes(b, draw_b, scales, stochastic, c)


@triton.jit
def _to_values(code_a, code_b, t, key, scale, flag, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the coordinates of codes; see `ScaledFamily.to_values`."""
    middle = middle_of(flag, c)
    offset_a = middle.to(tl.float32)[:, None]
    offset_b = offset_a
    if not (c.family.always_stochastic or c.family.nearest):
        draw_a, draw_b = draws(t, tl.load(key), KIND, c)
        share = tl.where(flag, 0.0, 1.0)[:, None]
        offset = offset_a + share * (_FIRST - 1.5)
        offset_a = tl.fma(one_and(draw_a), share, offset)
        offset_b = tl.fma(one_and(draw_b), share, offset)
    middle = middle.to(c.number.compute)
    return _values(code_a, offset_a, scale, middle, flag, c), _values(code_b, offset_b, scale, middle, flag, c)


@triton.jit
def _sums_to_values(code_a, code_b, t, keys, ranks, scale, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the mean from sums of codes; see `ScaledFamily.sums_to_values`. The dither of all ranks is taken off the
    sum."""
    ROWS: tl.constexpr = c.shape.rows
    HALF: tl.constexpr = c.shape.half
    MIDDLE: tl.constexpr = c.mean.ranks * (c.family.levels - 1) / 2
    offset_a = tl.zeros((ROWS, HALF), tl.float32) + MIDDLE
    offset_b = offset_a
    if not (c.family.always_stochastic or c.family.nearest):
        for rank in range(ranks):
            draw_a, draw_b = draws(t, tl.load(keys + rank), KIND, c)
            offset_a += one_and(draw_a) + (_FIRST - 1.5)
            offset_b += one_and(draw_b) + (_FIRST - 1.5)
    middle = tl.full((ROWS,), MIDDLE, c.number.compute)
    stochastic = (t.n >= 0) & c.family.always_stochastic
    return _values(code_a, offset_a, scale, middle, stochastic, c), _values(
        code_b, offset_b, scale, middle, stochastic, c
    )


@triton.jit
def is_stochastic(a, b, n, c: tl.constexpr):
    """Returns which blocks are rounded stochastically."""
    if c.family.adaptive:
        zeros = n - tl.sum(not_zero(a, c) + not_zero(b, c), axis=1)
        stochastic = zeros.to(tl.float64) > n.to(tl.float64) * tl.full((), c.family.stochastic_from, tl.float64)
    else:
        stochastic = (n >= 0) & c.family.always_stochastic
    return stochastic


@triton.jit
def middle_of(stochastic, c: tl.constexpr):
    """Returns the code that stands for zero, which need not be an integer: [rows]."""
    return tl.where(stochastic, (c.family.odd_levels - 1) * 0.5, (c.family.levels - 1) * 0.5)


@triton.jit
def levels_per_unit(scale, middle, c: tl.constexpr):
    """Returns 1/Δ of each block, [rows], large enough that a coordinate at the scale reaches the last level."""
    inverse = divided_by_scale(middle, scale, c)
    return tl.where(scale * inverse < middle, inverse * tl.full((), c.number.up, c.number.compute), inverse)


@triton.jit
def _codes(v, draw, scales, stochastic, c: tl.constexpr):
    """Returns the codes of one half."""
    zero = tl.where(stochastic, c.family.odd_levels // 2, c.family.levels // 2)
    less = zero.to(tl.float32) - middle_of(stochastic, c).to(tl.float32)
    middle = middle_of(stochastic, c).to(c.number.compute)
    y = clamped(v * levels_per_unit(scales.value, middle, c)[:, None], middle[:, None])
    if c.family.nearest:
        u = tl.where(v == 0, one_and(draw) + (_FIRST - 1), 0.5) - less[:, None]
    else:
        u = one_and(draw) - (less + (1 - _FIRST))[:, None]
    y += u.to(c.number.compute)
    code = tl.floor(y).to(tl.int32)
    if c.family.nearest:
        code = tl.where((y < 0) & (code == 0), -1, code)  # a GPU's floor treats denormal numbers as zero
    return code * scales.used[:, None] + (zero * scales.used)[:, None]


@triton.jit
def _values(code, offset, scale, middle, stochastic, c: tl.constexpr):
    """Returns the coordinates of one half for codes or sums of codes.

    Args:
        code: int32 [rows, half].
        offset: the code of zero plus the dither of each coordinate, fp32 [rows, half] or [rows, 1].
        scale: scales, [rows].
        middle: the code of zero, [rows].
        stochastic: which blocks are rounded stochastically, [rows].
    """
    y = (byte_as_float(code) - offset).to(c.number.compute)
    step, limit = _corrected(divided(scale, middle, c), scale, middle, stochastic, c)
    return clamped(y * step[:, None], limit[:, None])


@triton.jit
def step_and_limit(scale, stochastic, c: tl.constexpr):
    """Returns the distance of levels and the largest magnitude of each block, [rows]. ``scale`` is the received scale
    times ``c.mean.each``."""
    middle = middle_of(stochastic, c)
    if c.number.compute == tl.float32 and c.mean.each == 1:  # otherwise, a small scale's quotient may lose bits
        EVEN: tl.constexpr = 2 / (c.family.levels - 1)
        ODD: tl.constexpr = 2 / (c.family.odd_levels - 1)
        step = quotient(scale, middle, tl.where(stochastic, ODD, EVEN))
    else:
        middle = middle.to(c.number.compute)
        step = divided(scale, middle, c)
    return _corrected(step, scale, middle, stochastic, c)


@triton.jit
def _corrected(step, scale, middle, stochastic, c: tl.constexpr):
    """Returns the distance of levels and the largest magnitude of each block, after a correction of the distance."""
    is_short = stochastic & (step * middle < scale)  # the last level has to decode to the scale, exactly
    step = tl.where(is_short, step * tl.full((), c.number.up, c.number.compute), step)
    limit = tl.full((), c.mean.limit, c.number.compute)
    return step, tl.where(stochastic, tl.minimum(scale, limit), limit)


FAMILY = ScaledFamily(levels_of, _to_codes, _to_values, _sums_to_values)
