from __future__ import annotations

import numpy as np
from numba import float32, int32, types, uint32
from numba.extending import intrinsic

from lightning_gqsgd.kernels.cpu.casts import part
from lightning_gqsgd.kernels.cpu.jit import inlined, inlined_mid, inlined_tiny, inlined_top
from lightning_gqsgd.kernels.wire import DITHER_FIRST, DITHER_UNIT, GOLDEN, MULTIPLY_1, MULTIPLY_2
from lightning_gqsgd.layout import INDEX, PARAMETER

FIRST = np.float32(DITHER_FIRST)
_UNIT = np.float32(DITHER_UNIT)


@intrinsic
def _mix(typing_context, h):
    def generate(context, builder, signature, arguments):
        return _finish(builder, _start(builder, arguments[0]))

    return types.uint32(types.uint32), generate


@intrinsic
def word(typing_context, place, a, b):
    """The hash"""

    def generate(context, builder, signature, arguments):
        place, a, b = arguments
        return _finish(builder, builder.xor(_start(builder, builder.add(place, a)), b))

    return types.uint32(types.uint32, types.uint32, types.uint32), generate


def _start(builder, h):
    return builder.mul(_folded(builder, h, 16), h.type(MULTIPLY_1))


def _finish(builder, h):
    return _folded(builder, builder.mul(_folded(builder, h, 15), h.type(MULTIPLY_2)), 16)


def _folded(builder, h, shift):
    return builder.xor(h, builder.lshr(h, h.type(shift)))


@inlined_tiny
def block_keys(key, block):
    """a and b of the block's hash, see `wire`."""
    parameter, index = block[PARAMETER], block[INDEX]
    a = _mix(_mix(key[0] ^ parameter) + GOLDEN * index)
    b = _mix(_mix(key[1] + parameter) ^ index)
    return a, b


@inlined
def dither(key, block, n, first, u):
    """The dither of a block's coordinates, counted from ``first``."""
    a, b = block_keys(key, block)
    half = (n + 1) // 2
    u0, u1 = part(u, 0, half), part(u, half, half)
    for p in range(half):
        h = word(p, a, b)
        u0[p] = float32(int32(uint32(h & uint32(0xFFFF)))) * _UNIT + first
        u1[p] = float32(int32(uint32(h >> uint32(16)))) * _UNIT + first
