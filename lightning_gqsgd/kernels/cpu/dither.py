"""The dither of a block; `kernels.wire` has its formula.

The hash consists of instructions of LLVM, because Numba would widen its 32-bit integers to 64 bits at every step. One
hash gives the dither of two coordinates, 16 bits each.
"""

from __future__ import annotations

import numpy as np
from numba import float32, int32, types, uint32

from lightning_gqsgd.kernels.cpu.casts import part
from lightning_gqsgd.kernels.cpu.jit import inlined, instruction, loop
from lightning_gqsgd.kernels.layout import INDEX, PARAMETER
from lightning_gqsgd.kernels.wire import DITHER_FIRST, DITHER_UNIT, GOLDEN, MULTIPLY_1, MULTIPLY_2

#: The dither of the 16-bit integer 0.
FIRST = np.float32(DITHER_FIRST)
_UNIT = np.float32(DITHER_UNIT)


@instruction(lambda h: types.uint32(types.uint32))
def _mix(code, h):
    """Returns the result of the function ``mix`` of `kernels.wire` for a 32-bit integer."""
    return _finish(code, _start(code, h))


@instruction(lambda place, a, b: types.uint32(types.uint32, types.uint32, types.uint32))
def word(code, place, a, b):
    """Returns the hash h of `kernels.wire` for the place p and the numbers a and b of the block."""
    return _finish(code, code.xor(_start(code, code.add(place, a)), b))


def _start(code, h):
    """Generate code for the function ``start`` of `kernels.wire`."""
    return code.mul(_folded(code, h, 16), h.type(MULTIPLY_1))


def _finish(code, h):
    """Generate code for the function ``finish`` of `kernels.wire`."""
    return _folded(code, code.mul(_folded(code, h, 15), h.type(MULTIPLY_2)), 16)


def _folded(code, h, shift):
    """Generate code for the exclusive or of an integer and its highest bits, shifted down by ``shift``."""
    return code.xor(h, code.lshr(h, h.type(shift)))


@inlined
def block_keys(key, block):
    """Returns the numbers a and b of a block's hash, uint32.

    Args:
        key: the two keys of the stream, and then the origin of the block table, uint32 [4].
        block: the block's row of the table.
    """
    parameter = block[PARAMETER] + key[2]
    index = block[INDEX] + key[3]
    a = _mix(_mix(key[0] ^ parameter) + GOLDEN * index)
    b = _mix(_mix(key[1] + parameter) ^ index)
    return a, b


@loop
def hashes(key, block, out):
    """Write the hashes of a block into ``out``: one for each place p, from 0 on, uint32.

    Args:
        key: see `block_keys`.
        block: the block's row of the table.
        out: receives the hashes. Its length is half of the number of coordinates of the block.
    """
    a, b = block_keys(key, block)
    for p in range(out.size):
        out[p] = word(p, a, b)


@loop
def dither(key, block, n, first, u):
    """Write the dither of the ``n`` coordinates of a block, plus a number, into ``u``.

    Args:
        key: see `block_keys`.
        block: the block's row of the table.
        n: number of coordinates.
        first: the dither of the 16-bit integer 0, `FIRST` or `FIRST` plus a number.
        u: fp32; there is space for an even number of coordinates.
    """
    a, b = block_keys(key, block)
    half = (n + 1) // 2
    u0 = part(u, 0, half)
    u1 = part(u, half, half)
    for p in range(half):
        h = word(p, a, b)
        u0[p] = float32(int32(uint32(h & uint32(0xFFFF)))) * _UNIT + first
        u1[p] = float32(int32(uint32(h >> uint32(16)))) * _UNIT + first
