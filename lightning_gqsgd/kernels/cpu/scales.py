"""Scales of blocks as bits of floats, and on the wire; `kernels.wire.ScaleFormat` has the readable form."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import int64

from lightning_gqsgd.kernels.cpu.casts import larger
from lightning_gqsgd.kernels.cpu.jit import inlined
from lightning_gqsgd.kernels.wire import float_type, integer_type, scale_format


class Form(NamedTuple):
    """The number formats of a gradient dtype, typed for the kernels.

    Attributes:
        zero: 0 in the compute dtype.
        largest: the largest finite number of the compute dtype.
        limit: the largest finite number of the gradient dtype, in the compute dtype.
        mask: all bits of the compute dtype except for the sign, as a signed integer of the same width.
        up: 1 + 2 ulp, see `codecs.linear.codec`.
        scale: 0 in the unsigned integer type of a scale on the wire.
        mantissa, shift, infinity, tiny: see `kernels.wire.ScaleFormat`.
    """

    zero: np.floating
    largest: np.floating
    limit: np.floating
    mask: np.signedinteger
    up: np.floating
    scale: np.unsignedinteger
    mantissa: int
    shift: int
    infinity: int
    tiny: int


def form_of(dtype: torch.dtype) -> Form:
    """Returns the number formats of a gradient dtype."""
    fields = scale_format(dtype)
    real = float_type(dtype)
    wide = integer_type(dtype)
    return Form(
        zero=real(0),
        largest=real(np.finfo(real).max),
        limit=real(torch.finfo(dtype).max),
        mask=wide(np.iinfo(wide).max),
        up=real(1 + 2 * np.finfo(real).eps),
        scale={2: np.uint16, 4: np.uint32}[fields.nbytes](0),
        mantissa=fields.mantissa,
        shift=fields.shift,
        infinity=fields.infinity,
        tiny=fields.tiny,
    )


@inlined
def rounded_up(bits, form):
    """Returns the bits of the scale for a largest magnitude with these bits. If the magnitude is not finite, they are
    the bits of infinity."""
    if bits >= form.infinity:
        bits = form.infinity
    elif bits > 0:
        bits = (larger(bits, form.tiny) + (int64(1) << form.shift) - 1) >> form.shift << form.shift
        if bits == form.infinity:  # a finite magnitude was rounded up to infinity: use the largest finite number
            bits = form.infinity - 1
    return bits


@inlined
def sent(bits, flag, form):
    """Returns the code on the wire for a scale's bits and a block's flag. If the scale is not finite, all bits are
    ones."""
    return int64(-1) if bits == form.infinity else ((bits + 1) >> form.shift) << 1 | int64(flag)


@inlined
def received(code, form):
    """Returns the bits of the scale from its code on the wire."""
    bits = (code >> 1) << form.shift
    if bits > form.infinity:
        bits = form.infinity
    elif bits == form.infinity:  # the largest finite number is sent as infinity
        bits = form.infinity - 1
    return bits
