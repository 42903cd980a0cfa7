"""EDEN codes: turned coordinates at the best levels for Gaussian numbers, see `codecs.eden`, the readable form."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numba import float32, int32, int64, uint8, uint32

from lightning_gqsgd.kernels.cpu.blocks import codec_kernel
from lightning_gqsgd.kernels.cpu.casts import bits_of, clamped, float_of, larger, numbers, part, smaller
from lightning_gqsgd.kernels.cpu.dither import block_keys, word
from lightning_gqsgd.kernels.cpu.jit import inlined, loop
from lightning_gqsgd.kernels.cpu.loops import fill, maximum
from lightning_gqsgd.kernels.cpu.packing import pack_planes, unpack_planes
from lightning_gqsgd.kernels.cpu.rotation import hadamard, roots_of
from lightning_gqsgd.kernels.cpu.scales import Form, float_type, form_of, received, rounded_up, sent
from lightning_gqsgd.kernels.layout import CODES, SCALE
from lightning_gqsgd.kernels.rotation import FEW, SHORTEST, smallness
from lightning_gqsgd.kernels.wire import SCALE_PLACE, Share, scale_format

if TYPE_CHECKING:
    from lightning_gqsgd.codecs.eden.codec import EdenQuantiser

_SHORTEST_EXPONENT = SHORTEST.bit_length() - 1
_smallness = inlined(smallness)


class Eden(NamedTuple):
    """An EDEN quantiser, typed for the kernels. Numbers without a type below are of the compute dtype.

    Attributes:
        form: number formats.
        bits: bits of a code.
        each, rest: see `kernels.wire.Share`.
        mantissa: bits of the compute dtype's mantissa.
        thresholds, magnitudes: see `codecs.eden.EdenQuantiser`; arrays.
        levels: the number that each code stands for, an array.
        roots: see `kernels.cpu.rotation.roots_of`.
    """

    form: Form
    bits: int
    each: np.floating
    rest: np.floating
    mantissa: int
    thresholds: np.ndarray
    magnitudes: np.ndarray
    levels: np.ndarray
    roots: np.ndarray


@lru_cache
def constants(q: EdenQuantiser, dtype: torch.dtype, sources: int) -> Eden:
    """Returns the constants of a quantiser, for messages of so many sources."""
    share = Share.of(sources)
    real = float_type(dtype)
    magnitudes = np.array(q.magnitudes).astype(real)
    return Eden(
        form=form_of(dtype),
        bits=q.bits,
        each=real(share.each),
        rest=real(share.rest),
        mantissa=scale_format(dtype).mantissa,
        thresholds=np.array(q.thresholds).astype(real),
        magnitudes=magnitudes,
        levels=np.concatenate([magnitudes, -magnitudes]),
        roots=roots_of(q.block_size, dtype),
    )


def is_for_sums(q: EdenQuantiser) -> bool:
    """Returns whether messages are added up. They never are."""
    return False


def codec(q: EdenQuantiser) -> Any:
    """Returns the kernel that encodes, reduces and decodes."""
    return _codec()


def summed(q: EdenQuantiser) -> Any:
    """Returns the kernel that decodes sums of codes.

    Raises:
        NotImplementedError: always, because every message is turned by signs of its own.
    """
    raise NotImplementedError(f"messages of {q} cannot be added up: take a linear or an exponential codec")


@lru_cache
def _codec() -> Any:
    """Returns the kernel of `codec`, compiled once for all EDEN quantisers."""
    return codec_kernel("eden", _write, _read)


@inlined
def _exponent_of(length):
    """Returns the exponent of the power of two that a block of this length is padded to, see
    `kernels.rotation.padded`."""
    exponent = _SHORTEST_EXPONENT
    while 1 << exponent < length:
        exponent += 1
    return exponent


@inlined
def _write(values, given, block, key, c, s, wire):
    """Write a block's record and its scale."""
    exponent = _exponent_of(values.size)
    size = 1 << exponent
    scale_bits = rounded_up(int64(maximum(numbers(values, 0, values.size, c.form.mask), c.form.mask)), c.form)
    if 0 < scale_bits < c.form.infinity:
        scale_bits = _encode(values, scale_bits, exponent, block, key, c, s)
    if scale_bits == 0 or scale_bits == c.form.infinity:  # codes have no meaning in such a block
        fill(part(s.codes, 0, size), 0)
    if block[SCALE] >= 0:
        numbers(wire, block[SCALE], 1, c.form.scale)[0] = sent(scale_bits, 0, c.form)
    pack_planes(s.codes, size, c.bits, wire, block[CODES])


@inlined
def _encode(values, largest, exponent, block, key, c, s):
    """Write the codes of a block into ``s.codes``, and return the bits of its scale.

    Args:
        values: the coordinates. They may lie in ``s.mean``, which is overwritten.
        largest: bits of the largest magnitude, rounded up to the wire's format.
        exponent: log2 of the number of turned coordinates.
        block: the block's row of the table.
        key: the two keys of the message.
        c: the constants.
        s: scratch space.
    """
    size = 1 << exponent
    z = part(s.turned, 0, size)
    terms = part(s.mean, 0, size)
    codes = part(s.codes, 0, size)
    infinity = c.form.infinity >> c.mantissa
    power = smaller(larger(largest >> c.mantissa, int64(c.form.tiny >> c.mantissa)), int64(infinity - 2))
    down = float_of((infinity - 1 - power) << c.mantissa, c.form.zero)

    _signs(key, block, size, s.u, s.other)
    _copy_with_signs(values, s.u, down, z)
    top = float_of(largest, c.form.zero) * down
    small = float_of((infinity // 2 - _smallness(exponent)) << c.mantissa, c.form.zero)
    few = _count(z, top * small) <= FEW
    hadamard(z, c.roots[exponent])
    _multiply(z, s.other)
    hadamard(z, c.roots[exponent])

    _square(z, terms)
    squares = _folded(terms)
    deviation = np.sqrt(squares * float_of((infinity // 2 - exponent) << c.mantissa, c.form.zero))
    if few:
        # The levels of a block with few coordinates are chosen after a dither, see `codecs.eden.codec`.
        _offsets(key, block, size, s.u)
        width = top * float_of((infinity // 2 + 2 - exponent) << c.mantissa, c.form.zero)
        _move(z, s.u, width, terms)
        _count_levels(terms, deviation, c.thresholds, codes)
        _add_signs(terms, c.bits - 1, codes)
        _look_up(codes, c.levels, terms)
    else:
        _choose_levels(z, deviation, c.thresholds, c.magnitudes, terms, codes)
        _add_signs(z, c.bits - 1, codes)
    _multiply(terms, z)
    products = _folded(terms)

    a, b = block_keys(key, block)
    scale = squares / products * float_of(power << c.mantissa, c.form.zero)
    return _rounded_at_random(scale, int64(word(uint32(SCALE_PLACE), a, b)), c)


@inlined
def _rounded_at_random(scale, random, c):
    """Returns the bits of the format's number above or below a scale, see `kernels.wire.ScaleFormat.rounded_at_random`.

    Args:
        scale: a number of the compute dtype, not negative and not NaN.
        random: a uniform 32-bit integer, int64.
        c: the constants.
    """
    bits = int64(bits_of(scale))
    tiny = int64(c.form.tiny)
    if bits < tiny:
        infinity = c.form.infinity >> c.mantissa
        tiny_inverse = float_of((infinity - 1 << c.mantissa) - tiny, c.form.zero)
        return tiny if scale * tiny_inverse > (random >> 8) * 2.0**-24 else int64(0)
    rounded = (bits + (random >> (32 - c.form.shift))) >> c.form.shift << c.form.shift
    return smaller(rounded, int64(c.form.infinity - 1))


@inlined
def _read(wire, at, block, key, c, s, add, out):
    """Set ``out`` to the coordinates of a block times ``c.each``, or add them. A block whose scale is not finite
    becomes NaN."""
    scale_bits = received(int64(numbers(wire, at + block[SCALE], 1, c.form.scale)[0]), c.form)
    if 0 < scale_bits < c.form.infinity:
        exponent = _exponent_of(out.size)
        size = 1 << exponent
        z = part(s.turned, 0, size)
        unpack_planes(wire, at + block[CODES], size, c.bits, s.codes)
        _look_up(s.codes, c.levels, z)
        _signs(key, block, size, s.u, s.other)
        hadamard(z, c.roots[exponent])
        _multiply(z, s.other)
        hadamard(z, c.roots[exponent])
        _add_turned_back(z, s.u, float_of(scale_bits, c.form.zero) * c.each, c.form.largest * c.each, add, out)
    elif scale_bits > 0 or not add:
        fill(out, np.nan if scale_bits > 0 else 0.0)


@loop
def _signs(key, block, n, first, second):
    """Write the diagonals of D2 and of D1 for ``n`` coordinates, 1 or -1 in fp32, see `codecs.eden.signs`."""
    a, b = block_keys(key, block)
    half = n // 2
    first0 = part(first, 0, half)
    first1 = part(first, half, half)
    second0 = part(second, 0, half)
    second1 = part(second, half, half)
    for p in range(half):
        h = word(p, a, b)
        first0[p] = float32(int32(uint32((h >> uint32(14)) & uint32(2)))) - float32(1)
        second0[p] = float32(int32(uint32((h >> uint32(13)) & uint32(2)))) - float32(1)
        first1[p] = float32(int32(uint32((h >> uint32(30)) & uint32(2)))) - float32(1)
        second1[p] = float32(int32(uint32((h >> uint32(29)) & uint32(2)))) - float32(1)


@loop
def _copy_with_signs(values, sign, factor, out):
    """Write the values times a factor and signs into ``out``, and zeros behind them."""
    for j in range(values.size):
        out[j] = values[j] * factor * sign[j]
    for j in range(values.size, out.size):
        out[j] = 0


@loop
def _multiply(values, factors):
    """Multiply the values by as many factors, those of products of levels by magnitudes."""
    for j in range(values.size):
        values[j] *= factors[j]


@loop
def _count(values, limit):
    """Returns how many magnitudes reach a limit."""
    number = int32(0)
    for j in range(values.size):
        number = int32(number + int32(abs(values[j]) >= limit))
    return number


@loop
def _offsets(key, block, n, out):
    """Write a dither on (-1/2, 1/2) for ``n`` coordinates, fp32, see `codecs.eden.offsets`."""
    a, b = block_keys(key, block)
    half = n // 2
    first = part(out, 0, half)
    second = part(out, half, half)
    for p in range(half):
        h = word(p, a, b)
        first[p] = float32(int32(h & uint32(0x3FFF))) * float32(2.0**-14) + float32(2.0**-15 - 0.5)
        second[p] = float32(int32((h >> uint32(16)) & uint32(0x3FFF))) * float32(2.0**-14) + float32(2.0**-15 - 0.5)


@loop
def _move(z, offset, width, out):
    """Write numbers, each moved by its offset times a width, into ``out``."""
    for j in range(out.size):
        out[j] = z[j] + offset[j] * width


@loop
def _count_levels(z, deviation, thresholds, codes):
    """Write the number of the nearest magnitude of each coordinate into ``codes``."""
    for j in range(z.size):
        codes[j] = 0
    for k in range(1, thresholds.size):
        limit = thresholds[k] * deviation
        for j in range(z.size):
            codes[j] = uint8(codes[j] + uint8(abs(z[j]) >= limit))


@loop
def _square(values, out):
    """Write the squares of the values into ``out``."""
    for j in range(values.size):
        out[j] = values[j] * values[j]


@loop
def _folded(terms):
    """Returns the sum of a power of two of terms, see `codecs.eden.folded`; the terms are overwritten."""
    half = terms.size // 2
    while half:
        first = part(terms, 0, half)
        second = part(terms, half, half)
        for j in range(half):
            first[j] += second[j]
        half //= 2
    return terms[0]


@loop
def _choose_levels(z, deviation, thresholds, magnitudes, chosen, codes):
    """Write the number of the nearest magnitude of each coordinate into ``codes``, and the magnitude with the
    coordinate's sign into ``chosen``."""
    for j in range(z.size):
        chosen[j] = magnitudes[0]
        codes[j] = 0
    for k in range(1, magnitudes.size):
        limit = thresholds[k] * deviation
        magnitude = magnitudes[k]
        for j in range(z.size):
            reaches = abs(z[j]) >= limit
            chosen[j] = magnitude if reaches else chosen[j]
            codes[j] = uint8(codes[j] + uint8(reaches))
    for j in range(z.size):
        chosen[j] = -chosen[j] if z[j] < 0 else chosen[j]


@loop
def _add_signs(z, bit, codes):
    """Set a bit of the codes of negative numbers."""
    sign = uint8(1 << bit)
    for j in range(z.size):
        codes[j] = uint8(codes[j] | (sign if z[j] < 0 else uint8(0)))


@loop
def _look_up(codes, levels, out):
    """Write the levels of codes into ``out``."""
    for j in range(out.size):
        out[j] = levels[codes[j]]


@loop
def _add_turned_back(z, sign, scale, limit, add, out):
    """Set ``out`` to its part of the numbers ``z`` times signs and the scale, or add them."""
    zero = out.dtype.type(0)
    if add:
        for j in range(out.size):
            out[j] += clamped(z[j] * sign[j] * scale, limit)
    else:
        for j in range(out.size):
            out[j] = zero + clamped(z[j] * sign[j] * scale, limit)
