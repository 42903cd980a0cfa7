"""Stochastic rounding of fp32 numbers to bf16 on CPUs, in Numba; `kernels.narrowing` has the readable form."""

from __future__ import annotations

from llvmlite import ir
from numba import float32, types, uint32

from lightning_gqsgd.kernels.cpu.casts import part
from lightning_gqsgd.kernels.cpu.dither import block_keys, word
from lightning_gqsgd.kernels.cpu.jit import instruction, kernel, loop
from lightning_gqsgd.kernels.cpu.loops import fetch_ahead
from lightning_gqsgd.kernels.layout import LENGTH, START
from lightning_gqsgd.kernels.narrowing import INFINITY, MAGNITUDE, QUIET, SIGN


@instruction(lambda value, random, limit: types.uint16(types.float32, types.uint32, types.uint32))
def _rounded(code, value, random, limit):
    """Returns the bits of an fp32 number that is rounded stochastically to bf16, uint16.

    Args:
        value: the number.
        random: a uniform integer from 0 to 2^16 - 1, uint32.
        limit: bits of the largest magnitude, uint32.
    """
    wide = ir.IntType(32)
    bits = code.bitcast(value, wide)
    magnitude = code.and_(bits, wide(MAGNITUDE))
    clipped = code.select(code.icmp_unsigned(">", magnitude, limit), limit, magnitude)
    upper = code.lshr(code.add(clipped, random), wide(16))
    quiet = code.select(code.icmp_unsigned(">", magnitude, wide(INFINITY)), wide(QUIET), wide(0))
    special = code.or_(code.lshr(magnitude, wide(16)), quiet)
    upper = code.select(code.icmp_unsigned(">=", magnitude, wide(INFINITY)), special, upper)
    sign = code.and_(code.lshr(bits, wide(16)), wide(SIGN))
    return code.trunc(code.or_(upper, sign), ir.IntType(16))


@loop
def _round_block(values, block, key, factor, limit, out):
    """Write the coordinates of a block times a factor, rounded to bf16, into ``out``."""
    a, b = block_keys(key, block)
    n = values.size
    half = (n + 1) // 2
    second = n - half
    values0 = part(values, 0, half)
    values1 = part(values, half, second)
    out0 = part(out, 0, half)
    out1 = part(out, half, second)
    for p in range(second):
        h = word(p, a, b)
        out0[p] = _rounded(values0[p] * factor, uint32(h & uint32(0xFFFF)), limit)
        out1[p] = _rounded(values1[p] * factor, uint32(h >> uint32(16)), limit)
    if second < half:
        h = word(second, a, b)
        out0[second] = _rounded(values0[second] * factor, uint32(h & uint32(0xFFFF)), limit)


@kernel("narrow")
def round_blocks(values, blocks, key, factor, limit, out):
    """Write the coordinates of all blocks times a factor, rounded to bf16, into ``out``.

    Args:
        values: coordinates, fp32 [numel].
        blocks: block table.
        key: dither keys, see `dither.block_keys`.
        factor: factor of the coordinates, fp32.
        limit: bits of the largest magnitude, uint32.
        out: receives the bits of bf16 numbers, uint16 [numel].
    """
    for k in range(blocks.shape[0]):
        fetch_ahead(values, blocks, k)
        start = blocks[k, START]
        length = blocks[k, LENGTH]
        _round_block(
            part(values, start, length), blocks[k], key, float32(factor), uint32(limit), part(out, start, length)
        )
