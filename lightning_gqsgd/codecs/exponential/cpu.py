"""Kernels of exponential codes for CPUs, in Numba; `codecs.exponential.codec` has the readable form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numba import int32, uint8, uint64

from lightning_gqsgd.kernels.cpu.blocks import codec_kernel, sum_kernel
from lightning_gqsgd.kernels.cpu.casts import (
    bits_of,
    clamped,
    float_of,
    integer_of,
    narrowed,
    part,
    shifted_down,
    shifted_up,
)
from lightning_gqsgd.kernels.cpu.dither import FIRST, block_keys, dither, word
from lightning_gqsgd.kernels.cpu.jit import inlined, kernel, loop
from lightning_gqsgd.kernels.cpu.packing import pack_planes, unpack_planes
from lightning_gqsgd.kernels.cpu.records import record_reader, record_writer, sum_reader
from lightning_gqsgd.kernels.layout import CODES, LENGTH
from lightning_gqsgd.kernels.wire import float_type, integer_type

if TYPE_CHECKING:
    from lightning_gqsgd.codecs.exponential.codec import ExponentialQuantiser


class Exponential(NamedTuple):
    """An exponential quantiser, typed for the kernels. Numbers without a type below are of the compute dtype.

    Attributes:
        cut: number of mantissa bits that codes drop, as an integer as wide as the float.
        offset: the bits of 1.0 without the dropped bits, minus the code of 1.0, as an integer as wide as the float.
        cut_off: 2^cut.
        smallest: the smallest level above zero.
        per_smallest: 1 / smallest.
        shrink: 2^-headroom.
        sum_factor: 2^headroom / number of ranks.
        top: 1, the largest level.
    """

    cut: np.signedinteger
    offset: np.signedinteger
    cut_off: np.floating
    smallest: np.floating
    per_smallest: np.floating
    shrink: np.floating
    sum_factor: np.floating
    top: np.floating


def numbers_of(q: ExponentialQuantiser, dtype: torch.dtype, sources: int) -> Exponential:
    """Returns the family's constants for a quantiser, and messages or sums of ``sources`` sources."""
    real = float_type(dtype)
    wide = integer_type(dtype)
    cut = np.finfo(real).nmant - q.mantissa
    offset = ((1 << (np.finfo(real).nexp - 1)) - 1 << q.mantissa) - q.magnitudes
    smallest = wide((offset + 1) << cut).view(real)
    return Exponential(
        cut=wide(cut),
        offset=wide(offset),
        cut_off=real(2.0**cut),
        smallest=smallest,
        per_smallest=real(1) / smallest,
        shrink=real(2.0**-q.headroom),
        sum_factor=real(2.0**q.headroom / sources),
        top=real(1),
    )


def is_for_sums(q: ExponentialQuantiser) -> bool:
    """Returns whether messages are added up, so that no single message is ever decoded."""
    return q.headroom > 0


def codec(q: ExponentialQuantiser) -> Any:
    """Returns the kernel that encodes, reduces and decodes, which is the same for all exponential quantisers."""
    return _kernel


def summed(q: ExponentialQuantiser) -> Any:
    """Returns the kernel that decodes sums of codes, which is the same for all exponential quantisers."""
    return _sum_kernel


def combine(mine: np.ndarray, theirs: np.ndarray, blocks: np.ndarray, q: ExponentialQuantiser, key: np.ndarray) -> None:
    """Replace the codes of a message by codes of sums, see `kernels.protocol.Kernels.combine`."""
    codes, others = np.empty((2, q.block_size + 1), np.uint8)
    _combine(mine, theirs, blocks, key, q.bits, np.int32(q.magnitudes), codes, others)


@inlined
def _no_flag(zeros, n, c):
    """Returns the flag of a block, which is never set."""
    return False


@inlined
def _encode(values, scale, flag, block, key, c, s):
    """Write codes into ``s.codes``."""
    dither(key, block, values.size, FIRST, s.u)
    _quantise(values, c.family.top / scale, s.u, c, s.codes)


@loop
def _quantise(values, inverse, u, c, codes):
    """Write the sign and the magnitude of each value into ``codes``. ``inverse`` is 1 / scale."""
    sign = int32(c.bits - 1)
    for j in range(values.size):
        y = clamped(abs(values[j] * inverse), c.family.top) * c.family.shrink
        rounded = narrowed(bits_of(y) + integer_of(u[j] * c.family.cut_off, c.family.cut), c.family.cut)
        magnitude = int32(shifted_down(rounded, c.family.cut)) - int32(c.family.offset)
        smallest = int32(
            y * c.family.per_smallest > u[j]
        )  # u times the smallest level might be denormal, which is slow
        magnitude = smallest if y < c.family.smallest else magnitude
        codes[j] = uint8(magnitude | (int32(values[j] < 0) << sign)) if magnitude > 0 else uint8(0)


@inlined
def _decode(scale, flag, block, key, c, s, add, out):
    """Decode ``s.codes``, and write the coordinates into ``out``, or add them if ``add`` is true."""
    _dequantise(s.codes, c.family.top, scale, c, add, out)


@inlined
def _decode_sum(scale, block, keys, c, s, out):
    """Decode the sums of codes in ``s.codes``, and write the mean into ``out``. Sums are codes, see `combine`."""
    _dequantise(s.codes, c.family.sum_factor, scale, c, False, out)


@loop
def _dequantise(codes, share, scale, c, add, out):
    """Write or add the coordinates of codes, times ``share``."""
    zero = out.dtype.type(0)
    if add:
        for j in range(out.size):
            out[j] += _expanded(codes[j], share, scale, c)
    else:
        for j in range(out.size):
            out[j] = zero + _expanded(codes[j], share, scale, c)


@loop
def _expanded(code, share, scale, c):
    """Returns the coordinate of a code, times ``share``."""
    sign = uint8(c.bits - 1)
    mask = uint8((1 << (c.bits - 1)) - 1)
    bits = shifted_up(narrowed((code & mask) + c.family.offset, c.family.cut), c.family.cut)
    value = float_of(bits, c.family.top) * share * scale  # in this order: a scale times a share may be infinite
    value = clamped(-value if code >> sign else value, c.form.largest)
    return value if code & mask else value * 0


@kernel("combine")
def _combine(mine, theirs, blocks, key, bits, magnitudes, codes, others):
    """Replace the codes of a message by codes of sums, see `codecs.exponential.codec.ExponentialQuantiser.combine`.

    Args:
        mine: the message, uint8 [bytes]; it is changed in place.
        theirs: the message with the other codes, uint8 [bytes].
        blocks: block table.
        key: keys of the random numbers, see `dither.block_keys`.
        bits: bits of a code.
        magnitudes: number of non-zero magnitudes.
        codes, others: scratch space for the codes of one block, uint8.
    """
    for k in range(blocks.shape[0]):
        block = blocks[k]
        n = block[LENGTH]
        unpack_planes(mine, block[CODES], n, bits, codes)
        unpack_planes(theirs, block[CODES], n, bits, others)
        _add_codes(part(codes, 0, n), part(others, 0, n), key, block, bits, magnitudes)
        pack_planes(codes, n, bits, mine, block[CODES])


@loop
def _add_codes(codes, others, key, block, bits, magnitudes):
    """Replace each code in ``codes`` by a code of its sum with the one in ``others``."""
    a, b = block_keys(key, block)
    mask = int32((1 << (bits - 1)) - 1)
    sign = int32(1 << (bits - 1))
    for j in range(codes.size):
        random = word(j, a, b)
        x = int32(codes[j])
        y = int32(others[j])
        large, small = (y, x) if (y & mask) > (x & mask) else (x, y)
        result = large & mask
        if small & mask:
            opposite = int32(((x ^ y) & sign) != 0)
            distance = result - (small & mask) - opposite
            fires = distance <= 0 or (distance <= 32 and uint64(random) < (uint64(1) << uint64(32 - distance)))
            if distance < 0:  # equal magnitudes of opposite signs
                result = int32(0)
            elif fires:
                result = result - 1 if opposite else min(result + 1, magnitudes)
        codes[j] = uint8(result | (large & sign)) if result > 0 else uint8(0)


_kernel = codec_kernel(
    "exponential", record_writer(_no_flag, _encode, pack_planes), record_reader(_decode, unpack_planes)
)
_sum_kernel = sum_kernel("exponential_sum", sum_reader(_decode_sum, unpack_planes))
