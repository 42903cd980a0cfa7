"""Codes that are numbers of levels that lie denser near zero, in Triton, see `codecs.companded`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from lightning_gqsgd.codecs.linear.cuda import coordinates, is_stochastic, levels_per_unit, middle_of
from lightning_gqsgd.kernels.cuda.floats import byte_as_float, one_and, positive_root
from lightning_gqsgd.kernels.cuda.hashing import draws
from lightning_gqsgd.kernels.cuda.scales import send_scales
from lightning_gqsgd.kernels.cuda.stages import ScaledFamily
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, DITHER_FIRST

_FIRST = tl.constexpr(DITHER_FIRST)


class Companded(NamedTuple):
    """The numbers of the family, see `codecs.companded.CompandedQuantiser`. The first five are those of
    `linear.Levels`, whose functions serve the blocks that are rounded stochastically.

    Attributes:
        levels: number of codes of companded blocks.
        odd_levels: number of levels of blocks that are rounded stochastically.
        always_stochastic: whether every block is rounded stochastically: False.
        adaptive: whether a block is rounded stochastically if it has many zeros.
        stochastic_from: the share of zeros above which that is so.
        slope, shrink, stretch, root, root_squared: see `codecs.companded.Curve`.
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
    """Returns the numbers of a `CompandedQuantiser`, for gradients of a dtype."""
    real = np.float64 if COMPUTE_DTYPES[dtype] == torch.float64 else np.float32
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
    """Returns the codes of coordinates; see `ScaledFamily.to_codes`. A block's flag says that it is rounded
    stochastically."""
    stochastic = is_stochastic(a, b, t.n, c)
    send_scales(scales, stochastic, c)
    draw_a, draw_b = draws(t, key, KIND, c)
    return _codes(a, draw_a, scales, stochastic, c), _codes(b, draw_b, scales, stochastic, c)


@triton.jit
def _to_values(code_a, code_b, t, key, scale, flag, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the coordinates that codes stand for; see `ScaledFamily.to_values`."""
    middle = middle_of(flag, c)
    draw_a, draw_b = draws(t, tl.load(key), KIND, c)
    share = tl.where(flag, 0.0, 1.0)[:, None]
    offset = middle.to(tl.float32)[:, None] + share * (_FIRST - 1.5)
    offset_a = tl.fma(one_and(draw_a), share, offset)
    offset_b = tl.fma(one_and(draw_b), share, offset)
    a = _expanded(code_a, offset_a, flag, c)
    b = _expanded(code_b, offset_b, flag, c)
    middle = middle.to(c.number.compute)
    return coordinates(a, scale, middle, flag, c), coordinates(b, scale, middle, flag, c)


@triton.jit
def _codes(v, draw, scales, stochastic, c: tl.constexpr):
    """Returns the codes of one half."""
    zero = tl.where(stochastic, c.family.odd_levels // 2, c.family.levels // 2)
    middle = middle_of(stochastic, c)
    less = zero.to(tl.float32) - middle.to(tl.float32)
    middle = middle.to(c.number.compute)
    x = v * levels_per_unit(scales.value, middle, c)[:, None]
    stretched = tl.abs(x) * tl.full((), c.family.stretch, c.number.compute)
    y = positive_root(stretched + tl.full((), c.family.root_squared, c.number.compute), c)
    y -= tl.full((), c.family.root, c.number.compute)
    if c.family.adaptive:
        y = tl.where(stochastic[:, None], tl.abs(x), y)
    y = tl.minimum(y, middle[:, None])  # the last level, also for NaN, the root of infinity
    y = tl.where(x < 0, -y, y)
    y += (one_and(draw) - (less + (1 - _FIRST))[:, None]).to(c.number.compute)
    return tl.floor(y).to(tl.int32) * scales.used[:, None] + (zero * scales.used)[:, None]


@triton.jit
def _expanded(code, offset, stochastic, c: tl.constexpr):
    """Returns the numbers of one half that codes stand for, in units of a level's distance.

    Args:
        code: int32 [rows, half].
        offset: the code for zero with the dither of each coordinate, fp32 [rows, half].
        stochastic: which blocks were rounded stochastically, [rows].
    """
    z = (byte_as_float(code) - offset).to(c.number.compute)
    r = tl.floor(z + tl.full((), 0.5, c.number.compute))
    value = z * tl.full((), c.family.slope, c.number.compute) + tl.abs(r) * (z + (z - r))
    value = value * tl.full((), c.family.shrink, c.number.compute)
    return tl.where(stochastic[:, None], z, value) if c.family.adaptive else value


FAMILY = ScaledFamily(numbers_of, _to_codes, _to_values)
