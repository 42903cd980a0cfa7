from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import float32, int32, uint8

from lightning_gqsgd.kernels.cpu.casts import clamped, part
from lightning_gqsgd.kernels.cpu.dither import FIRST, dither
from lightning_gqsgd.kernels.cpu.jit import inlined, inlined_mid, inlined_tiny, inlined_top
from lightning_gqsgd.kernels.cpu.loops import add_scaled, fill


class Form(NamedTuple):
    mask: np.signedinteger
    shift: int
    infinity: int
    tiny: int
    scale: np.unsignedinteger
    one: np.floating
    largest: np.floating
    limit: np.floating


class Linear(NamedTuple):
    form: Form
    bits: int
    each: np.floating
    rest: np.floating
    zero: np.int32
    odd_zero: np.int32
    middle: np.floating
    odd_middle: np.floating
    sum_middle: np.floating
    stochastic_from: np.floating
    nearest: bool
    up: np.floating


@inlined_tiny
def flag_of(zeros, n, c):
    return zeros > c.stochastic_from * n


@inlined
def _undither(values, less, u):
    """Leave dither to zeros only, which are half-way between two levels."""
    for j in range(values.size):
        u[j] = (u[j] if values[j] == 0 else float32(0.5)) - less


@inlined
def _quantise(values, inverse, middle, u, zero, codes):
    for j in range(values.size):
        y = clamped(values[j] * inverse, middle)
        codes[j] = uint8(int32(np.floor(y + u[j])) + zero)


@inlined
def _dequantise(codes, u, step, limit, add, out):
    """Set, or add, the coordinates that codes stand for."""
    if add:
        for j in range(out.size):
            out[j] += clamped((float32(int32(codes[j])) - u[j]) * step, limit)
    else:
        for j in range(out.size):
            out[j] = clamped((float32(int32(codes[j])) - u[j]) * step, limit)


@inlined_mid
def encode(values, scale, stochastic, block, key, c, s):
    middle = c.odd_middle if stochastic else c.middle
    zero = c.odd_zero if stochastic else c.zero
    inverse = middle / scale
    if scale * inverse < middle:  # the largest coordinate is to reach the last level
        inverse = inverse * c.up
    first = FIRST - float32(zero - middle)
    dither(key, block, values.size, FIRST if c.nearest else first, s.u)
    if c.nearest:
        _undither(values, float32(zero - middle), s.u)
    _quantise(values, inverse, middle, s.u, zero, s.codes)


@inlined_mid
def decode(scale, stochastic, block, key, c, s, add, out):
    if stochastic:
        fill(part(s.u, 0, out.size), c.odd_middle)
    elif c.nearest:
        fill(part(s.u, 0, out.size), c.middle)
    else:
        dither(key, block, out.size, float32(c.middle) + (FIRST - float32(0.5)), s.u)
    _decode_block(scale, c.odd_middle if stochastic else c.middle, stochastic, c, s, add, out)


@inlined_tiny
def _decode_block(scale, middle, stochastic, c, s, add, out):
    """Coordinates of s.codes under a scale; ``middle``, s.u: the code that stands for zero, and the same dithered."""
    step = scale / middle
    limit = c.form.largest
    if stochastic:  # the last level is to stand for the scale, exactly
        limit = scale
        if step * middle < scale:
            step = step * c.up
    _dequantise(s.codes, s.u, step, limit, add, out)


@inlined_mid
def decode_sum(scale, block, keys, c, s, out):
    u = part(s.u, 0, out.size)
    fill(u, c.sum_middle)
    stochastic = c.stochastic_from < 0
    if not stochastic:
        for rank in range(keys.shape[0]):
            dither(keys[rank], block, out.size, FIRST - float32(0.5), s.other)
            add_scaled(s.other, float32(1), True, u)
    _decode_block(scale, c.sum_middle, stochastic, c, s, False, out)
