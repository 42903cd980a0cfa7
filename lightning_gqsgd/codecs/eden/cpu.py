"""Kernels of EDEN codes for CPUs, in Numba; `codecs.eden.codec` has the readable form."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numba import float32, int32, int64, uint32

from lightning_gqsgd.codecs.eden.cpu_codes import choose_levels, look_up_levels, table_of
from lightning_gqsgd.kernels.cpu.blocks import group_kernel
from lightning_gqsgd.kernels.cpu.casts import bits_of, float_of, larger, numbers, part, smaller
from lightning_gqsgd.kernels.cpu.dither import block_keys, hashes, word
from lightning_gqsgd.kernels.cpu.jit import inlined, loop
from lightning_gqsgd.kernels.cpu.loops import add_scaled, fill, maximum
from lightning_gqsgd.kernels.cpu.rotation import load_in_a_row, load_quarters, store_quarters, transform
from lightning_gqsgd.kernels.cpu.scales import received, rounded_up, sent
from lightning_gqsgd.kernels.cpu.vectors import clamped, filled, flipped, folded, lanes, load, load_like, store
from lightning_gqsgd.kernels.layout import CODES, LENGTH, SCALE
from lightning_gqsgd.kernels.rotation import FEW, SHORTEST, smallness
from lightning_gqsgd.kernels.wire import SCALE_PLACE, float_type

if TYPE_CHECKING:
    from lightning_gqsgd.codecs.eden.codec import EdenQuantiser

_SHORTEST_EXPONENT = SHORTEST.bit_length() - 1
#: Places of the signs of D2 and of D1 in a coordinate's half of a hash, counted from the highest bit, see
#: `codecs.eden.codec.signs`.
_FIRST = 0
_SECOND = 1
#: Number of coordinates after which `_has_few` compares its count with `FEW`.
_COUNTED = 64
_smallness = inlined(smallness)


class Eden(NamedTuple):
    """The levels of an EDEN quantiser, typed for the kernels.

    Attributes:
        thresholds, magnitudes: see `codecs.eden.codec.EdenQuantiser`; each is one vector, see `cpu_codes.table_of`.
    """

    thresholds: np.ndarray
    magnitudes: np.ndarray


def numbers_of(q: EdenQuantiser, dtype: torch.dtype, sources: int) -> Eden:
    """Returns the family's constants for a quantiser."""
    real = float_type(dtype)
    return Eden(table_of(q.thresholds, real), table_of(q.magnitudes, real))


def codec(q: EdenQuantiser) -> Any:
    """Returns the kernel that encodes, reduces and decodes, which is the same for all EDEN quantisers."""
    return _kernel


@inlined
def _choose(z, moved, deviation, terms, c, s, wire, at):
    """Write the codes of the levels nearest to the coordinates of a block; see `rotating_kernel`."""
    thresholds = load(c.family.thresholds, 0)
    thresholds = thresholds * filled(deviation, thresholds)
    choose_levels(c.bits, z, moved, thresholds, load(c.family.magnitudes, 0), terms, s.codes, wire, at)
    return folded_sum(terms)


@inlined
def _look_up(wire, block, at, key, c, s, z):
    """Write the levels of the codes of a block into ``z``; see `rotating_kernel`."""
    look_up_levels(c.bits, wire, at + block[CODES], load(c.family.magnitudes, 0), z)


@inlined
def _as_they_are(z, space, key, block):
    """Returns rotated coordinates without a change of their order, and the free array; see `rotating_kernel`."""
    return z, space


def rotating_kernel(
    name: str, choose: Callable[..., Any], look_up: Callable[..., Any], arrange: Callable[..., Any] = _as_they_are
) -> Any:
    """Returns the kernel that encodes, reduces and decodes the codes of rotated blocks.

    Args:
        name: name of the kernel.
        choose: compiled function ``choose(z, moved, deviation, terms, c, s, wire, at)``. It writes the codes of a block
            and returns the sum of products of coordinates and levels, added as by `codec.folded`. ``z``: rotated
            coordinates, which may be overwritten; ``moved``: the coordinates from which levels are chosen, which are
            ``z`` itself or ``z`` plus a dither; ``deviation``: the root mean square; ``terms``: space for a quarter of
            the coordinates, which may overlap the beginning of ``moved``.
        look_up: compiled function ``look_up(wire, block, at, key, c, s, z)``. It writes the levels of a block's codes
            into ``z``, in the order of rotated coordinates. The message starts at byte ``at`` of ``wire``.
        arrange: compiled function ``arrange(z, space, key, block)``. It puts rotated coordinates into the order of
            their codes on the wire, in one of the two arrays, and returns this array and the other, free one.
    """

    @inlined
    def write(values, given, blocks, k, number, key, c, s, wire):
        """Write the records of blocks and their scales."""
        exponent = _exponent_of(blocks[k, LENGTH])
        _rotate(values, blocks, k, number, key, exponent, c, s)
        for i in range(number):
            size = 1 << exponent
            terms = part(s.mean, i * size // 4, size // 4)
            squares = folded_sum(terms)
            deviation = _deviation(squares, exponent, c)
            z, space = arrange(part(s.rotated, i * size, size), part(s.own, 0, size), key, blocks[k + i])
            moved = z
            if s.flags[i]:
                # The levels of a block with few coordinates are chosen after a dither, see `codecs.eden.codec`.
                moved = space
                _move(z, numbers(s.u, i * size // 2, size // 2, uint32(0)), _dither_width(exponent, i, c, s), moved)
            products = choose(z, moved, deviation, terms, c, s, wire, blocks[k + i, CODES])
            _finish_record(squares, products, exponent, i, blocks[k + i], key, c, s, wire)

    @inlined
    def read(wire, at, blocks, k, number, key, c, s, add, out):
        """Write the coordinates of blocks times ``c.each`` into ``out``, or add them if ``add`` is true. A block whose
        scale is not finite becomes NaN."""
        length = blocks[k, LENGTH]
        exponent = _exponent_of(length)
        size = 1 << exponent
        for i in range(number):
            block = blocks[k + i]
            scale_bits = received(int64(numbers(wire, at + block[SCALE], 1, c.form.scale)[0]), c.form)
            finite = float_of(scale_bits, c.form.zero) * c.each
            s.factors[i] = finite if scale_bits < c.form.infinity else c.form.zero * np.nan
            look_up(wire, block, at, key, c, s, part(s.rotated, i * size, size))
            hashes(key, block, numbers(s.u, i * size // 2, size // 2, uint32(0)))
        _rotate_back(length, exponent, number, c, s, add, out)

    return group_kernel(name, write, read)


@inlined
def _exponent_of(length):
    """Returns the exponent of the power of two that a block of this length is padded to, see
    `kernels.rotation.padded`."""
    exponent = _SHORTEST_EXPONENT
    while 1 << exponent < length:
        exponent += 1
    return exponent


@inlined
def _rotate(values, blocks, k, number, key, exponent, c, s):
    """Write rotated blocks into ``s.rotated``, and the hashes of their signs into ``s.u``. ``s.mean`` receives the
    squares of rotated coordinates, after the first two steps of `folded_sum`."""
    length = blocks[k, LENGTH]
    size = 1 << exponent
    z = part(s.rotated, 0, number * size)
    words = numbers(s.u, 0, number * size // 2, uint32(0))
    terms = part(s.mean, 0, number * size // 4)
    largest = part(s.largest, 0, number)
    down = part(s.factors, 0, number)
    few = part(s.flags, 0, number)
    for i in range(number):
        of_block = part(values, i * length, length)
        largest[i] = rounded_up(int64(maximum(numbers(of_block, 0, length, c.form.mask), c.form.mask)), c.form)
        down[i] = _power_of_two(largest[i], c)
        few[i] = _has_few(of_block, down[i], _small(largest[i], down[i], exponent, c))
        hashes(key, blocks[k + i], part(words, i * size // 2, size // 2))
    whole = values
    if length < size:
        # ``values`` has no space for zeros behind each block.
        for i in range(number):
            _copy_with_zeros(part(values, i * length, length), part(z, i * size, size))
        whole = z
    _rotate_first((whole, down, words), z, size, c.roots[exponent], (z, words, _SECOND))
    _rotate_second(z, z, size, c.roots[exponent], (z, terms))


@inlined
def _power_of_two(largest, c):
    """Returns the power of two by which a block is multiplied, see `codecs.eden.codec.powers_of_two`."""
    infinity = c.form.infinity >> c.form.mantissa
    return float_of((infinity - 1 - _power(largest, c)) << c.form.mantissa, c.form.zero)


@inlined
def _power(largest, c):
    """Returns the exponent of the inverse of a block's power of two, as an exponent field of the compute dtype.

    Args:
        largest: bits of the largest magnitude, rounded up to the wire's format.
        c: the constants.
    """
    infinity = c.form.infinity >> c.form.mantissa
    return smaller(larger(largest >> c.form.mantissa, int64(c.form.tiny >> c.form.mantissa)), int64(infinity - 2))


@inlined
def _small(largest, down, exponent, c):
    """Returns the magnitude below which a coordinate is small, in a block of 2^exponent coordinates; see
    `kernels.rotation.smallness`."""
    factor = float_of(
        ((c.form.infinity >> c.form.mantissa) // 2 - _smallness(exponent)) << c.form.mantissa, c.form.zero
    )
    return float_of(largest, c.form.zero) * down * factor


@inlined
def _deviation(squares, exponent, c):
    """Returns the root mean square of a block of 2^exponent coordinates, from the sum of their squares."""
    infinity = c.form.infinity >> c.form.mantissa
    return np.sqrt(squares * float_of((infinity // 2 - exponent) << c.form.mantissa, c.form.zero))


@inlined
def _dither_width(exponent, i, c, s):
    """Returns the width of the dither of rotated block number ``i``, see `codecs.eden.codec.dither_widths`."""
    infinity = c.form.infinity >> c.form.mantissa
    width = float_of(s.largest[i], c.form.zero) * s.factors[i]
    return width * float_of((infinity // 2 + 2 - exponent) << c.form.mantissa, c.form.zero)


@inlined
def _finish_record(squares, products, exponent, i, block, key, c, s, wire):
    """Write the scale of rotated block number ``i``. If its codes have no meaning, overwrite them with zeros."""
    scale_bits = s.largest[i]
    if 0 < scale_bits < c.form.infinity:
        a, b = block_keys(key, block)
        scale = squares / products * float_of(_power(scale_bits, c) << c.form.mantissa, c.form.zero)
        scale_bits = _rounded_at_random(scale, int64(word(uint32(SCALE_PLACE), a, b)), c)
    if scale_bits == 0 or scale_bits == c.form.infinity:  # codes have no meaning in such a block
        fill(part(wire, block[CODES], ((1 << exponent) * c.bits) // 8), 0)
    if block[SCALE] >= 0:
        numbers(wire, block[SCALE], 1, c.form.scale)[0] = sent(scale_bits, 0, c.form)


@inlined
def _rounded_at_random(scale, random, c):
    """Returns the bits of a scale, rounded up or down at random; see `kernels.wire.ScaleFormat.rounded_at_random`.

    Args:
        scale: a number of the compute dtype, not negative and not NaN.
        random: a uniform 32-bit integer, int64.
        c: the constants.
    """
    bits = int64(bits_of(scale))
    tiny = int64(c.form.tiny)
    if bits < tiny:
        infinity = c.form.infinity >> c.form.mantissa
        tiny_inverse = float_of((infinity - 1 << c.form.mantissa) - tiny, c.form.zero)
        return tiny if scale * tiny_inverse > (random >> 8) * 2.0**-24 else int64(0)
    rounded = (bits + (random >> (32 - c.form.shift))) >> c.form.shift << c.form.shift
    return smaller(rounded, int64(c.form.infinity - 1))


@inlined
def _rotate_back(length, exponent, number, c, s, add, out):
    """Rotate the levels in ``s.rotated`` back, multiply them by the factors in ``s.factors``, and write them into
    ``out``, or add them if ``add`` is true."""
    size = 1 << exponent
    z = part(s.rotated, 0, number * size)
    words = numbers(s.u, 0, number * size // 2, uint32(0))
    scales = part(s.factors, 0, number)
    _rotate_first_back(z, z, size, c.roots[exponent], (z, words, _SECOND))
    limit = c.form.largest * c.each
    if length == size:
        _rotate_second_back(z, z, size, c.roots[exponent], (out, words, scales, limit, add))
    else:
        _rotate_second_back(z, z, size, c.roots[exponent], (z, words, scales, limit, False))
        for i in range(number):
            add_scaled(part(z, i * size, length), out.dtype.type(1), add, part(out, i * length, length))


@loop
def _has_few(values, factor, limit):
    """Returns whether the magnitudes of at most `FEW` values, times a factor, reach a limit."""
    number = int32(0)
    for first in range(0, values.size, _COUNTED):
        some = part(values, first, smaller(_COUNTED, values.size - first))
        for j in range(some.size):
            number = int32(number + int32(abs(some[j] * factor) >= limit))
        if number > FEW:
            return False
    return True


@loop
def _copy_with_zeros(values, out):
    """Copy the values into ``out``, and write zeros behind them."""
    for j in range(values.size):
        out[j] = values[j]
    for j in range(values.size, out.size):
        out[j] = 0


@inlined
def _read_with_signs(source, n, i, j):
    """Returns values times the factor of their block and the signs of D2. This is a ``read`` function of `transform`.

    Args:
        source: the values, the factors and the hashes.
        n: number of coordinates of a block.
        i: number of the block.
        j: number of the first coordinate.
    """
    values, factors, words = source
    a, b, c, d = load_in_a_row(values, n, i, j)
    width = lanes(values)
    half = n // 2
    in_second = j >= half
    place = i * half + (j - half if in_second else j)
    shift = _FIRST + (0 if in_second else 16)
    factor = filled(factors[i], a)
    return (
        flipped(a * factor, load_like(words, place, a), shift),
        flipped(b * factor, load_like(words, place + width, a), shift),
        flipped(c * factor, load_like(words, place + 2 * width, a), shift),
        flipped(d * factor, load_like(words, place + 3 * width, a), shift),
    )


@inlined
def _with_signs(n, i, j, a, b, c, d, words, place):
    """Returns the vectors of transformed coordinates times the signs of one diagonal, whose bits are at ``place``."""
    first = load_like(words, i * (n // 2) + j, a)
    second = load_like(words, i * (n // 2) + j + n // 4, a)
    return (
        flipped(a, first, place + 16),
        flipped(b, second, place + 16),
        flipped(c, first, place),
        flipped(d, second, place),
    )


@inlined
def _write_with_signs(z, n, i, j, a, b, c, d, target):
    """Write vectors times signs. This is a ``write`` function of `transform`. ``target`` has the output, the hashes and
    the place of the signs."""
    out, words, place = target
    a, b, c, d = _with_signs(n, i, j, a, b, c, d, words, place)
    store_quarters(z, n, i, j, a, b, c, d, out)


@inlined
def _write_with_squares(z, n, i, j, a, b, c, d, target):
    """Write vectors, and their squares after the first two steps of `folded_sum`. This is a ``write`` function of
    `transform`. ``target`` has the two outputs."""
    out, terms = target
    store_quarters(z, n, i, j, a, b, c, d, out)
    store(terms, i * (n // 4) + j, (a * a + c * c) + (b * b + d * d))


@inlined
def _write_scaled(z, n, i, j, a, b, c, d, target):
    """Write vectors times the signs of D2 and the scale of their block, or add them. This is a ``write`` function of
    `transform`."""
    out, words, scales, limit, add = target
    a, b, c, d = _with_signs(n, i, j, a, b, c, d, words, _FIRST)
    scale = filled(scales[i], a)
    a = clamped(a * scale, limit)
    b = clamped(b * scale, limit)
    c = clamped(c * scale, limit)
    d = clamped(d * scale, limit)
    zero = filled(out.dtype.type(0), a)
    before_a, before_b, before_c, before_d = zero, zero, zero, zero
    if add:
        before_a, before_b, before_c, before_d = load_quarters(out, n, i, j)
    # If `add` is false, the values are added to zero, as in `loops.add_scaled`.
    store_quarters(z, n, i, j, before_a + a, before_b + b, before_c + c, before_d + d, out)


_rotate_first = transform(_read_with_signs, _write_with_signs)
_rotate_second = transform(load_in_a_row, _write_with_squares)
_rotate_first_back = transform(load_in_a_row, _write_with_signs)
_rotate_second_back = transform(load_in_a_row, _write_scaled)


@loop
def _move(z, words, width, out):
    """Write each number plus a dither of the given width into ``out``, see `codecs.eden.codec.offsets`.

    The dither is uniform on (-1/2, 1/2), and is computed from the bits of the hashes that are not signs.
    """
    half = words.size
    for j in range(half):
        h = words[j] & uint32(0x3FFF)
        offset = float32(int32(h)) * float32(2.0**-14) + float32(2.0**-15 - 0.5)
        out[j] = z[j] + offset * width
    for j in range(half):
        h = (words[j] >> uint32(16)) & uint32(0x3FFF)
        offset = float32(int32(h)) * float32(2.0**-14) + float32(2.0**-15 - 0.5)
        out[half + j] = z[half + j] + offset * width


@inlined
def folded_sum(terms):
    """Returns the sum of terms, see `codecs.eden.codec.folded`. The terms are overwritten.

    The number of terms is a power of two, and they fill at least two vectors.
    """
    width = lanes(terms)
    half = terms.size // 2
    while half >= width:
        for j in range(0, half, width):
            store(terms, j, load(terms, j) + load(terms, j + half))
        half //= 2
    return folded(load(terms, 0))


_kernel = rotating_kernel("eden", _choose, _look_up)
