"""Kernels of linear codes for CPUs, in Numba; `codecs.linear.codec` has the readable form."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numba import float32, int32, uint8

from lightning_gqsgd.kernels.cpu.blocks import codec_kernel, sum_kernel
from lightning_gqsgd.kernels.cpu.casts import clamped, part
from lightning_gqsgd.kernels.cpu.dither import FIRST, dither
from lightning_gqsgd.kernels.cpu.jit import inlined, loop
from lightning_gqsgd.kernels.cpu.loops import add_scaled, fill
from lightning_gqsgd.kernels.cpu.packing import pack_lanes, pack_planes, unpack_lanes, unpack_planes
from lightning_gqsgd.kernels.cpu.records import record_reader, record_writer, sum_reader
from lightning_gqsgd.kernels.wire import float_type

if TYPE_CHECKING:
    from lightning_gqsgd.codecs.linear.codec import LinearQuantiser


class Linear(NamedTuple):
    """A linear quantiser, typed for the kernels. Numbers without a type below are of the compute dtype.

    Attributes:
        zero: K // 2, the number of the level at zero, or of the first level above zero.
        odd_zero: K // 2 for the K of stochastic rounding.
        middle: (K - 1) / 2.
        odd_middle: (K - 1) / 2 for the K of stochastic rounding.
        sum_middle: (K - 1) / 2 times the number of ranks.
        stochastic_from: see `codecs.linear.codec.LinearQuantiser`.
        nearest: see `codecs.linear.codec.LinearQuantiser`.
    """

    zero: np.int32
    odd_zero: np.int32
    middle: np.floating
    odd_middle: np.floating
    sum_middle: np.floating
    stochastic_from: np.floating
    nearest: bool


def numbers_of(q: LinearQuantiser, dtype: torch.dtype, sources: int) -> Linear:
    """Returns the family's constants for a quantiser, and messages of ``sources`` sources."""
    real = float_type(dtype)
    return Linear(
        zero=np.int32(q.levels // 2),
        odd_zero=np.int32(q.odd_levels // 2),
        middle=real((q.levels - 1) / 2),
        odd_middle=real((q.odd_levels - 1) / 2),
        sum_middle=real((q.levels - 1) / 2) * real(sources),
        stochastic_from=real(q.stochastic_from),
        nearest=q.nearest,
    )


def is_for_sums(q: LinearQuantiser) -> bool:
    """Returns whether messages are added up, so that no single message is ever decoded."""
    return q.summable


def codec(q: LinearQuantiser) -> Any:
    """Returns the kernel that encodes, reduces and decodes."""
    return _codec(lanes=_has_lanes(q))


def summed(q: LinearQuantiser) -> Any:
    """Returns the kernel that decodes sums of codes."""
    return _summed(lanes=_has_lanes(q))


def _has_lanes(q: LinearQuantiser) -> bool:
    """Returns whether codes lie in lanes of 64-bit words."""
    return q.summable and 8 % q.bits != 0


@lru_cache
def _codec(*, lanes: bool) -> Any:
    """Returns the kernel of `codec`, compiled once for each value of ``lanes`` (see `_has_lanes`)."""
    write = record_writer(is_stochastic, _encode, pack_lanes if lanes else pack_planes)
    read = record_reader(_decode, unpack_lanes if lanes else unpack_planes)
    return codec_kernel("linear_lanes" if lanes else "linear", write, read)


@lru_cache
def _summed(*, lanes: bool) -> Any:
    """Returns the kernel of `summed`, compiled once for each value of ``lanes`` (see `_has_lanes`)."""
    read_sum = sum_reader(_decode_sum, unpack_lanes if lanes else unpack_planes)
    return sum_kernel("linear_lanes_sum" if lanes else "linear_sum", read_sum)


@inlined
def is_stochastic(zeros, n, c):
    """Returns the flag of a block. It is set if the block has so many zeros that it is rounded stochastically."""
    return zeros > c.family.stochastic_from * n


@inlined
def levels_per_unit(scale, middle, up):
    """Returns 1/Δ, large enough that a coordinate at the scale reaches the last level.

    Args:
        scale: the block's scale.
        middle: (K - 1) / 2.
        up: 1 + 2 ulp.
    """
    inverse = middle / scale
    if scale * inverse < middle:
        inverse = inverse * up
    return inverse


@inlined
def step_of(scale, middle, stochastic, up):
    """Returns Δ. In a block that was rounded stochastically, the last level has to decode to the scale, exactly.

    Args:
        scale: the scale times the factor of all coordinates.
        middle: the code that stands for zero.
        stochastic: whether the block was rounded stochastically.
        up: 1 + 2 ulp.
    """
    step = scale / middle
    if stochastic and step * middle < scale:
        step = step * up
    return step


@inlined
def _encode(values, scale, stochastic, block, key, c, s):
    """Write codes into ``s.codes``."""
    middle = c.family.odd_middle if stochastic else c.family.middle
    zero = c.family.odd_zero if stochastic else c.family.zero
    inverse = levels_per_unit(scale, middle, c.form.up)
    first = FIRST - float32(zero - middle)
    dither(key, block, values.size, FIRST if c.family.nearest else first, s.u)
    if c.family.nearest:
        _keep_dither_of_zeros(values, float32(zero - middle), s.u)
    quantise(values, inverse, middle, s.u, zero, s.codes)


@loop
def _keep_dither_of_zeros(values, less, u):
    """Replace the dither by 1/2, except for zeros, which lie half-way between two levels. Then subtract ``less``."""
    for j in range(values.size):
        u[j] = (u[j] if values[j] == 0 else float32(0.5)) - less


@loop
def quantise(values, inverse, middle, u, zero, codes):
    """Write the numbers of levels into ``codes``. ``inverse`` is 1/Δ, and ``zero`` is the number of the level at zero
    or of the first level above zero."""
    for j in range(values.size):
        y = clamped(values[j] * inverse, middle)
        codes[j] = uint8(int32(np.floor(y + u[j])) + zero)


@inlined
def _decode(scale, stochastic, block, key, c, s, add, out):
    """Decode ``s.codes``, and write the coordinates into ``out``, or add them if ``add`` is true."""
    if stochastic:
        fill(part(s.u, 0, out.size), c.family.odd_middle)
    elif c.family.nearest:
        fill(part(s.u, 0, out.size), c.family.middle)
    else:
        dither(key, block, out.size, float32(c.family.middle) + (FIRST - float32(0.5)), s.u)
    limit = scale if stochastic else c.form.largest * c.each  # the sum of all messages stays finite
    step = step_of(scale, c.family.odd_middle if stochastic else c.family.middle, stochastic, c.form.up)
    dequantise(s.codes, s.u, step, limit, add, out)


@inlined
def _decode_sum(scale, block, keys, c, s, out):
    """Decode the sums of codes in ``s.codes``, take off the dither of all ranks, and write the mean into ``out``."""
    u = part(s.u, 0, out.size)
    fill(u, c.family.sum_middle)
    stochastic = c.family.stochastic_from < 0  # if codes are added, all blocks have the same dither
    if not (stochastic or c.family.nearest):
        for rank in range(keys.shape[0]):
            dither(keys[rank], block, out.size, FIRST - float32(0.5), s.other)
            add_scaled(part(s.other, 0, out.size), float32(1), True, u)
    limit = scale if stochastic else c.form.largest
    dequantise(s.codes, s.u, step_of(scale, c.family.sum_middle, stochastic, c.form.up), limit, False, out)


@loop
def dequantise(codes, u, step, limit, add, out):
    """Write or add the coordinates of codes. ``u`` is the code of zero plus the dither, and ``step`` is Δ."""
    if add:
        for j in range(out.size):
            out[j] += clamped((float32(int32(codes[j])) - u[j]) * step, limit)
    else:
        for j in range(out.size):
            out[j] = clamped((float32(int32(codes[j])) - u[j]) * step, limit)
