"""Kernels of top-k codes for GPUs, in Triton; `codecs.top_k.codec` has the readable form.

Tiles are not split into halves here. The rows of a tile are blocks of 2 ``c.shape.half`` coordinates, [rows, width].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gqsgd.kernels.cuda import launch
from lightning_gqsgd.kernels.cuda.constants import Constants, Mean, mean_of, number_of, shape_of
from lightning_gqsgd.kernels.cuda.floats import divided, in_finite_range, is_finite, magnitudes
from lightning_gqsgd.kernels.cuda.tiles import RAGGED, count_rows, message_at, record, record_places, tile_of
from lightning_gqsgd.kernels.protocol import Coding
from lightning_gqsgd.kernels.wire import Key


class Share(NamedTuple):
    """The constants of the family, see `codecs.top_k.codec.TopKQuantiser`.

    Attributes:
        kept: number of coordinates that are kept out of 65536.
        most: the largest number of coordinates that a block keeps, rounded up to a power of two.
        stages: log2 of ``most``.
    """

    kept: int
    most: int
    stages: int


@triton.jit(do_not_specialize=["count", "origin"])
def encode_kernel(table, count, origin: tl.int64, x, wire, c: tl.constexpr):
    """Encode blocks into a message; see `protocol.Kernels.encode`."""
    t = tile_of(table, count, origin, None, RAGGED, c)
    j = tl.arange(0, 2 * c.shape.half)[None, :]
    v = tl.load(x + t.start[:, None] + j, mask=j < t.n[:, None], other=0).to(c.number.compute)
    _write_largest(v, t, wire, c)


@triton.jit(do_not_specialize=["count", "origin", "stride", "messages", "own"])
def reduce_kernel(table, count, origin: tl.int64, x, wires, stride: tl.int64, messages, own, out, c: tl.constexpr):
    """Average the messages of one shard, and encode the mean; see `protocol.Kernels.reduce`. ``x`` has the coordinates
    of source ``own``."""
    t = tile_of(table, count, origin, None, RAGGED, c)
    mean, _ = _mean_of_largest(wires, stride, messages, own, x, t, c)
    _write_largest(mean, t, out, c)


@triton.jit(do_not_specialize=["count", "origin", "stride", "messages", "own"])
def decode_kernel(table, count, origin: tl.int64, x, wires, stride: tl.int64, messages, own, counter, c: tl.constexpr):
    """Decode messages, and write their mean into ``x``; see `protocol.Kernels.decode`. The number of blocks that are
    not finite is added to ``counter``."""
    t = tile_of(table, count, origin, None, RAGGED, c)
    mean, bad = _mean_of_largest(wires, stride, messages, own, x, t, c)
    # A coded block has no infinite coordinates, because a block that is not finite is NaN.
    mean = tl.where(t.raw[:, None], mean, in_finite_range(mean, x.dtype.element_ty, False, c))
    j = tl.arange(0, 2 * c.shape.half)[None, :]
    tl.store(x + t.start[:, None] + j, mean.to(x.dtype.element_ty), mask=j < t.n[:, None])
    count_rows(bad, counter, RAGGED, c)


@triton.jit
def _kept_of(n, c: tl.constexpr):
    """Returns the number of coordinates that each block keeps; see `codecs.top_k.codec.TopKQuantiser.kept_of`."""
    return ((n.to(tl.int64) * c.family.kept + 65535) >> 16).to(tl.int32)


@triton.jit
def _places(wire, at, count, c: tl.constexpr):
    """Returns pointers to the places of the kept coordinates, which are behind ``count`` coordinates."""
    nbytes = count * (c.number.compute.primitive_bitwidth // 8)
    return (wire + at + nbytes).to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def _write_largest(v, t, wire, c: tl.constexpr):
    """Write the records of a tile: the largest coordinates of each block, and their places. If magnitudes are equal,
    the first ones are kept."""
    BITS: tl.constexpr = c.number.compute.primitive_bitwidth
    j = tl.arange(0, 2 * c.shape.half)[None, :]
    inside = j < t.n[:, None]
    at = record_places(t)
    values = record(wire, at, c.number.compute)[:, None]
    tl.store(values + j, v, mask=t.raw[:, None] & inside)
    bits = tl.where(inside, magnitudes(v, c), -1)
    count = _kept_of(t.n, c)
    least = (t.n * 0).to(c.number.integer)  # largest number that ``count`` magnitudes reach, found bit by bit
    for step in range(BITS - 1):
        more = least | ((least * 0 + 1) << (BITS - 2 - step))
        reached = tl.sum((bits >= more[:, None]).to(tl.int32), axis=1)
        least = tl.where(reached >= count, more, least)
    larger = bits > least[:, None]
    equal = (bits == least[:, None]).to(tl.int32)
    ties = count - tl.sum(larger.to(tl.int32), axis=1)
    kept = larger | ((equal == 1) & (tl.cumsum(equal, axis=1) <= ties[:, None]))
    order = tl.cumsum(kept.to(tl.int32), axis=1) - 1
    kept = kept & (t.inside & (t.raw == 0))[:, None]
    tl.store(values + order, v, mask=kept)
    tl.store(_places(wire, at, count, c)[:, None] + order, (j + order * 0).to(tl.int16), mask=kept)


@triton.jit
def _mean_of_largest(wires, stride, messages, own, x, t, c: tl.constexpr):
    """Returns the mean of the messages, and whether each block is not finite. The messages are added in order, and are
    ``stride`` times 16 bytes apart.

    If ``c.mean.has_own`` is true, the coordinates in ``x`` are used instead of the coded blocks of source ``own``.
    """
    ROWS: tl.constexpr = c.shape.rows
    WIDTH: tl.constexpr = 2 * c.shape.half
    j = tl.arange(0, WIDTH)[None, :]
    inside = j < t.n[:, None]
    at = record_places(t)
    coded = t.inside & (t.raw == 0)
    count = _kept_of(t.n, c)
    total = tl.zeros((ROWS, WIDTH), c.number.compute)
    bad = t.n < 0
    for source in range(messages):
        wire = message_at(wires, stride, source)
        values = record(wire, at, c.number.compute)
        places = _places(wire, at, count, c)
        total += tl.load(values[:, None] + j, mask=t.raw[:, None] & inside, other=0) * c.mean.each
        if c.mean.has_own:
            if source != own:
                total, bad = _with_kept(total, bad, values, places, coded, count, t, c)
        else:
            total, bad = _with_kept(total, bad, values, places, coded, count, t, c)
    if c.mean.has_own:
        v = tl.load(x + t.start[:, None] + j, mask=coded[:, None] & inside, other=0).to(c.number.compute)
        bad |= tl.max((is_finite(v) == 0).to(tl.int32), axis=1) > 0
        total += v * c.mean.each
    if c.mean.rest != 1:
        total = divided(total, tl.full((1, 1), c.mean.rest, c.number.compute), c)
    total = tl.where(bad[:, None], float("nan"), total)
    bad |= t.raw & (tl.max((inside & (is_finite(total) == 0)).to(tl.int32), axis=1) > 0)
    return total, bad


@triton.jit
def _with_kept(total, bad, values, places, coded, count, t, c: tl.constexpr):
    """Returns a sum plus the kept coordinates of one message times ``c.mean.each``, and whether each block is not
    finite.

    Places are ascending, so each coordinate of a block finds its own place by bisection.

    Args:
        total, bad: the sum, and whether each block was not finite before.
        values, places: pointers to each block's kept coordinates and their places.
        coded: whether each row is a coded block.
        count: number of kept coordinates of each block.
        t: the tile.
    """
    ROWS: tl.constexpr = c.shape.rows
    WIDTH: tl.constexpr = 2 * c.shape.half
    STAGES: tl.constexpr = c.family.stages
    j = tl.arange(0, WIDTH)[None, :]
    first = tl.zeros((ROWS, WIDTH), tl.int32)  # number of places below j, most - 1 at most
    for stage in tl.static_range(STAGES):
        half = c.family.most >> (stage + 1)
        place, _ = _place_of(places, first + (half - 1), coded, count, c)
        first += tl.where(place < j, half, 0)
    place, _ = _place_of(places, first, coded, count, c)
    kept = tl.load(values[:, None] + first, mask=place == j, other=0)
    k = tl.arange(0, c.family.most)[None, :]
    place, has = _place_of(places, k, coded, count, c)
    value = tl.load(values[:, None] + k, mask=has, other=0)
    bad |= tl.max((has & ((place >= t.n[:, None]) | (is_finite(value) == 0))).to(tl.int32), axis=1) > 0
    return total + kept * c.mean.each, bad


@triton.jit
def _place_of(places, k, coded, count, c: tl.constexpr):
    """Returns the places of the kept coordinates ``k``, and whether there are such coordinates. If there are none, the
    places are beyond all places."""
    has = coded[:, None] & (k < count[:, None])
    place = tl.load(places[:, None] + k, mask=has, other=0).to(tl.int32) & 0xFFFF
    return tl.where(has, place, 65536), has


class TopKFamily:
    """The top-k family. Its records have no scale, and encoding needs no dither."""

    def encode(self, x: Tensor, how: Coding, wire: Tensor, key: Key, scales: Tensor | None = None) -> None:
        """Encode blocks into a message; see `protocol.Kernels.encode`. The codec has no scales and no rotation."""
        launch.run(encode_kernel, _constants(how.q, x.dtype), how.blocks, x, wire, splits=False)

    def reduce(
        self, wires: Tensor, how: Coding, x: Tensor, keys: Sequence[Key], own: int, out: Tensor, out_key: Key
    ) -> None:
        """Average the messages of one shard, and encode the mean; see `protocol.Kernels.reduce`."""
        c = _constants(how.q, x.dtype, mean_of(len(keys), x.dtype, encoded=True, has_own=True))
        arguments = (wires, launch.stride_of(wires), len(keys), own, out)
        launch.run(reduce_kernel, c, how.blocks, x, *arguments, splits=False)

    def decode(self, wires: Tensor, how: Coding, x: Tensor, keys: Sequence[Key], own: int | None = None) -> Tensor:
        """Decode messages, and write their mean into ``x``; see `protocol.Kernels.decode`."""
        c = _constants(how.q, x.dtype, mean_of(len(keys), x.dtype, has_own=own is not None))
        bad = launch.counter(x.device)
        arguments = (wires, launch.stride_of(wires), len(keys), -1 if own is None else own, bad)
        launch.run(decode_kernel, c, how.blocks, x, *arguments, splits=False)
        return bad


@lru_cache(maxsize=256)
def _constants(q: Any, dtype: torch.dtype, mean: Mean | None = None) -> Constants:
    most = triton.next_power_of_2(q.kept_of(q.block_size))
    family = Share(q.kept, most, most.bit_length() - 1)
    return Constants(number_of(dtype), shape_of(q.block_size), family=family, mean=mean)


FAMILY = TopKFamily()
