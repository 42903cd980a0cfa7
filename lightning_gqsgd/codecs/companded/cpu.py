"""Kernels of companded codes for CPUs, in Numba; `codecs.companded.codec` has the readable form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numba import float32, int32, uint8

from lightning_gqsgd.codecs.linear.cpu import dequantise, is_stochastic, levels_per_unit, quantise, step_of
from lightning_gqsgd.kernels.cpu.blocks import codec_kernel
from lightning_gqsgd.kernels.cpu.casts import clamped, part, with_sign_of
from lightning_gqsgd.kernels.cpu.dither import FIRST, dither
from lightning_gqsgd.kernels.cpu.jit import inlined, loop
from lightning_gqsgd.kernels.cpu.loops import fill
from lightning_gqsgd.kernels.cpu.packing import pack_planes, unpack_planes
from lightning_gqsgd.kernels.cpu.records import record_reader, record_writer
from lightning_gqsgd.kernels.wire import float_type

if TYPE_CHECKING:
    from lightning_gqsgd.codecs.companded.codec import CompandedQuantiser


class Companded(NamedTuple):
    """A companded quantiser, typed for the kernels. Numbers without a type below are of the compute dtype.

    Attributes:
        zero: K // 2, the number of the first level above zero.
        odd_zero: the number of the level at zero, in blocks that are rounded stochastically.
        middle: (K - 1) / 2.
        odd_middle: (K - 1) / 2 for the K of blocks that are rounded stochastically.
        stochastic_from: see `codecs.companded.codec.CompandedQuantiser`.
        half: 1/2.
        slope, shrink, stretch, root, root_squared: see `codecs.companded.codec.Curve`.
    """

    zero: np.int32
    odd_zero: np.int32
    middle: np.floating
    odd_middle: np.floating
    stochastic_from: np.floating
    half: np.floating
    slope: np.floating
    shrink: np.floating
    stretch: np.floating
    root: np.floating
    root_squared: np.floating


def numbers_of(q: CompandedQuantiser, dtype: torch.dtype, sources: int) -> Companded:
    """Returns the family's constants for a quantiser."""
    real = float_type(dtype)
    curve = q.curve
    return Companded(
        zero=np.int32(q.levels // 2),
        odd_zero=np.int32(q.odd_levels // 2),
        middle=real(curve.middle),
        odd_middle=real((q.odd_levels - 1) / 2),
        stochastic_from=real(q.stochastic_from),
        half=real(0.5),
        slope=real(curve.slope),
        shrink=real(curve.shrink),
        stretch=real(curve.stretch),
        root=real(curve.root),
        root_squared=real(curve.root_squared),
    )


def codec(q: CompandedQuantiser) -> Any:
    """Returns the kernel that encodes, reduces and decodes, which is the same for all companded quantisers."""
    return _kernel


@inlined
def _encode(values, scale, stochastic, block, key, c, s):
    """Write codes into ``s.codes``."""
    middle = c.family.odd_middle if stochastic else c.family.middle
    zero = c.family.odd_zero if stochastic else c.family.zero
    inverse = levels_per_unit(scale, middle, c.form.up)
    dither(key, block, values.size, FIRST - float32(zero - middle), s.u)
    if stochastic:
        quantise(values, inverse, middle, s.u, zero, s.codes)
    else:
        _quantise(values, inverse, s.u, c, s.codes)


@loop
def _quantise(values, inverse, u, c, codes):
    """Write the numbers of the levels on the companded axis into ``codes``. ``inverse`` is 1/Δ."""
    for j in range(values.size):
        y = np.sqrt(abs(values[j] * inverse) * c.family.stretch + c.family.root_squared) - c.family.root
        y = clamped(with_sign_of(y, values[j]), c.family.middle)
        codes[j] = uint8(int32(np.floor(y + u[j])) + c.family.zero)


@inlined
def _decode(scale, stochastic, block, key, c, s, add, out):
    """Decode ``s.codes``, and write the coordinates into ``out``, or add them if ``add`` is true."""
    if stochastic:
        fill(part(s.u, 0, out.size), float32(c.family.odd_middle))
        dequantise(s.codes, s.u, step_of(scale, c.family.odd_middle, stochastic, c.form.up), scale, add, out)
    else:
        dither(key, block, out.size, float32(c.family.middle) + (FIRST - float32(0.5)), s.u)
        _dequantise(s.codes, s.u, scale / c.family.middle, c, add, out)


@loop
def _dequantise(codes, u, step, c, add, out):
    """Write or add the coordinates of codes. ``u`` is the code of zero plus the dither, and ``step`` is Δ."""
    limit = c.form.largest * c.each  # the sum of all messages stays finite
    zero = out.dtype.type(0)
    if add:
        for j in range(out.size):
            out[j] += _expanded(codes[j], u[j], step, limit, c)
    else:
        for j in range(out.size):
            out[j] = zero + _expanded(codes[j], u[j], step, limit, c)


@loop
def _expanded(code, u, step, limit, c):
    """Returns the coordinate of a code, clamped to ``limit``."""
    z = float32(int32(code)) - u
    r = np.floor(z + c.family.half)
    value = (z * c.family.slope + abs(r) * (z + (z - r))) * c.family.shrink
    return clamped(value * step, limit)


_kernel = codec_kernel(
    "companded", record_writer(is_stochastic, _encode, pack_planes), record_reader(_decode, unpack_planes)
)
