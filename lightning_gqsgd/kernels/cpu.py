"""Fast kernels on the CPU: one pass over memory per stage, a block at a time in L1, without the GIL.

The functions and their arguments are those of `reference`, where they are described; the codes are the same.

How the loops are kept fast, each point measured: every loop runs over slices and is inlined, so that LLVM hoists the
overlap checks out of the loop over blocks (a factor of 6 on blocks of 64); integers of the hash are cast to 32 bits at
every step, because Numba widens uint32 * uint32 to 64 bits; magnitudes are compared as integers, since a maximum of
floats is not vectorised and loses NaN; one hash gives two coordinates their 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import float32, float64, int32, int64, njit, types, uint8, uint16, uint32, uint64
from numba.extending import intrinsic
from torch import Tensor

from lightning_gqsgd.kernels import wire as format_
from lightning_gqsgd.kernels.protocol import Kind, Quantiser
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, Key, Share, in_finite_range, scale_format
from lightning_gqsgd.layout import CODES, INDEX, LENGTH, PARAMETER, RAW, SCALE, START

_GOLDEN = np.uint32(format_.GOLDEN)
_MULTIPLY_1 = np.uint32(format_.MULTIPLY_1)
_MULTIPLY_2 = np.uint32(format_.MULTIPLY_2)
_UNIT = np.float32(format_.DITHER_UNIT)
_FIRST = np.float32(format_.DITHER_FIRST)
_EXPONENTIAL, _TOP_K = int(Kind.EXPONENTIAL), int(Kind.TOP_K)
_LANES = 16  # of sums, see `reference.block_moments`


def _jit(**more: Any) -> Callable[[Callable[..., Any]], Any]:
    """njit with a compile cache, or without one where no folder for it can be written."""
    # Without reference counts, which cost more than the arithmetic of a block. Nothing is allocated in here.
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False, **more}

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # no writable cache folder: each process compiles anew
            return njit(**options)(function)

    return decorate


_kernel = _jit()
_inline = _jit(inline="always")


class _Constants(NamedTuple):
    """The quantiser and the number format, typed for the kernels; ``c`` below."""

    bits: int
    summable: bool
    zero: np.int32  # K // 2, the level at zero or next above it
    odd_zero: np.int32  # the same for stochastic rounding
    middle: np.floating  # (K-1)/2, in the compute type, as are the next six
    odd_middle: np.floating
    stochastic_from: np.floating  # see `wire.Quantiser`
    each: np.floating  # see `wire.Share`
    rest: np.floating
    largest: np.floating  # the largest finite number
    up: np.floating  # 1 + 2 ulp
    mask: np.signedinteger  # all bits but the sign's, in the integer as wide as the compute type
    shift: int
    infinity: int
    tiny: int
    scale_shift: int  # log2 of the bytes of a scale
    kind: int  # see `wire.Quantiser`, as for the next three
    nearest: bool
    magnitudes: int
    kept: int
    cut: np.signedinteger  # bits that an exponential code drops of a float, in the integer as wide
    offset: np.signedinteger  # what is left of 1.0, less its magnitude
    cut_off: np.floating  # 2^cut
    smallest: np.floating  # the smallest level
    per_smallest: np.floating  # its inverse
    shrink: np.floating  # 2^-headroom
    one: np.floating


class _Scratch(NamedTuple):
    """Space for one block; ``s`` below. Names with ``bits`` are the same memory as integers."""

    u: np.ndarray
    codes: np.ndarray
    other: np.ndarray  # of u's kind
    mean: np.ndarray
    mean_bits: np.ndarray
    real: np.ndarray  # of the compute type
    real_bits: np.ndarray
    others: np.ndarray  # codes


class _Messages(NamedTuple):
    """One or more messages, end to end, as all that they are read as; ``w`` below."""

    bytes: np.ndarray
    raw: np.ndarray  # coordinates
    scales: np.ndarray
    words64: np.ndarray
    places: np.ndarray  # in a block


# --- loops over one block --------------------------------------------------------------------------------------------


@intrinsic
def _float_of(typing_context, bits, like):
    """The float of the type of ``like`` with these bits (int64)."""

    def generate(context, builder, signature, arguments):
        integer = context.get_value_type(types.int32 if like == types.float32 else types.int64)
        narrow = builder.trunc(arguments[0], integer) if like == types.float32 else arguments[0]
        return builder.bitcast(narrow, context.get_value_type(signature.return_type))

    return like(types.int64, like), generate


@intrinsic
def _narrowed(typing_context, value, like):
    """An int64 as an integer of the type of ``like``: Numba widens all arithmetic to 64 bits."""

    def generate(context, builder, signature, arguments):
        target = context.get_value_type(signature.return_type)
        return builder.trunc(arguments[0], target) if target.width < 64 else arguments[0]

    return like(types.int64, like), generate


@intrinsic
def _integer_of(typing_context, value, like):
    """A float, rounded to zero, as an integer of the type of ``like``."""

    def generate(context, builder, signature, arguments):
        return builder.fptosi(arguments[0], context.get_value_type(signature.return_type))

    return like(value, like), generate


@_inline
def _fill(target, value):
    for j in range(target.size):
        target[j] = value


@_inline
def _copy(source, target):
    for j in range(source.size):
        target[j] = source[j]


@_inline
def _start(h):
    return uint32(uint32(h ^ uint32(h >> uint32(16))) * _MULTIPLY_1)


@_inline
def _finish(h):
    g = uint32(uint32(h ^ uint32(h >> uint32(15))) * _MULTIPLY_2)
    return uint32(g ^ uint32(g >> uint32(16)))


@_inline
def _mix(h):
    return _finish(_start(h))


@_inline
def _block_keys(k0, k1, parameter, index):
    """a and b of the block's hash, see `wire`."""
    a = _mix(uint32(_mix(uint32(k0 ^ uint32(parameter))) + uint32(_GOLDEN * uint32(index))))
    b = _mix(uint32(_mix(uint32(k1 + uint32(parameter))) ^ uint32(index)))
    return a, b


@_inline
def _hash(p, a, b):
    return _finish(uint32(_start(uint32(uint32(p) + a)) ^ b))


@_inline
def _dither(k0, k1, parameter, index, n, first, u):
    """The dither of a block's coordinates, counted from ``first``."""
    a, b = _block_keys(k0, k1, parameter, index)
    half = (n + 1) // 2
    u0, u1 = u[:half], u[half : 2 * half]
    for p in range(half):
        h = _hash(p, a, b)
        u0[p] = float32(int32(uint32(h & uint32(0xFFFF)))) * _UNIT + first
        u1[p] = float32(int32(uint32(h >> uint32(16)))) * _UNIT + first


@_inline
def _undither(values, less, u):
    """Leave dither to zeros only, which are half-way between two levels."""
    for j in range(values.size):
        u[j] = (u[j] if values[j] == 0 else float32(0.5)) - less


@_inline
def _maximum(bits, mask):
    largest = mask & bits[0]
    for j in range(bits.size):
        largest = max(largest, bits[j] & mask)
    return largest


@_inline
def _maximum_and_zeros(bits, mask):
    """Largest magnitude, and the number of zeros."""
    largest = mask & bits[0]
    zeros = int32(0)
    for j in range(bits.size):
        magnitude = bits[j] & mask
        largest = max(largest, magnitude)
        zeros = int32(zeros + int32(magnitude == 0))
    return largest, zeros


@_inline
def _is_finite(values):
    check = values[0] - values[0]
    for j in range(values.size):
        check += values[j] - values[j]
    return check == 0


@_inline
def _quantise(values, inverse, middle, u, zero, codes):
    for j in range(values.size):
        y = min(max(values[j] * inverse, -middle), middle)
        codes[j] = uint8(int32(np.floor(y + u[j])) + zero)


@_inline
def _dequantise(codes, u, step, limit, add, out):
    """Set, or add, the coordinates that codes stand for."""
    if add:
        for j in range(out.size):
            out[j] += min(max((float32(int32(codes[j])) - u[j]) * step, -limit), limit)
    else:
        for j in range(out.size):
            out[j] = min(max((float32(int32(codes[j])) - u[j]) * step, -limit), limit)


@_inline
def _exponential_codes(values, inverse, c, s):
    """Sign and magnitude of each value, from the dither in s.u."""
    n, top = values.size, int32(c.bits - 1)
    real, bits, u, codes = s.real[:n], s.real_bits[:n], s.u[:n], s.codes[:n]
    for j in range(n):
        real[j] = min(abs(values[j] * inverse), c.one) * c.shrink
    for j in range(n):
        magnitude = int32((bits[j] + _integer_of(u[j] * c.cut_off, c.cut)) >> c.cut) - int32(c.offset)
        smallest = int32(real[j] * c.per_smallest > u[j])  # u times the smallest level might be denormal, and slow
        magnitude = smallest if real[j] < c.smallest else magnitude
        codes[j] = uint8(magnitude | (int32(values[j] < 0) << top)) if magnitude > 0 else uint8(0)


@_inline
def _exponential_values(scale, c, add, s, out):
    """Set, or add, the coordinates that s.codes stand for."""
    n, top = out.size, uint8(c.bits - 1)
    real, bits, codes = s.real[:n], s.real_bits[:n], s.codes[:n]
    mask = uint8((1 << (c.bits - 1)) - 1)
    for j in range(n):
        bits[j] = (int32(codes[j] & mask) + c.offset) << c.cut
    for j in range(n):
        value = real[j] * scale
        value = min(max(-value if codes[j] >> top else value, -c.largest), c.largest)
        real[j] = value if codes[j] & mask else value * 0
    _add_scaled(real, c.one, add, out)


@_kernel
def _threshold(bits, mask, count):
    """A number that ``count`` magnitudes reach, or the largest that more do: bit by bit, from the highest on."""
    found = int64(0)
    place = int64(mask) - (int64(mask) >> 1)
    while place:
        least = _narrowed(found | place, mask)
        reach = int32(0)
        for j in range(bits.size):
            reach = int32(reach + int32((bits[j] & mask) >= least))
        if reach >= count:
            found |= place
            if reach == count:
                break
        place >>= 1
    return _narrowed(found, mask)


@_inline
def _first_stages(values):
    """The butterflies of distance 1, 2 and 4, on eight values at a time: loops that short are not vectorised."""
    for j in range(0, values.size, 8):
        a, b, c, d = values[j], values[j + 1], values[j + 2], values[j + 3]
        e, f, g, h = values[j + 4], values[j + 5], values[j + 6], values[j + 7]
        a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
        a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
        values[j], values[j + 1], values[j + 2], values[j + 3] = a + e, b + f, c + g, d + h
        values[j + 4], values[j + 5], values[j + 6], values[j + 7] = a - e, b - f, c - g, d - h


@_inline
def _rotated(values, root):
    """Hadamard transform of a power of two of values, in place; ``root``: factor that makes it orthonormal."""
    n, half = values.size, 1
    if n >= 8:
        _first_stages(values)
        half = 8
    while half < n:
        for first in range(0, n, 2 * half):
            left, right = values[first : first + half], values[first + half : first + 2 * half]
            for j in range(half):
                one, other = left[j], right[j]
                left[j] = one + other
                right[j] = one - other
        half *= 2
    for j in range(n):
        values[j] *= root


@_inline
def _flip(values, u):
    for j in range(values.size):
        values[j] = -values[j] if u[j] < float32(0.5) else values[j]


@_inline
def _turn(values, k, blocks, keys, inverse, roots, s):
    """Turn the coordinates of block k; see `reference.rotate`. ``roots``: 2^(-e/2) for each exponent e."""
    _dither(keys[0, 0], keys[0, 1], blocks[k, PARAMETER], blocks[k, INDEX], values.size, _FIRST, s.u)
    if not inverse:
        _flip(values, s.u)
    start = 0
    for exponent in range(roots.size - 1, -1, -1):
        if values.size & (1 << exponent):
            _rotated(values[start : start + (1 << exponent)], roots[exponent])
            start += 1 << exponent
    if inverse:
        _flip(values, s.u)


@_inline
def _combine(one, other, k0, k1, parameter, index, bits, magnitudes):
    """Replace exponential codes by those of sums; see `reference.combine`."""
    a, b = _block_keys(k0, k1, parameter, index)
    mask, sign = int32((1 << (bits - 1)) - 1), int32(1 << (bits - 1))
    for j in range(one.size):
        word = _hash(j, a, b)
        x, y = int32(one[j]), int32(other[j])
        large, small = (y, x) if (y & mask) > (x & mask) else (x, y)
        result = large & mask
        if small & mask:
            opposite = int32(((x ^ y) & sign) != 0)
            distance = result - (small & mask) - opposite
            fires = distance <= 0 or (distance <= 32 and uint64(word) < (uint64(1) << uint64(32 - distance)))
            if distance < 0:
                result = int32(0)
            elif fires:
                result = result - 1 if opposite else min(result + 1, magnitudes)
        one[j] = uint8(result | (large & sign)) if result > 0 else uint8(0)


@_inline
def _add_scaled(values, factor, add, out):
    if not add:
        _fill(out, 0)
    for j in range(out.size):
        out[j] += values[j] * factor


# --- packing: lane l of word w of a run holds coordinate w + l * words (see `layout.code_bytes`) ---------------------


@_inline
def _pack(codes, n, bits, summable, wire, words64, at):
    if summable and 8 % bits != 0:
        _pack_words(codes, n, bits, words64[at // 8 :])
    else:
        low = 0
        for plane in (8, 4, 2, 1):
            if bits & plane:
                words = (n * plane + 7) // 8
                _pack_plane(codes, n, low, plane, wire[at : at + words])
                at += words
                low += plane


@_inline
def _pack_plane(codes, n, low, plane, words):
    mask, down = uint8((1 << plane) - 1), uint8(low)
    for w in range(words.size):
        words[w] = uint8(uint8(codes[w] >> down) & mask)
    for lane in range(1, 8 // plane):
        part = codes[min(lane * words.size, n) : min((lane + 1) * words.size, n)]
        up = uint8(lane * plane)
        for w in range(part.size):
            words[w] = uint8(words[w] | uint8(uint8(uint8(part[w] >> down) & mask) << up))


@_kernel
def _pack_words(codes, n, bits, words64):
    lanes = 64 // bits
    count = (n + lanes - 1) // lanes
    _fill(words64[:count], 0)
    for lane in range(lanes):
        part = codes[min(lane * count, n) : min((lane + 1) * count, n)]
        for w in range(part.size):
            words64[w] |= int64(part[w]) << (lane * bits)


@_inline
def _unpack(wire, words64, at, n, bits, summable, codes):
    if summable and 8 % bits != 0:
        _unpack_words(words64[at // 8 :], n, bits, codes)
    else:
        low = 0
        for plane in (8, 4, 2, 1):
            if bits & plane:
                words = (n * plane + 7) // 8
                _unpack_plane(wire[at : at + words], n, low, plane, codes)
                at += words
                low += plane


@_inline
def _unpack_plane(words, n, low, plane, codes):
    mask, up = uint8((1 << plane) - 1), uint8(low)
    for lane in range(8 // plane):
        part = codes[min(lane * words.size, n) : min((lane + 1) * words.size, n)]
        down = uint8(lane * plane)
        if low == 0:
            _fill(part, 0)
        for w in range(part.size):
            part[w] = uint8(part[w] | uint8(uint8(uint8(words[w] >> down) & mask) << up))


@_kernel
def _unpack_words(words64, n, bits, codes):
    lanes = 64 // bits
    count = (n + lanes - 1) // lanes
    mask = (1 << bits) - 1
    for lane in range(lanes):
        part = codes[min(lane * count, n) : min((lane + 1) * count, n)]
        for w in range(part.size):
            part[w] = uint8((words64[w] >> (lane * bits)) & mask)


# --- one block: number k of the table; positions in the messages `w` count from `base` --------------------------------


@_inline
def _rounded_up(bits, c):
    """Bits of the scale for a largest magnitude with these bits; of infinity, if it is not finite."""
    if bits >= c.infinity:
        bits = c.infinity
    elif bits > 0:
        bits = (max(bits, c.tiny) + (int64(1) << c.shift) - 1) >> c.shift << c.shift
        if bits == c.infinity:  # rounded up to it: the largest finite number
            bits = c.infinity - 1
    return bits


@_inline
def _scale_code(bits, stochastic, c):
    """A scale on the wire: the largest finite number as if it were infinity, what is not finite as all ones."""
    return int64(-1) if bits == c.infinity else ((bits + 1) >> c.shift) << 1 | int64(stochastic)


@_inline
def _scale_bits(code, c):
    """Bits of the scale that a code on the wire stands for."""
    bits = (int64(code) >> 1) << c.shift
    if bits > c.infinity:
        bits = c.infinity
    elif bits == c.infinity:
        bits = c.infinity - 1
    return bits


@_inline
def _kept_of(length, c):
    """See `wire.Quantiser.kept_of`."""
    return (length * c.kept + 65535) >> 16


@_kernel
def _write_largest(values, bits, k, blocks, base, c, w):
    """One coded block's largest values and their places; ``bits``: the values as integers."""
    count = _kept_of(values.size, c)
    least = _threshold(bits, c.mask, count)
    ties = count
    for j in range(bits.size):
        ties -= (bits[j] & c.mask) > least
    first = (blocks[k, CODES] - base) // w.raw.itemsize
    at = (blocks[k, CODES] - base + count * w.raw.itemsize) // 2
    for j in range(bits.size):
        magnitude = bits[j] & c.mask
        if magnitude > least or (magnitude == least and ties > 0):
            ties -= magnitude == least
            w.raw[first] = values[j]
            w.places[at] = uint16(j)
            first += 1
            at += 1


@_kernel
def _read_largest(k, blocks, base, c, add, w, out):
    """Set, or add, the kept coordinates times ``c.each``; NaN everywhere if one is not finite, or not in the block."""
    count = _kept_of(out.size, c)
    first = (blocks[k, CODES] - base) // w.raw.itemsize
    at = (blocks[k, CODES] - base + count * w.raw.itemsize) // 2
    if not add:
        _fill(out, 0)
    for i in range(count):
        place, value = int64(w.places[at + i]), w.raw[first + i]
        if place >= out.size or value - value != 0:
            _fill(out, np.nan)
            break
        out[place] += value * c.each


@_inline
def _write(values, zeros, scale_bits, k, blocks, base, k0, k1, c, s, w):
    """One coded block's record. ``zeros``: how many values are zero; ``scale_bits``: the scale as an integer."""
    stochastic = zeros > c.stochastic_from * values.size
    if c.kind == _EXPONENTIAL and 0 < scale_bits < c.infinity:
        _dither(k0, k1, blocks[k, PARAMETER], blocks[k, INDEX], values.size, _FIRST, s.u)
        _exponential_codes(values, c.one / _float_of(max(scale_bits, c.tiny), c.one), c, s)
    elif 0 < scale_bits < c.infinity:
        scale = _float_of(max(scale_bits, c.tiny), c.middle)
        middle = c.odd_middle if stochastic else c.middle
        zero = c.odd_zero if stochastic else c.zero
        inverse = middle / scale
        if scale * inverse < middle:  # the largest coordinate is to reach the last level
            inverse = inverse * c.up
        first = _FIRST - float32(zero - middle)
        _dither(k0, k1, blocks[k, PARAMETER], blocks[k, INDEX], values.size, _FIRST if c.nearest else first, s.u)
        if c.nearest:
            _undither(values, float32(zero - middle), s.u)
        _quantise(values, inverse, middle, s.u, zero, s.codes)
    else:
        _fill(s.codes[: values.size], 0)
    if blocks[k, SCALE] >= 0:
        w.scales[(blocks[k, SCALE] - base) >> c.scale_shift] = _scale_code(scale_bits, stochastic, c)
    _pack(s.codes, values.size, c.bits, c.summable, w.bytes, w.words64, blocks[k, CODES] - base)


@_inline
def _read(k, blocks, base, k0, k1, c, add, s, w, out):
    """Set, or add, a coded block's coordinates times ``c.each``; NaN where the scale is not finite."""
    code = int64(w.scales[(blocks[k, SCALE] - base) >> c.scale_shift])
    scale_bits = _scale_bits(code, c)
    if scale_bits >= c.infinity:
        _fill(out, np.nan)
    elif scale_bits == 0 and not add:
        _fill(out, 0)
    elif scale_bits > 0:
        stochastic = (code & 1) == 1
        scale = _float_of(scale_bits, c.middle) * c.each
        _unpack(w.bytes, w.words64, blocks[k, CODES] - base, out.size, c.bits, c.summable, s.codes)
        if c.kind == _EXPONENTIAL:
            _exponential_values(scale, c, add, s, out)
        else:
            if stochastic:
                _fill(s.u[: out.size], c.odd_middle)
            elif c.nearest:
                _fill(s.u[: out.size], c.middle)
            else:
                first = float32(c.middle) + (_FIRST - float32(0.5))
                _dither(k0, k1, blocks[k, PARAMETER], blocks[k, INDEX], out.size, first, s.u)
            _decode_block(scale, c.odd_middle if stochastic else c.middle, stochastic, c, add, s, out)


@_inline
def _decode_block(scale, middle, stochastic, c, add, s, out):
    """Coordinates of s.codes under a scale; ``middle``, s.u: the code that stands for zero, and the same dithered."""
    step = scale / middle
    limit = c.largest
    if stochastic:  # the last level is to stand for the scale, exactly
        limit = scale
        if step * middle < scale:
            step = step * c.up
    _dequantise(s.codes, s.u, step, limit, add, out)


@_inline
def _average(k, blocks, base, stride, keys, c, s, w, out):
    """Mean of one block over all messages, ``stride`` bytes apart, added up in their order."""
    for source in range(keys.shape[0]):
        first, add = base - source * stride, source > 0
        if blocks[k, RAW]:
            place = (blocks[k, CODES] - first) // w.raw.itemsize
            _add_scaled(w.raw[place : place + out.size], c.each, add, out)
        elif c.kind == _TOP_K:
            _read_largest(k, blocks, first, c, add, w, out)
        else:
            _read(k, blocks, first, keys[source, 0], keys[source, 1], c, add, s, w, out)
    if c.rest != 1:
        for j in range(out.size):
            out[j] /= c.rest


# --- kernels ----------------------------------------------------------------------------------------------------------


@_kernel
def _maxima_kernel(x_bits, blocks, c, out):
    for k in range(blocks.shape[0]):
        start = blocks[k, START]
        out[k] = _maximum(x_bits[start : start + blocks[k, LENGTH]], c.mask)


@_kernel
def _moments_kernel(x, blocks, lanes, out):
    for k in range(blocks.shape[0]):
        values = x[blocks[k, START] : blocks[k, START] + blocks[k, LENGTH]]
        plain, absolute, square = lanes[0], lanes[1], lanes[2]
        for lane in range(_LANES):
            plain[lane] = absolute[lane] = square[lane] = 0.0
        for first in range(0, values.size, _LANES):
            row = values[first : first + _LANES]
            for lane in range(row.size):
                value = float64(row[lane])
                plain[lane] += value
                absolute[lane] += abs(value)
                square[lane] += value * value
        for kind in range(3):
            total = 0.0
            for lane in range(_LANES):
                total += lanes[kind, lane]
            out[k, kind] = total


@_kernel
def _rotate_kernel(x, blocks, keys, inverse, roots, s):
    for k in range(blocks.shape[0]):
        if not blocks[k, RAW]:
            values = x[blocks[k, START] : blocks[k, START] + blocks[k, LENGTH]]
            _turn(values, k, blocks, keys, inverse, roots, s)


@_kernel
def _combine_kernel(mine, theirs, blocks, base, keys, c, s):
    for k in range(blocks.shape[0]):
        n, at = blocks[k, LENGTH], blocks[k, CODES] - base
        one, other = s.codes[:n], s.others[:n]
        _unpack(mine.bytes, mine.words64, at, n, c.bits, False, one)
        _unpack(theirs.bytes, theirs.words64, at, n, c.bits, False, other)
        parameter, index = blocks[k, PARAMETER], blocks[k, INDEX]
        _combine(one, other, keys[0, 0], keys[0, 1], parameter, index, c.bits, c.magnitudes)
        _pack(one, n, c.bits, False, mine.bytes, mine.words64, at)


@_kernel
def _encode_kernel(x, x_bits, blocks, base, maxima, keys, rotation, roots, c, s, w):
    for k in range(blocks.shape[0]):
        start, n = blocks[k, START], blocks[k, LENGTH]
        if blocks[k, RAW]:
            _copy(x[start : start + n], w.raw[(blocks[k, CODES] - base) // w.raw.itemsize :])
        elif c.kind == _TOP_K:
            _write_largest(x[start : start + n], x_bits[start : start + n], k, blocks, base, c, w)
        else:
            values, bits = x[start : start + n], x_bits[start : start + n]
            if rotation.shape[0]:
                _copy(values, s.mean)
                values, bits = s.mean[:n], s.mean_bits[:n]
                _turn(values, k, blocks, rotation, False, roots, s)
            largest, zeros = _maximum_and_zeros(bits, c.mask)
            scale_bits = int64(maxima[k]) if maxima.size else _rounded_up(int64(largest), c)
            _write(values, zeros, scale_bits, k, blocks, base, keys[0, 0], keys[0, 1], c, s, w)


@_kernel
def _reduce_kernel(w, stride, blocks, base, keys, out_keys, c, s, w_out):
    for k in range(blocks.shape[0]):
        mean = s.mean[: blocks[k, LENGTH]]
        _average(k, blocks, base, stride, keys, c, s, w, mean)
        if blocks[k, RAW]:
            _copy(mean, w_out.raw[(blocks[k, CODES] - base) // w_out.raw.itemsize :])
        elif c.kind == _TOP_K:
            _write_largest(mean, s.mean_bits[: mean.size], k, blocks, base, c, w_out)
        else:
            largest, zeros = _maximum_and_zeros(s.mean_bits[: mean.size], c.mask)
            _write(
                mean,
                zeros,
                _rounded_up(int64(largest), c),
                k,
                blocks,
                base,
                out_keys[0, 0],
                out_keys[0, 1],
                c,
                s,
                w_out,
            )


@_kernel
def _decode_kernel(w, stride, blocks, base, x, keys, rotation, roots, c, s):
    bad = 0
    for k in range(blocks.shape[0]):
        mean = x[blocks[k, START] : blocks[k, START] + blocks[k, LENGTH]]
        _average(k, blocks, base, stride, keys, c, s, w, mean)
        turned = rotation.shape[0] > 0 and not blocks[k, RAW]
        if turned:
            _turn(mean, k, blocks, rotation, True, roots, s)
        # What was decoded, and not turned, is NaN in all places or in none.
        bad += not _is_finite(mean[: mean.size if turned or blocks[k, RAW] else 1])
    return bad


@_kernel
def _decode_sum_kernel(w, maxima, blocks, x, keys, middle, c, s):
    bad = 0
    for k in range(blocks.shape[0]):
        mean = x[blocks[k, START] : blocks[k, START] + blocks[k, LENGTH]]
        if maxima[k] >= c.infinity:
            bad += 1
            _fill(mean, np.nan)
        elif maxima[k] == 0:
            _fill(mean, 0)
        else:
            _unpack(w.bytes, w.words64, blocks[k, CODES], mean.size, c.bits, c.summable, s.codes)
            if c.kind == _EXPONENTIAL:  # the middle is the factor of the scale
                _exponential_values(_float_of(max(int64(maxima[k]), c.tiny), c.middle) * middle, c, False, s, mean)
                continue
            _fill(s.u[: mean.size], middle)
            stochastic = c.stochastic_from < 0
            if not stochastic:
                first = _FIRST - float32(0.5)
                for rank in range(keys.shape[0]):
                    k0, k1 = keys[rank, 0], keys[rank, 1]
                    _dither(k0, k1, blocks[k, PARAMETER], blocks[k, INDEX], mean.size, first, s.other)
                    _add_scaled(s.other, float32(1), True, s.u[: mean.size])
            _decode_block(_float_of(max(int64(maxima[k]), c.tiny), c.middle), middle, stochastic, c, False, s, mean)
    return bad


# --- the functions of `protocol.Kernels` ------------------------------------------------------------------------------
# Numba has no 16-bit floats on the CPU: bf16 and fp16 coordinates are widened to fp32 first, and rounded by PyTorch.


def block_maxima(x: Tensor, blocks: Tensor) -> Tensor:
    """See `protocol.Kernels.block_maxima`."""
    out = torch.empty(len(blocks), dtype=scale_format(x.dtype).integer, device="cpu")
    with _widened(x, blocks) as (_, bits, table):
        _maxima_kernel(bits, table, _constants(_ANY, x.dtype), out.numpy())
    return out


def block_moments(x: Tensor, blocks: Tensor) -> Tensor:
    """See `protocol.Kernels.block_moments`."""
    out = torch.empty(len(blocks), 3, dtype=torch.float64, device="cpu")
    with _widened(x, blocks) as (values, _, table):
        _moments_kernel(values, table, np.empty((3, _LANES)), out.numpy())
    return out


def rotate(x: Tensor, blocks: Tensor, key: Key, block_size: int, *, inverse: bool = False) -> None:
    """See `protocol.Kernels.rotate`."""
    scratch = _scratch(block_size, x.dtype)
    _rotate_kernel(x.numpy(), blocks.numpy(), _keys([key]), inverse, _roots(block_size, x.dtype), scratch)


def combine(mine: Tensor, theirs: Tensor, blocks: Tensor, q: Quantiser, key: Key) -> None:
    """See `protocol.Kernels.combine`."""
    constants, scratch = _constants(q, torch.float32), _scratch(q.block_size, torch.float32)
    one, other = _messages(mine, torch.float32), _messages(theirs, torch.float32)
    _combine_kernel(one, other, blocks.numpy(), 0, _keys([key]), constants, scratch)


def encode(
    x: Tensor,
    blocks: Tensor,
    wire: Tensor,
    q: Quantiser,
    key: Key,
    scales: Tensor | None = None,
    rotation: Key | None = None,
) -> None:
    """See `protocol.Kernels.encode`."""
    given = np.empty(0, np.int32) if scales is None else scales.numpy()
    constants, scratch, message = _constants(q, x.dtype), _scratch(q.block_size, x.dtype), _messages(wire, x.dtype)
    turns = _keys([] if rotation is None else [rotation]), _roots(q.block_size, x.dtype)
    with _widened(x, blocks) as (values, bits, table):
        _encode_kernel(values, bits, table, 0, given, _keys([key]), *turns, constants, scratch, message)


def reduce(
    wires: Tensor,
    blocks: Tensor,
    out: Tensor,
    q: Quantiser,
    keys: Sequence[Key],
    out_key: Key,
    dtype: torch.dtype,
) -> None:
    """See `protocol.Kernels.reduce`."""
    w, w_out = _messages(wires, dtype), _messages(out, dtype)
    constants, scratch = _constants(q, dtype, len(keys)), _scratch(q.block_size, dtype)
    _reduce_kernel(w, wires.shape[1], blocks.numpy(), 0, _keys(keys), _keys([out_key]), constants, scratch, w_out)


def decode(
    wires: Tensor,
    blocks: Tensor,
    x: Tensor,
    q: Quantiser,
    keys: Sequence[Key],
    rotation: Key | None = None,
) -> int:
    """See `protocol.Kernels.decode`."""
    w, constants = _messages(wires, x.dtype), _constants(q, x.dtype, len(keys))
    scratch = _scratch(q.block_size, x.dtype)
    turns = _keys([] if rotation is None else [rotation]), _roots(q.block_size, x.dtype)
    with _widened(x, blocks, write=True) as (values, _, table):
        return _decode_kernel(w, wires.shape[1], table, 0, values, _keys(keys), *turns, constants, scratch)


def decode_sum(wire: Tensor, scales: Tensor, blocks: Tensor, x: Tensor, q: Quantiser, keys: Sequence[Key]) -> int:
    """See `protocol.Kernels.decode_sum`."""
    w, constants, scratch = _messages(wire, x.dtype), _constants(q, x.dtype), _scratch(q.block_size, x.dtype)
    exponential = q.kind == Kind.EXPONENTIAL
    middle = (
        _real(x.dtype)(2.0**q.headroom / len(keys)) if exponential else constants.middle * _real(x.dtype)(len(keys))
    )
    with _widened(x, blocks, write=True) as (values, _, table):
        return _decode_sum_kernel(w, scales.numpy(), table, values, _keys(keys), middle, constants, scratch)


class _Any:
    bits, block_size, summable, kind = 8, 16, False, Kind.LINEAR


_ANY = _Any()


@contextmanager
def _widened(x: Tensor, blocks: Tensor, *, write: bool = False) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The coordinates that the blocks span in the compute dtype, the same as integers, and a table that counts from
    them.

    ``write``: put them back afterwards; what lies between the blocks comes back as it was.
    """
    compute, x = COMPUTE_DTYPES[x.dtype], x.detach()
    if compute == x.dtype or not len(blocks):
        values, table = x.to(compute).numpy(), blocks.numpy()
        yield values, values.view(_wide(x.dtype)), table
        return
    table = blocks.numpy().copy()
    first = int(table[:, START].min())
    part = x[first : int((table[:, START] + table[:, LENGTH]).max())]
    wide = part.to(compute)
    table[:, START] -= first
    yield wide.numpy(), wide.numpy().view(_wide(x.dtype)), table
    if write:
        part.copy_(in_finite_range(wide, x.dtype))


def _real(dtype: torch.dtype) -> Any:
    """NumPy type of the compute dtype."""
    return np.float64 if dtype == torch.float64 else np.float32


def _wide(dtype: torch.dtype) -> Any:
    """Integer as wide as the compute dtype."""
    return np.int64 if dtype == torch.float64 else np.int32


def _messages(wire: Tensor, dtype: torch.dtype) -> _Messages:
    whole = wire.flatten().numpy()
    scales = {2: np.uint16, 4: np.uint32}[scale_format(dtype).nbytes]
    return _Messages(whole, whole.view(_real(dtype)), whole.view(scales), whole.view(np.int64), whole.view(np.uint16))


def _keys(keys: Sequence[Key]) -> np.ndarray:
    return np.array(keys, dtype=np.uint32).reshape(-1, 2)


def _roots(block_size: int, dtype: torch.dtype) -> np.ndarray:
    """2^(-k/2) for each power of two up to ``block_size``."""
    return (2.0 ** (-0.5 * np.arange(block_size.bit_length()))).astype(_real(dtype))


def _constants(q: Any, dtype: torch.dtype, sources: int = 1) -> _Constants:
    form, share, real, wide = scale_format(dtype), Share.of(sources), _real(dtype), _wide(dtype)
    cut = np.finfo(real).nmant - getattr(q, "mantissa", 0)
    offset = ((1 << (np.finfo(real).nexp - 1)) - 1 << getattr(q, "mantissa", 0)) - getattr(q, "magnitudes", 0)
    smallest = wide(offset + 1 << cut).view(real) if q.kind == Kind.EXPONENTIAL else real(1)
    return _Constants(
        bits=q.bits,
        summable=q.summable,
        zero=np.int32(getattr(q, "levels", 1) // 2),
        odd_zero=np.int32(getattr(q, "odd_levels", 1) // 2),
        middle=real((getattr(q, "levels", 1) - 1) / 2),
        odd_middle=real((getattr(q, "odd_levels", 1) - 1) / 2),
        stochastic_from=real(getattr(q, "stochastic_from", 1.0)),
        each=real(share.each),
        rest=real(share.rest),
        largest=np.finfo(real).max,
        up=real(1 + 2 * np.finfo(real).eps),
        mask=wide(np.iinfo(wide).max),
        shift=form.shift,
        infinity=form.infinity,
        tiny=form.tiny,
        scale_shift=form.nbytes // 2,
        kind=int(q.kind),
        nearest=getattr(q, "nearest", False),
        magnitudes=getattr(q, "magnitudes", 0),
        kept=getattr(q, "kept", 0),
        cut=wide(cut),
        offset=wide(offset),
        cut_off=real(2.0**cut),
        smallest=smallest,
        per_smallest=real(1) / smallest,
        shrink=real(2.0 ** -getattr(q, "headroom", 0)),
        one=real(1),
    )


def _scratch(block_size: int, dtype: torch.dtype) -> _Scratch:
    size = block_size + 1  # dither comes in pairs
    mean, real = np.empty(size, _real(dtype)), np.empty(size, _real(dtype))
    return _Scratch(
        u=np.empty(size, np.float32),
        codes=np.empty(size, np.uint8),
        other=np.empty(size, np.float32),
        mean=mean,
        mean_bits=mean.view(_wide(dtype)),
        real=real,
        real_bits=real.view(_wide(dtype)),
        others=np.empty(size, np.uint8),
    )
