"""Kernels of top-k codes for CPUs, in Numba; `codecs.top_k.codec` has the readable form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numba import int32, int64, uint16

from lightning_gqsgd.kernels.cpu.blocks import codec_kernel
from lightning_gqsgd.kernels.cpu.casts import narrowed, numbers
from lightning_gqsgd.kernels.cpu.jit import inlined, loop
from lightning_gqsgd.kernels.cpu.loops import fill
from lightning_gqsgd.kernels.layout import CODES
from lightning_gqsgd.kernels.wire import scale_format

if TYPE_CHECKING:
    from lightning_gqsgd.codecs.top_k.codec import TopKQuantiser


class TopK(NamedTuple):
    """A top-k quantiser, typed for the kernels.

    Attributes:
        kept: number of coordinates that are kept out of 65536.
        raw_bytes: bytes of a coordinate on the wire.
    """

    kept: int
    raw_bytes: int


def numbers_of(q: TopKQuantiser, dtype: torch.dtype, sources: int) -> TopK:
    """Returns the family's constants for a quantiser."""
    return TopK(q.kept, scale_format(dtype).raw_bytes)


def codec(q: TopKQuantiser) -> Any:
    """Returns the kernel that encodes, reduces and decodes, which is the same for all top-k quantisers."""
    return _kernel


@inlined
def _kept_of(length, c):
    """Returns the number of coordinates that a block keeps, see `codecs.top_k.codec.TopKQuantiser.kept_of`."""
    return (length * c.family.kept + 65535) >> 16


@inlined
def _write(values, given, block, key, c, s, wire):
    """Write the largest values of a block, and then their places. If magnitudes are equal, the first ones are kept."""
    bits = numbers(values, 0, values.size, c.form.mask)
    count = _kept_of(values.size, c)
    kept = numbers(wire, block[CODES], count, c.form.zero)
    places = numbers(wire, block[CODES] + count * c.family.raw_bytes, count, uint16(0))
    _write_largest(values, bits, c.form.mask, kept, places)


@loop
def _write_largest(values, bits, mask, kept, places):
    """Write the ``kept.size`` largest values and their places. ``bits`` are the values as integers."""
    least = _threshold(bits, mask, kept.size)
    ties = kept.size
    for j in range(bits.size):
        ties -= (bits[j] & mask) > least
    at = 0
    for j in range(bits.size):
        magnitude = bits[j] & mask
        if magnitude > least or (magnitude == least and ties > 0):
            ties -= magnitude == least
            kept[at] = values[j]
            places[at] = uint16(j)
            at += 1


@loop
def _threshold(bits, mask, count):
    """Returns the largest number that at least ``count`` magnitudes reach, or a smaller number that exactly ``count``
    magnitudes reach. The search sets one bit after the other, from the highest bit on."""
    threshold = int64(0)
    place = int64(mask) - (int64(mask) >> 1)
    while place:
        least = narrowed(threshold | place, mask)
        reach = int32(0)
        for j in range(bits.size):
            reach = int32(reach + int32((bits[j] & mask) >= least))
        if reach >= count:
            threshold |= place
            if reach == count:
                break
        place >>= 1
    return narrowed(threshold, mask)


@inlined
def _read(wire, at, block, key, c, s, add, out):
    """Write the kept coordinates times ``c.each`` into ``out``, or add them to it if ``add`` is true.

    The block becomes NaN everywhere if a kept coordinate is not finite, or if its place is not in the block.
    """
    count = _kept_of(out.size, c)
    kept = numbers(wire, at + block[CODES], count, c.form.zero)
    places = numbers(wire, at + block[CODES] + count * c.family.raw_bytes, count, uint16(0))
    if not add:
        fill(out, 0)
    for i in range(count):
        place = int64(places[i])
        value = kept[i]
        if place >= out.size or value - value != 0:
            fill(out, np.nan)
            break
        out[place] += value * c.each


_kernel = codec_kernel("top_k", _write, _read)
