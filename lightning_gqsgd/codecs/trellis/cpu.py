"""Kernels of trellis codes for CPUs, in Numba; `codecs.trellis.codec` has the readable form.

The functions of `codecs.eden.cpu` rotate and scale blocks. The functions here choose levels. A vector holds the same
step of several sequences, one sequence for each number.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from numba import int32, int64, uint32

from lightning_gqsgd.codecs.eden.cpu import folded_sum, rotating_kernel
from lightning_gqsgd.codecs.trellis.codec import LANES, MEMORY, SEGMENT, STATES
from lightning_gqsgd.codecs.trellis.cpu_vectors import (
    advanced,
    bits_of_state,
    costs,
    first_words,
    levels,
    numbers_of_levels,
    renewed,
    smallest_bits,
    swapped,
    units,
)
from lightning_gqsgd.kernels.cpu.casts import numbers
from lightning_gqsgd.kernels.cpu.dither import block_keys, word
from lightning_gqsgd.kernels.cpu.jit import inlined, loop
from lightning_gqsgd.kernels.cpu.packing import pack_planes, unpack_planes
from lightning_gqsgd.kernels.cpu.vectors import (
    filled_codes,
    lanes,
    load,
    load_codes,
    load_like,
    shifted_down,
    shifted_up,
    store,
)
from lightning_gqsgd.kernels.layout import CODES
from lightning_gqsgd.kernels.wire import ORDER_PLACE

if TYPE_CHECKING:
    from lightning_gqsgd.codecs.trellis.codec import TrellisQuantiser

#: Number of coordinates in a segment of all sequences.
_SEGMENT_NUMEL = SEGMENT * LANES


def numbers_of(q: TrellisQuantiser, dtype: torch.dtype, sources: int) -> None:
    """Returns None: levels are constants of the machine code, so the family has no others."""


def codec(q: TrellisQuantiser) -> Any:
    """Returns the kernel that encodes, reduces and decodes."""
    return _codec(q.bits)


@inlined
def _random_of(key, block):
    """Returns the random word that determines the order of a block's coordinates, see `codecs.trellis.codec.orders`."""
    a, b = block_keys(key, block)
    return int64(word(uint32(ORDER_PLACE), a, b))


@inlined
def _source(step, lane, random, z):
    """Returns the place of the vector of rotated coordinates ``z`` for a step of the sequences from ``lane`` on. The
    first result is the place of its first number. The second result is a number k: the place p within the vector has
    the coordinate at p ^ k."""
    row = (random | 1) * step & (z.size // LANES - 1)
    swap = (random * step & 0xFFFFFFFF) >> 28
    width = lanes(z)
    return row * LANES + (lane ^ (swap & -width)), swap & (width - 1)


@loop
def _arranged(z, random, out):
    """Write rotated coordinates into ``out``, in the order of the sequences."""
    for step in range(z.size // LANES):
        for lane in range(0, LANES, lanes(z)):
            first, swap = _source(step, lane, random, z)
            store(out, step * LANES + lane, swapped(load(z, first), swap))


@inlined
def _arrange(z, space, key, block):
    """Put rotated coordinates into the order of the sequences; see `eden.cpu.rotating_kernel`."""
    _arranged(z, _random_of(key, block), space)
    return space, z


@inlined
def _keep(words, kept, at, width):
    """Store the words of all states in ``kept``, from ``at`` on."""
    store(kept, at, words[0])
    store(kept, at + width, words[1])
    store(kept, at + 2 * width, words[2])
    store(kept, at + 3 * width, words[3])
    store(kept, at + 4 * width, words[4])
    store(kept, at + 5 * width, words[5])
    store(kept, at + 6 * width, words[6])
    store(kept, at + 7 * width, words[7])


@inlined
def _kept_words(kept, at, width, like):
    """Returns the words of all states that `_keep` has stored."""
    return (
        load_like(kept, at, like),
        load_like(kept, at + width, like),
        load_like(kept, at + 2 * width, like),
        load_like(kept, at + 3 * width, like),
        load_like(kept, at + 4 * width, like),
        load_like(kept, at + 5 * width, like),
        load_like(kept, at + 6 * width, like),
        load_like(kept, at + 7 * width, like),
    )


@lru_cache
def _codec(bits: int) -> Any:
    """Returns the kernel of `codec`, compiled for a number of bits."""
    costs_of_step, numbers_in, levels_in = costs(bits), numbers_of_levels(bits), levels(bits)

    @loop
    def search(moved, inverse, lane, kept):
        """Write the words of all states after each segment of the sequences from number ``lane`` on into ``kept``."""
        words = first_words(load(moved, 0))
        width = lanes(moved)
        at = 0
        for start in range(lane, moved.size, _SEGMENT_NUMEL):
            words = renewed(words)
            for step in range(SEGMENT):
                x = units(load(moved, start + step * LANES), inverse)
                words = advanced(words, costs_of_step(x), step)
            _keep(words, kept, at, width)
            at += STATES * width

    @loop
    def trace(z, moved, inverse, lane, kept, codes):
        """Write the codes of the best sequences, from number ``lane`` on. ``z`` receives the products of coordinates
        and levels."""
        width = lanes(z)
        like = load(z, 0)
        segments = z.size // _SEGMENT_NUMEL
        bits_here = filled_codes(0, like)
        for number in range(segments - 1, -1, -1):
            words = _kept_words(kept, number * STATES * width, width, like)
            bits_here = smallest_bits(words) if number == segments - 1 else bits_of_state(words, bits_here)
            for step in range(SEGMENT):
                j = number * _SEGMENT_NUMEL + step * LANES + lane
                windows = shifted_down(bits_here, step)
                code = numbers_in(units(load(moved, j), inverse), windows)
                level = levels_in(code, windows, like)
                u = shifted_up(shifted_down(windows, MEMORY) & filled_codes(1, like), bits - 1)
                store(codes, j, code | u)
                store(z, j, load(z, j) * level)

    @loop
    def look_up_lanes(codes, lane, random, z):
        """Write the levels of the codes of the sequences from number ``lane`` on into ``z``."""
        like = load(z, 0)
        windows = filled_codes(0, like)
        for step in range(z.size // LANES):
            code = load_codes(codes, step * LANES + lane, like)
            windows = shifted_down(windows, 1) | shifted_up(shifted_down(code, bits - 1), MEMORY)
            first, swap = _source(step, lane, random, z)
            store(z, first, swapped(levels_in(code, windows, like), swap))

    @inlined
    def choose(z, moved, deviation, terms, c, s, wire, at):
        """Write the codes of a block; see `eden.cpu.rotating_kernel`."""
        inverse = z.dtype.type(1) / deviation
        kept = numbers(s.other, 0, z.size, int32(0))
        for lane in range(0, LANES, lanes(z)):
            search(moved, inverse, lane, kept)
            trace(z, moved, inverse, lane, kept, s.codes)
        pack_planes(s.codes, z.size, bits, wire, at)
        return folded_sum(z)

    @inlined
    def look_up(wire, block, at, key, c, s, z):
        """Write the levels of the codes of a block into ``z``; see `eden.cpu.rotating_kernel`."""
        unpack_planes(wire, at + block[CODES], z.size, bits, s.codes)
        random = _random_of(key, block)
        for lane in range(0, LANES, lanes(z)):
            look_up_lanes(s.codes, lane, random, z)

    return rotating_kernel(f"trellis_{bits}", choose, look_up, _arrange)
