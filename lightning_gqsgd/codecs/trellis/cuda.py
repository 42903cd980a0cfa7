"""Kernels of trellis codes for GPUs, in Triton; `codecs.trellis.codec` has the readable form.

The functions of `codecs.eden.cuda` rotate and scale blocks. The functions here choose levels. Tensors of one step have
the shape [rows, sequences], and the words of all states are eight such tensors. The steps of a segment are unrolled,
and the kernel loops over segments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from lightning_gqsgd.codecs.eden.cuda import Rotated, rotated_back_tile, rotated_tile, send_scales_of, with_dither
from lightning_gqsgd.codecs.trellis import codec
from lightning_gqsgd.kernels import wire
from lightning_gqsgd.kernels.cuda.floats import divided
from lightning_gqsgd.kernels.cuda.hashing import block_keys, words
from lightning_gqsgd.kernels.cuda.stages import ScaledFamily
from lightning_gqsgd.kernels.cuda.tiles import RAGGED
from lightning_gqsgd.kernels.wire import float_type

_ORDER_PLACE = tl.constexpr(wire.ORDER_PLACE)

_LANES = tl.constexpr(codec.LANES)
_SEGMENT = tl.constexpr(codec.SEGMENT)
_MEMORY = tl.constexpr(codec.MEMORY)
_STATES = tl.constexpr(codec.STATES)
_WINDOWS = tl.constexpr(codec.WINDOWS)
_PATH = tl.constexpr(codec.PATH)
_BITS = tl.constexpr((1 << codec.PATH) - 1)
_COST = tl.constexpr(-1 << codec.PATH)
_FIRST_BIT = tl.constexpr(1 << codec.MEMORY)
_NEVER = tl.constexpr(codec.NEVER << codec.PATH)
_FARTHEST = tl.constexpr(codec.FARTHEST)
#: Adding this number to a float below 2^22 rounds the float to an integer, which is then in the lowest bits.
_ROUNDER = tl.constexpr(1.5 * 2**23)
#: Number of different alphabets: one for each of the four subsets, and one for each window whose outermost level is
#: farther out.
_ALPHABETS = tl.constexpr(4 + len(codec.FAR_WINDOWS))
_FAR_0 = tl.constexpr(4)
_FAR_3 = tl.constexpr(5)
_FAR_WINDOW_3, _FAR_WINDOW_0 = (tl.constexpr(window) for window in codec.FAR_WINDOWS)


class Trellis(NamedTuple):
    """The constants of the family. Each attribute has the numbers of all alphabets, one alphabet after the other.

    Attributes:
        levels: levels, ascending.
        thresholds: the smallest number that is rounded to each level, except for the first level of an alphabet.
        constants, slopes: see `codec.costs_of`.
    """

    levels: tuple[float, ...]
    thresholds: tuple[float, ...]
    constants: tuple[float, ...]
    slopes: tuple[float, ...]


def numbers_of(q: Any, dtype: torch.dtype) -> Trellis:
    """Returns the constants of the family for a `TrellisQuantiser` and gradients of a dtype."""
    real = float_type(dtype)
    usual = {codec.subset_of(window): window for window in range(codec.WINDOWS) if window not in codec.FAR_WINDOWS}
    alphabets = q.alphabets[[usual[0], usual[1], usual[2], usual[3], _FAR_WINDOW_0.value, _FAR_WINDOW_3.value]]
    constants, slopes = codec.costs_of(alphabets)
    listed = (real(alphabets), codec.thresholds_of(alphabets), constants, slopes)
    return Trellis(*(tuple(numbers.flatten().tolist()) for numbers in listed))


@triton.jit
def _to_codes(a, b, t, key, scales, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the codes of coordinates; see `ScaledFamily.to_codes`. The scale of a block follows from its codes, so it
    is sent after them."""
    rotated = rotated_tile(a, b, t, key, scales, KIND, c)
    a, b = _arranged(rotated.a, rotated.b, t, key, KIND, c)
    rotated = Rotated(a, b, rotated.width, rotated.squares, rotated.deviation, rotated.up)
    moved_a, moved_b = with_dither(rotated, t, key, KIND, c)
    inverse = divided(tl.full(rotated.deviation.shape, 1, c.number.compute), rotated.deviation, c)[:, None]
    x_a = _limited((moved_a * inverse).to(tl.float32))
    x_b = _limited((moved_b * inverse).to(tl.float32))
    window_a, window_b = _halves(_best_windows(_joined(x_a, x_b, c), t.n, c), c)
    number_a, level_a = _nearest(x_a, _alphabet(window_a), c)
    number_b, level_b = _nearest(x_b, _alphabet(window_b), c)
    used = send_scales_of(rotated, level_a, level_b, t, key, scales, c)
    HIGHEST: tl.constexpr = c.codes.bits - 1
    code_a = number_a | ((window_a >> _MEMORY) << HIGHEST)
    code_b = number_b | ((window_b >> _MEMORY) << HIGHEST)
    return code_a * used[:, None], code_b * used[:, None]


@triton.jit
def _to_values(code_a, code_b, t, key, scale, flag, KIND: tl.constexpr, c: tl.constexpr):
    """Returns the coordinates of codes; see `ScaledFamily.to_values`."""
    HIGHEST: tl.constexpr = c.codes.bits - 1
    window_a, window_b = _halves(_windows_of(_joined(code_a >> HIGHEST, code_b >> HIGHEST, c), c), c)
    level_a = _levels(code_a & ((1 << HIGHEST) - 1), _alphabet(window_a), c)
    level_b = _levels(code_b & ((1 << HIGHEST) - 1), _alphabet(window_b), c)
    level_a, level_b = _put_back(level_a, level_b, t, tl.load(key), KIND, c)
    return rotated_back_tile(level_a, level_b, t, key, scale, KIND, c)


@triton.jit
def _arranged(a, b, t, key, KIND: tl.constexpr, c: tl.constexpr):
    """Returns both halves of rotated coordinates in the order of the sequences; see `codec.orders`."""
    place = tl.arange(0, 2 * c.shape.half)[None, :]
    random = _random(t, key)
    step = (place // _LANES).to(tl.uint32)
    row = ((random | 1) * step).to(tl.int32) & (t.n // _LANES - 1)[:, None]
    return _from_places(a, b, _LANES * row + _lane(place, random, step), t, KIND, c)


@triton.jit
def _put_back(a, b, t, key, KIND: tl.constexpr, c: tl.constexpr):
    """Returns both halves of numbers in the order of rotated coordinates, from the order of the sequences."""
    place = tl.arange(0, 2 * c.shape.half)[None, :]
    random = _random(t, key)
    factor = random | 1
    # The inverse of the factor modulo 2^3, and after each iteration modulo 2^6, 2^12 and 2^24.
    inverse = factor
    for _ in tl.static_range(3):
        inverse *= 2 - factor * inverse
    step = (inverse * (place // _LANES).to(tl.uint32)).to(tl.int32) & (t.n // _LANES - 1)[:, None]
    return _from_places(a, b, _LANES * step + _lane(place, random, step.to(tl.uint32)), t, KIND, c)


@triton.jit
def _random(t, key):
    """Returns the random word that determines the order of each block, uint32 [rows, 1]."""
    word_a, word_b = block_keys(t, key)
    return words(tl.full((1, 1), _ORDER_PLACE, tl.uint32), word_a, word_b)


@triton.jit
def _lane(place, random, step):
    """Returns the number within a row of 16 rotated coordinates for a place in the order of the sequences. The same
    formula also computes the inverse."""
    return (place % _LANES) ^ ((random * step) >> 28).to(tl.int32)


@triton.jit
def _from_places(a, b, places, t, KIND: tl.constexpr, c: tl.constexpr):
    """Returns both halves of rows after a permutation: each place within a block gets the number from ``places``."""
    if KIND == RAGGED:
        place = tl.arange(0, 2 * c.shape.half)[None, :]
        places = tl.where(place < t.n[:, None], places, place)
    whole = tl.reshape(tl.trans(tl.join(a, b), 0, 2, 1), (c.shape.rows, 2 * c.shape.half))
    whole = tl.gather(whole, places, axis=1)
    return tl.split(tl.trans(tl.reshape(whole, (c.shape.rows, 2, c.shape.half)), 0, 2, 1))


@triton.jit
def _limited(x):
    """Returns numbers within ±`codec.FARTHEST`."""
    return tl.minimum(tl.maximum(x, -_FARTHEST), _FARTHEST)


@triton.jit
def _joined(a, b, c: tl.constexpr):
    """Returns the numbers of both halves by segment, step and sequence: [rows, segments, steps, sequences]."""
    ROWS: tl.constexpr = c.shape.rows
    SEGMENTS: tl.constexpr = 2 * c.shape.half // (_SEGMENT * _LANES)
    return tl.reshape(tl.trans(tl.join(a, b), 0, 2, 1), (ROWS, SEGMENTS, _SEGMENT, _LANES))


@triton.jit
def _halves(v, c: tl.constexpr):
    """Returns both halves of a result of `_joined`."""
    ROWS: tl.constexpr = c.shape.rows
    return tl.split(tl.trans(tl.reshape(v, (ROWS, 2, c.shape.half)), 0, 2, 1))


@triton.jit
def _best_windows(x, n, c: tl.constexpr):
    """Returns the windows of the best sequences; see `codec.best_windows`. ``n`` has the number of rotated coordinates
    of each block."""
    ROWS: tl.constexpr = c.shape.rows
    SEGMENTS: tl.constexpr = 2 * c.shape.half // (_SEGMENT * _LANES)
    place = tl.arange(0, SEGMENTS)[None, :, None]
    last = (n // (_SEGMENT * _LANES) - 1)[:, None]
    w0 = tl.zeros((ROWS, _LANES), tl.int32)
    w1 = w0 + _NEVER
    w2 = w1
    w3 = w1
    w4 = w1
    w5 = w1
    w6 = w1
    w7 = w1
    bits = w0
    kept01 = tl.zeros((ROWS, SEGMENTS, _LANES), tl.int32)
    kept23 = kept01
    kept45 = kept01
    kept67 = kept01
    for segment in range(SEGMENTS):
        here = place == segment
        steps = tl.sum(tl.where(here[:, :, None, :], x, 0), axis=1)
        w0, w1, w2, w3, w4, w5, w6, w7 = _after_segment(steps, w0, w1, w2, w3, w4, w5, w6, w7, c)
        least = tl.minimum(tl.minimum(tl.minimum(w0, w1), tl.minimum(w2, w3)),
                           tl.minimum(tl.minimum(w4, w5), tl.minimum(w6, w7)))  # fmt: skip
        bits = tl.where(last == segment, least & _BITS, bits)
        kept01 = _put(kept01, here, w0, w1)
        kept23 = _put(kept23, here, w2, w3)
        kept45 = _put(kept45, here, w4, w5)
        kept67 = _put(kept67, here, w6, w7)
    final = bits
    found = tl.zeros((ROWS, SEGMENTS, _LANES), tl.int32)
    for back in range(SEGMENTS):
        segment = SEGMENTS - 1 - back
        here = place == segment
        state = (bits & (_STATES - 1))[:, None, :]
        pair = _either(state & 2, _either(state & 4, kept67, kept23), _either(state & 4, kept45, kept01))
        before = tl.sum(tl.where(here, pair >> ((state & 1) * 16), 0), axis=1)
        bits = tl.where(last == segment, final, before & _BITS)
        found = tl.where(here, bits[:, None, :], found)
    step = tl.arange(0, _SEGMENT)[None, None, :, None]
    return (found[:, :, None, :] >> step) & (_WINDOWS - 1)


@triton.jit
def _either(bit, yes, no):
    """Returns ``yes`` if ``bit`` is not zero, and ``no`` otherwise, elementwise."""
    return tl.where(bit != 0, yes, no)


@triton.jit
def _put(kept, here, even, odd):
    """Returns ``kept`` with the bits of the words of two states added at one segment. The bits of both states share one
    integer, because registers are scarce."""
    return tl.where(here, ((even & _BITS) | (odd & _BITS) << 16)[:, None, :], kept)


@triton.jit
def _after_segment(steps, w0, w1, w2, w3, w4, w5, w6, w7, c: tl.constexpr):
    """Returns the words of all states after a segment. ``steps`` are the segment's coordinates, [rows, steps,
    sequences]."""
    ROWS: tl.constexpr = c.shape.rows
    first = w0 & _COST
    w0 = (w0 & _COST) - first
    w1 = ((w1 & _COST) - first) | 1
    w2 = ((w2 & _COST) - first) | 2
    w3 = ((w3 & _COST) - first) | 3
    w4 = ((w4 & _COST) - first) | 4
    w5 = ((w5 & _COST) - first) | 5
    w6 = ((w6 & _COST) - first) | 6
    w7 = ((w7 & _COST) - first) | 7
    early, late = _parted(tl.reshape(steps, (ROWS, _SEGMENT * _LANES)))
    for half in tl.static_range(2):
        first_two, last_two = _parted(early if half == 0 else late)
        for quarter in tl.static_range(2):
            first, second = _parted(first_two if quarter == 0 else last_two)
            w0, w1, w2, w3, w4, w5, w6, w7 = _after_step(
                first, w0, w1, w2, w3, w4, w5, w6, w7, 4 * half + 2 * quarter, c
            )
            w0, w1, w2, w3, w4, w5, w6, w7 = _after_step(
                second, w0, w1, w2, w3, w4, w5, w6, w7, 4 * half + 2 * quarter + 1, c
            )
    return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def _parted(v):
    """Returns the first and the second half of rows."""
    return tl.split(tl.trans(tl.reshape(v, (v.shape[0], 2, v.shape[1] // 2)), 0, 2, 1))


@triton.jit
def _after_step(x, w0, w1, w2, w3, w4, w5, w6, w7, STEP: tl.constexpr, c: tl.constexpr):
    """Returns the words of all states after one more step. `codec.subset_of` defines the alphabets."""
    d0 = _costs(x, 0, c)
    d1 = _costs(x, 1, c)
    d2 = _costs(x, 2, c)
    d3 = _costs(x, 3, c)
    far0 = _costs(x, _FAR_0, c)
    far3 = _costs(x, _FAR_3, c)
    bit: tl.constexpr = _FIRST_BIT << STEP
    return (
        tl.minimum(w0 + d0, w1 + d2),
        tl.minimum(w2 + d2, w3 + d0),
        tl.minimum(w4 + d1, w5 + d3),
        tl.minimum(w6 + far3, w7 + d1),
        tl.minimum(w0 + d2, w1 + far0) | bit,
        tl.minimum(w2 + d0, w3 + d2) | bit,
        tl.minimum(w4 + d3, w5 + d1) | bit,
        tl.minimum(w6 + d1, w7 + d3) | bit,
    )


@triton.jit
def _costs(x, ALPHABET: tl.constexpr, c: tl.constexpr):
    """Returns the costs at the nearest level of an alphabet, shifted so that they can be added to words."""
    LEVELS: tl.constexpr = 1 << (c.codes.bits - 1)
    FIRST: tl.constexpr = ALPHABET * LEVELS
    least = c.family.constants[FIRST] - x * c.family.slopes[FIRST]
    for k in tl.static_range(1, LEVELS):
        least = tl.minimum(least, c.family.constants[FIRST + k] - x * c.family.slopes[FIRST + k])
    return (least + _ROUNDER).to(tl.int32, bitcast=True) << _PATH


@triton.jit
def _windows_of(u, c: tl.constexpr):
    """Returns the windows of codes from their highest bits ``u``, both in the form of `_joined`."""
    ROWS: tl.constexpr = c.shape.rows
    SEGMENTS: tl.constexpr = 2 * c.shape.half // (_SEGMENT * _LANES)
    step = tl.arange(0, _SEGMENT)[None, None, :, None]
    bits = tl.reshape(tl.sum(u << (step + _MEMORY), axis=2), (ROWS, SEGMENTS * _LANES))
    place = tl.arange(0, SEGMENTS * _LANES)[None, :]
    if SEGMENTS > 1:
        before = tl.gather(bits, tl.broadcast_to(tl.maximum(place - _LANES, 0), bits.shape), axis=1)
        bits |= tl.where(place < _LANES, 0, before >> _SEGMENT)
    bits = tl.reshape(bits, (ROWS, SEGMENTS, _LANES))
    return (bits[:, :, None, :] >> step) & (_WINDOWS - 1)


@triton.jit
def _alphabet(window):
    """Returns the number of each window's alphabet."""
    subset = 2 * (((window >> 3) ^ (window >> 1) ^ window) & 1) + ((window >> 2) & 1)
    return tl.where(window == _FAR_WINDOW_0, _FAR_0, tl.where(window == _FAR_WINDOW_3, _FAR_3, subset))


@triton.jit
def _nearest(x, alphabet, c: tl.constexpr):
    """Returns the numbers of the nearest levels in each coordinate's alphabet, and the levels."""
    LEVELS: tl.constexpr = 1 << (c.codes.bits - 1)
    number = tl.zeros(x.shape, tl.int32)
    for k in tl.static_range(LEVELS - 1):
        threshold = tl.full(x.shape, c.family.thresholds[k], tl.float32)
        for other in tl.static_range(1, _ALPHABETS):
            threshold = tl.where(alphabet == other, c.family.thresholds[other * (LEVELS - 1) + k], threshold)
        number += (x >= threshold).to(tl.int32)
    return number, _levels(number, alphabet, c)


@triton.jit
def _levels(number, alphabet, c: tl.constexpr):
    """Returns the levels with these numbers in each coordinate's alphabet."""
    LEVELS: tl.constexpr = 1 << (c.codes.bits - 1)
    level = tl.zeros(number.shape, c.number.compute)
    for one in tl.static_range(_ALPHABETS):
        own = tl.full(number.shape, c.family.levels[one * LEVELS], c.number.compute)
        for k in tl.static_range(1, LEVELS):
            own = tl.where(number >= k, tl.full((), c.family.levels[one * LEVELS + k], c.number.compute), own)
        level = tl.where(alphabet == one, own, level)
    return level


FAMILY = ScaledFamily(numbers_of, _to_codes, _to_values)
