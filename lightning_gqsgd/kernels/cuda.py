"""Fast kernels on CUDA devices, in Triton: one pass over memory per stage, and no wait for the device.

The functions and their arguments are those of `reference`, where they are described; the codes are the same. Block
tables are on the device; `decode` and `decode_sum` return the number of non-finite blocks as a tensor there.

A program has a tile (see `tiles`) of 4096 coordinates, or of one block. Coordinates are read once, and stay in
registers until codes leave. Tiles are of one of three kinds: where all blocks have the full length, no access is
masked, and codes move 16 bytes at a time; where they also begin at multiples of 16 bytes, so do coordinates. The third
kind, with the ends of parameters, is slower. What a codec fixes is a constant of a compiled kernel, so that each has
kernels of its own.

Products and sums are not contracted, and divisions are rounded correctly, as in `reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gqsgd.kernels.protocol import Kind, Quantiser
from lightning_gqsgd.kernels.tiles import (
    CODES,
    FIRST,
    LENGTH,
    RAW,
    START,
    Constants,
    aligned,
    any_not_finite,
    block_keys,
    column,
    draws,
    exponential_values,
    hash_of,
    linear_values,
    load_tile,
    magnitudes,
    mean_of_largest,
    mean_of_messages,
    one_and,
    pack,
    rotated,
    scale_of,
    store_tile,
    unpack,
    write_largest,
    write_records,
)
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, Key, Share, scale_format

#: Coordinates of a tile, where blocks are not larger: 32 for each of 128 threads.
_TILE = 4096
_LANES = tl.constexpr(16)  # of sums, see `reference.block_moments`


@triton.jit
def _count_bad(bad, counter):
    found = tl.sum(bad.to(tl.int32), axis=0)
    if found > 0:
        tl.atomic_add(counter, found)


# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _shape_of(table, count, c: tl.constexpr):
    """Numbers of this program's blocks, which of them there are, their lengths, and which are raw."""
    row = tl.program_id(0).to(tl.int64) * c.rows + tl.arange(0, c.rows)
    inside = row < count
    return row, inside, column(table, row, inside, LENGTH).to(tl.int32), column(table, row, inside, RAW) == 1


@triton.jit
def _kind_of(n, raw, start, x, c: tl.constexpr):
    """Kind of a tile: 2, all blocks are full, and aligned in ``x``; 1, they are full; 0, neither."""
    full = tl.min(tl.where(raw, 0, n), axis=0) == c.block
    return full.to(tl.int32) + (full & aligned(start, x)).to(tl.int32)


@triton.jit
def _encode_tile(
    x, start, table, wire, maxima, row, inside, n, raw, base, k0, k1, r0, r1, roots, c: tl.constexpr,
    GIVEN: tl.constexpr, ROTATED: tl.constexpr, FULL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    a, b = load_tile(x, start, n, c, FULL, ALIGNED)
    if ROTATED:
        a, b = rotated(a, b, table, row, inside, n, raw, r0, r1, roots, False, c, FULL)
    scale_bits = tl.load(maxima + row, mask=inside, other=0) if GIVEN else n
    write_records(a, b, table, row, inside, n, raw, wire, base, scale_bits, k0, k1, c, GIVEN, FULL)


@triton.jit(do_not_specialize=["count", "base", "k0", "k1", "r0", "r1"])
def _encode_kernel(
    x, table, wire, maxima, roots, count, base: tl.int64, k0, k1, r0, r1, c: tl.constexpr, GIVEN: tl.constexpr,
    ROTATED: tl.constexpr,
):  # fmt: skip
    row, inside, n, raw = _shape_of(table, count, c)
    start = column(table, row, inside, START)
    kind = _kind_of(n, raw, start, x, c) if c.may_be_full else 0
    if kind == 2:
        _encode_tile(
            x, start, table, wire, maxima, row, inside, n, raw, base, k0, k1, r0, r1, roots, c, GIVEN, ROTATED,
            True, True,
        )  # fmt: skip
    elif kind == 1:
        _encode_tile(
            x, start, table, wire, maxima, row, inside, n, raw, base, k0, k1, r0, r1, roots, c, GIVEN, ROTATED,
            True, False,
        )  # fmt: skip
    else:
        _encode_tile(
            x, start, table, wire, maxima, row, inside, n, raw, base, k0, k1, r0, r1, roots, c, GIVEN, ROTATED,
            False, False,
        )  # fmt: skip


@triton.jit
def _decode_tile(
    wires, stride, table, x, start, counter, row, inside, n, raw, base, keys, sources, r0, r1, roots,
    EACH: tl.constexpr, REST: tl.constexpr, c: tl.constexpr, ROTATED: tl.constexpr, FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    a, b, bad = mean_of_messages(wires, stride, table, row, inside, n, raw, base, keys, sources, EACH, REST, c, FULL)
    if ROTATED:
        a, b = rotated(a, b, table, row, inside, n, raw, r0, r1, roots, True, c, FULL)
        bad |= any_not_finite(a, b, n, c, FULL)
    elif not FULL:
        bad |= raw & any_not_finite(a, b, n, c, FULL)
    store_tile(a, b, x, start, n, inside, c, FULL, ALIGNED)
    _count_bad(bad, counter)


@triton.jit(do_not_specialize=["count", "base", "r0", "r1"])
def _decode_kernel(
    wires, stride: tl.int64, table, x, counter, keys, roots, sources, count, base: tl.int64, r0, r1,
    EACH: tl.constexpr, REST: tl.constexpr, c: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    row, inside, n, raw = _shape_of(table, count, c)
    start = column(table, row, inside, START)
    kind = _kind_of(n, raw, start, x, c) if c.may_be_full else 0
    if kind == 2:
        _decode_tile(
            wires, stride, table, x, start, counter, row, inside, n, raw, base, keys, sources, r0, r1, roots, EACH,
            REST, c, ROTATED, True, True,
        )  # fmt: skip
    elif kind == 1:
        _decode_tile(
            wires, stride, table, x, start, counter, row, inside, n, raw, base, keys, sources, r0, r1, roots, EACH,
            REST, c, ROTATED, True, False,
        )  # fmt: skip
    else:
        _decode_tile(
            wires, stride, table, x, start, counter, row, inside, n, raw, base, keys, sources, r0, r1, roots, EACH,
            REST, c, ROTATED, False, False,
        )  # fmt: skip


@triton.jit
def _reduce_tile(
    wires, stride, table, out, row, inside, n, raw, base, keys, sources, k0, k1, EACH: tl.constexpr,
    REST: tl.constexpr, c: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    a, b, _ = mean_of_messages(wires, stride, table, row, inside, n, raw, base, keys, sources, EACH, REST, c, FULL)
    write_records(a, b, table, row, inside, n, raw, out, base, n, k0, k1, c, False, FULL)


@triton.jit(do_not_specialize=["count", "base", "k0", "k1"])
def _reduce_kernel(
    wires, stride: tl.int64, table, out, keys, sources, count, base: tl.int64, k0, k1, EACH: tl.constexpr,
    REST: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    row, inside, n, raw = _shape_of(table, count, c)
    kind = _kind_of(n, raw, row, out, c) if c.may_be_full else 0
    if kind > 0:
        _reduce_tile(wires, stride, table, out, row, inside, n, raw, base, keys, sources, k0, k1, EACH, REST, c, True)
    else:
        _reduce_tile(wires, stride, table, out, row, inside, n, raw, base, keys, sources, k0, k1, EACH, REST, c, False)


@triton.jit
def _decode_sum_tile(
    wire, maxima, table, x, start, counter, row, inside, n, keys, sources, MIDDLE: tl.constexpr, c: tl.constexpr,
    FULL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = c.rows
    HALF: tl.constexpr = c.half
    bits = tl.load(maxima + row, mask=inside, other=0)
    bad, used = bits >= c.infinity, (bits > 0) & (bits < c.infinity)
    scale = tl.where(used, scale_of(bits, c), 0)
    code_a, code_b = unpack(wire, column(table, row, inside, CODES), n, used, c, FULL)
    middle = tl.full((ROWS,), MIDDLE, c.compute)
    if c.exponential:
        a, b = exponential_values(code_a, scale * middle, c), exponential_values(code_b, scale * middle, c)
    else:
        offset_a = tl.zeros((ROWS, HALF), tl.float32) + MIDDLE
        offset_b = offset_a
        if not c.always_stochastic:
            for source in range(sources):
                k0, k1 = tl.load(keys + 2 * source), tl.load(keys + 2 * source + 1)
                draw_a, draw_b = draws(table, row, inside, n, k0, k1, c, FULL)
                offset_a += one_and(draw_a) + (FIRST - 1.5)
                offset_b += one_and(draw_b) + (FIRST - 1.5)
        stochastic = (n >= 0) & c.always_stochastic
        a = linear_values(code_a, offset_a, scale, middle, stochastic, c)
        b = linear_values(code_b, offset_b, scale, middle, stochastic, c)
    a, b = tl.where(bad[:, None], float("nan"), a), tl.where(bad[:, None], float("nan"), b)
    store_tile(a, b, x, start, n, inside, c, FULL, ALIGNED)
    _count_bad(bad, counter)


@triton.jit(do_not_specialize=["count"])
def _decode_sum_kernel(wire, maxima, table, x, counter, keys, sources, count, MIDDLE: tl.constexpr, c: tl.constexpr):
    row, inside, n, raw = _shape_of(table, count, c)
    start = column(table, row, inside, START)
    kind = _kind_of(n, raw, start, x, c) if c.may_be_full else 0
    if kind == 2:
        _decode_sum_tile(
            wire, maxima, table, x, start, counter, row, inside, n, keys, sources, MIDDLE, c,
            True, True,
        )  # fmt: skip
    elif kind == 1:
        _decode_sum_tile(
            wire, maxima, table, x, start, counter, row, inside, n, keys, sources, MIDDLE, c,
            True, False,
        )  # fmt: skip
    else:
        _decode_sum_tile(
            wire, maxima, table, x, start, counter, row, inside, n, keys, sources, MIDDLE, c,
            False, False,
        )  # fmt: skip


@triton.jit
def _rotate_tile(
    x, start, table, row, inside, n, raw, r0, r1, roots, INVERSE: tl.constexpr, c: tl.constexpr, FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    a, b = load_tile(x, start, n, c, FULL, ALIGNED)
    a, b = rotated(a, b, table, row, inside, n, raw, r0, r1, roots, INVERSE, c, FULL)
    store_tile(a, b, x, start, n, inside & (raw == 0), c, FULL, ALIGNED)


@triton.jit(do_not_specialize=["count", "r0", "r1"])
def _rotate_kernel(x, table, roots, count, r0, r1, INVERSE: tl.constexpr, c: tl.constexpr):
    row, inside, n, raw = _shape_of(table, count, c)
    start = column(table, row, inside, START)
    kind = _kind_of(n, raw, start, x, c) if c.may_be_full else 0
    if kind == 2:
        _rotate_tile(
            x, start, table, row, inside, n, raw, r0, r1, roots, INVERSE, c,
            True, True,
        )  # fmt: skip
    elif kind == 1:
        _rotate_tile(
            x, start, table, row, inside, n, raw, r0, r1, roots, INVERSE, c,
            True, False,
        )  # fmt: skip
    else:
        _rotate_tile(
            x, start, table, row, inside, n, raw, r0, r1, roots, INVERSE, c,
            False, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count", "base", "k0", "k1"])
def _combine_kernel(mine, theirs, table, count, base: tl.int64, k0, k1, c: tl.constexpr):
    """See `protocol.Kernels.combine`."""
    row, inside, n, raw = _shape_of(table, count, c)
    at = column(table, row, inside, CODES) - base
    key_a, key_b = block_keys(table, row, inside, k0, k1)
    p = tl.arange(0, c.half)[None, :]
    mine_a, mine_b = unpack(mine, at, n, inside, c, False)
    theirs_a, theirs_b = unpack(theirs, at, n, inside, c, False)
    code_a = _combined(mine_a, theirs_a, hash_of(p, key_a, key_b), c)
    code_b = _combined(mine_b, theirs_b, hash_of(p + c.half, key_a, key_b), c)
    pack(code_a, code_b, n, inside, mine, at, c, False)


@triton.jit
def _combined(one, other, word, c: tl.constexpr):
    MASK: tl.constexpr = (1 << (c.bits - 1)) - 1
    swap = (other & MASK) > (one & MASK)
    large, small = tl.where(swap, other, one), tl.where(swap, one, other)
    a, b = large & MASK, small & MASK
    opposite = ((large ^ small) >> (c.bits - 1)) != 0
    distance = a - b - opposite.to(tl.int32)
    shift = tl.minimum(tl.maximum(32 - distance, 0), 31).to(tl.uint32)
    fires = ((distance <= 0) | ((distance <= 32) & ((word >> shift) == 0))).to(tl.int32)
    moved = tl.where(opposite, a - fires, tl.minimum(a + fires, c.magnitudes))
    moved = tl.where(opposite & (distance < 0), 0, moved)
    result = tl.where(b == 0, a, moved)
    return tl.where(result == 0, 0, (large & (1 << (c.bits - 1))) | result)


@triton.jit(do_not_specialize=["count"])
def _maxima_kernel(x, table, out, count, c: tl.constexpr):
    row, inside, n, raw = _shape_of(table, count, c)
    start, longest = column(table, row, inside, START), tl.max(n, axis=0)
    largest = (n * 0).to(c.integer)
    if (tl.min(n, axis=0) == longest) & (longest % c.block == 0) & aligned(start, x):
        for first in range(0, longest, c.block):
            a, b = load_tile(x, start + first, n, c, True, True)
            largest = tl.maximum(largest, tl.max(tl.maximum(magnitudes(a, c), magnitudes(b, c)), axis=1))
    else:
        for first in range(0, longest, c.block):
            a, b = load_tile(x, start + first, n - first, c, False, False)
            largest = tl.maximum(largest, tl.max(tl.maximum(magnitudes(a, c), magnitudes(b, c)), axis=1))
    tl.store(out + row, largest, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _moments_kernel(x, table, out, count, c: tl.constexpr):
    """See `protocol.Kernels.block_moments`."""
    ROWS: tl.constexpr = c.rows
    LANES: tl.constexpr = _LANES
    row, inside, n, raw = _shape_of(table, count, c)
    start = column(table, row, inside, START)
    lane = tl.arange(0, _LANES)[None, :]
    plain = tl.zeros((ROWS, LANES), tl.float64)
    absolute = tl.zeros((ROWS, LANES), tl.float64)
    square = tl.zeros((ROWS, LANES), tl.float64)
    for first in range(0, tl.max(n, axis=0), _LANES):
        mask = first + lane < n[:, None]
        v = tl.load(x + start[:, None] + first + lane, mask=mask, other=0).to(c.compute).to(tl.float64)
        plain += v
        absolute += tl.abs(v)
        square += v * v
    _store_total(plain, out + 3 * row, lane, inside)
    _store_total(absolute, out + 3 * row + 1, lane, inside)
    _store_total(square, out + 3 * row + 2, lane, inside)


@triton.jit
def _store_total(lanes, places, lane, inside):
    total = tl.sum(tl.where(lane == 0, lanes, 0), axis=1)
    for number in tl.static_range(1, _LANES):
        total += tl.sum(tl.where(lane == number, lanes, 0), axis=1)
    tl.store(places, total, mask=inside)


@triton.jit(do_not_specialize=["count", "base"])
def _encode_largest_kernel(x, table, wire, count, base: tl.int64, c: tl.constexpr):
    row, inside, n, raw = _shape_of(table, count, c)
    j = tl.arange(0, 2 * c.half)[None, :]
    places = x + column(table, row, inside, START)[:, None] + j
    v = tl.load(places, mask=j < n[:, None], other=0).to(c.compute)
    write_largest(v, table, row, inside, n, raw, wire, base, c)


@triton.jit(do_not_specialize=["count", "base"])
def _reduce_largest_kernel(
    wires, stride: tl.int64, table, out, sources, count, base: tl.int64, EACH: tl.constexpr, REST: tl.constexpr,
    c: tl.constexpr,
):  # fmt: skip
    row, inside, n, raw = _shape_of(table, count, c)
    mean, _ = mean_of_largest(wires, stride, table, row, inside, n, raw, base, sources, EACH, REST, c)
    write_largest(mean, table, row, inside, n, raw, out, base, c)


@triton.jit(do_not_specialize=["count", "base"])
def _decode_largest_kernel(
    wires, stride: tl.int64, table, x, counter, sources, count, base: tl.int64, EACH: tl.constexpr, REST: tl.constexpr,
    c: tl.constexpr,
):  # fmt: skip
    row, inside, n, raw = _shape_of(table, count, c)
    mean, bad = mean_of_largest(wires, stride, table, row, inside, n, raw, base, sources, EACH, REST, c)
    j = tl.arange(0, 2 * c.half)[None, :]
    places = x + column(table, row, inside, START)[:, None] + j
    tl.store(places, mean.to(x.dtype.element_ty), mask=j < n[:, None])
    _count_bad(bad, counter)


# --- the functions of `reference` ------------------------------------------------------------------------------------


def block_maxima(x: Tensor, blocks: Tensor) -> Tensor:
    """See `protocol.Kernels.block_maxima`."""
    out = torch.empty(len(blocks), dtype=scale_format(x.dtype).integer, device=x.device)
    _launch(_maxima_kernel, blocks, _constants(_ANY, x.dtype), x, blocks, out, len(blocks))
    return out


def block_moments(x: Tensor, blocks: Tensor) -> Tensor:
    """See `protocol.Kernels.block_moments`."""
    out = torch.empty(len(blocks), 3, dtype=torch.float64, device=x.device)
    _launch(_moments_kernel, blocks, _constants(_ANY, x.dtype), x, blocks, out, len(blocks))
    return out


def rotate(x: Tensor, blocks: Tensor, key: Key, block_size: int, *, inverse: bool = False) -> None:
    """See `protocol.Kernels.rotate`."""
    c = _constants(_ANY._replace(block_size=block_size), x.dtype)
    r0, r1 = _signed(key)
    roots = _roots(x.dtype, x.device)
    _launch(_rotate_kernel, blocks, c, x, blocks, roots, len(blocks), r0, r1, INVERSE=inverse)


def combine(mine: Tensor, theirs: Tensor, blocks: Tensor, q: Quantiser, key: Key) -> None:
    """See `protocol.Kernels.combine`."""
    c = _constants(q, torch.float32)
    _launch(_combine_kernel, blocks, c, mine, theirs, blocks, len(blocks), 0, *_signed(key))


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
    c, count = _constants(q, x.dtype), len(blocks)
    if q.kind == Kind.TOP_K:
        _launch(_encode_largest_kernel, blocks, c, x, blocks, wire, count, 0)
        return
    given = wire if scales is None else scales
    numbers = (count, 0, *_signed(key), *_signed(rotation or key))
    roots = _roots(x.dtype, x.device)
    modes = {"GIVEN": scales is not None, "ROTATED": rotation is not None}
    _launch(_encode_kernel, blocks, c, x, blocks, wire, given, roots, *numbers, **modes)


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
    c, count, stride, shares = _constants(q, dtype), len(blocks), wires.shape[1], _shares(len(keys))
    if q.kind == Kind.TOP_K:
        _launch(_reduce_largest_kernel, blocks, c, wires, stride, blocks, out, len(keys), count, 0, **shares)
        return
    on_device, numbers = _keys(tuple(keys), wires.device), (len(keys), count, 0, *_signed(out_key))
    _launch(_reduce_kernel, blocks, c, wires, stride, blocks, out, on_device, *numbers, **shares)


def decode(
    wires: Tensor,
    blocks: Tensor,
    x: Tensor,
    q: Quantiser,
    keys: Sequence[Key],
    rotation: Key | None = None,
) -> Tensor:
    """See `protocol.Kernels.decode`; the number is a tensor on the device, int32 []."""
    c, count, stride, shares = _constants(q, x.dtype), len(blocks), wires.shape[1], _shares(len(keys))
    bad = torch.zeros((), dtype=torch.int32, device=x.device)
    if q.kind == Kind.TOP_K:
        _launch(_decode_largest_kernel, blocks, c, wires, stride, blocks, x, bad, len(keys), count, 0, **shares)
        return bad
    tables = _keys(tuple(keys), x.device), _roots(x.dtype, x.device)
    numbers = (len(keys), count, 0, *_signed(rotation or keys[0]))
    modes = {"ROTATED": rotation is not None, **shares}
    _launch(_decode_kernel, blocks, c, wires, stride, blocks, x, bad, *tables, *numbers, **modes)
    return bad


def decode_sum(wire: Tensor, scales: Tensor, blocks: Tensor, x: Tensor, q: Quantiser, keys: Sequence[Key]) -> Tensor:
    """See `protocol.Kernels.decode_sum`; the number is a tensor on the device, int32 []."""
    c, ranks = _constants(q, x.dtype), len(keys)
    middle = 2.0**q.headroom / ranks if q.kind == Kind.EXPONENTIAL else ranks * (q.levels - 1) / 2
    bad = torch.zeros((), dtype=torch.int32, device=x.device)
    on_device = _keys(tuple(keys), x.device)
    _launch(_decode_sum_kernel, blocks, c, wire, scales, blocks, x, bad, on_device, ranks, len(blocks), MIDDLE=middle)
    return bad


class _Any(NamedTuple):
    block_size: int = 256
    bits: int = 8
    summable: bool = False
    kind: Kind = Kind.LINEAR


_ANY = _Any()


def _launch(kernel: Any, blocks: Tensor, c: Constants, *arguments: Any, **modes: Any) -> None:
    """Run a kernel on a block table: a program for each tile."""
    if len(blocks):
        kernel[(-(-len(blocks) // c.rows),)](*arguments, c=c, **launch_options(c), **modes)


def launch_options(c: Constants) -> dict[str, int]:
    """How kernels are compiled for tiles of this shape."""
    warps = min(max(c.rows * c.half >> 9, 1), 32)  # 32 coordinates per thread
    # What tiles with the ends of parameters need beyond 128 registers would leave the others too few threads.
    return {"num_warps": warps, "maxnreg": min(128, 2048 // warps), "enable_fp_fusion": False}


def _signed(key: Key) -> tuple[int, int]:
    """The same bits as signed integers: Triton would widen others, and compile anew."""
    return key[0] - (key[0] >> 31 << 32), key[1] - (key[1] >> 31 << 32)


def _shares(sources: int) -> dict[str, float]:
    share = Share.of(sources)
    return {"EACH": share.each, "REST": share.rest}


def _keys(keys: tuple[Key, ...], device: torch.device) -> Tensor:
    """Keys on the device, int32 [sources, 2]; sent there once per step and stream, without waiting."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _sent_keys(keys, device, stream)


@lru_cache(maxsize=64)
def _sent_keys(keys: tuple[Key, ...], device: torch.device, stream: int) -> Tensor:
    table = torch.tensor([_signed(key) for key in keys], dtype=torch.int32)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@lru_cache(maxsize=64)
def _roots(dtype: torch.dtype, device: torch.device) -> Tensor:
    """2^(-k/2) for k up to 16, in the compute type."""
    roots = torch.from_numpy(2.0 ** (-0.5 * np.arange(17)))
    return roots.to(COMPUTE_DTYPES[dtype]).to(device)


@lru_cache(maxsize=256)
def _constants(q: Any, dtype: torch.dtype) -> Constants:
    form, compute = scale_format(dtype), COMPUTE_DTYPES[dtype]
    double = compute == torch.float64
    real = np.float64 if double else np.float32
    cut = form.mantissa - getattr(q, "mantissa", 0)
    offset = (form.infinity >> form.mantissa >> 1 << getattr(q, "mantissa", 0)) - getattr(q, "magnitudes", 0)
    smallest = np.array([offset + 1 << cut]).astype(np.int64 if double else np.int32).view(real)[0]
    smallest = smallest if q.kind == Kind.EXPONENTIAL else real(1)
    half = triton.next_power_of_2(-(-q.block_size // 2))
    words = q.summable and 8 % q.bits != 0
    return Constants(
        compute=tl.float64 if double else tl.float32,
        integer=tl.int64 if double else tl.int32,
        shift=form.shift,
        infinity=form.infinity,
        tiny=form.tiny,
        mask=2 ** (8 * compute.itemsize - 1) - 1,
        scale=tl.uint32 if double else tl.uint16,
        largest=torch.finfo(compute).max,
        up=1 + 2 * torch.finfo(compute).eps,
        rows=max(1, _TILE // (2 * half)),
        stages=half.bit_length() - 1,
        half=half,
        block=q.block_size,
        may_be_full=q.block_size == 2 * half and not words,
        exponential=q.kind == Kind.EXPONENTIAL,
        bits=q.bits,
        words=words,
        nearest=getattr(q, "nearest", False),
        always_stochastic=(getattr(q, "stochastic_from", 1.0) < 0),
        adaptive=0 <= getattr(q, "stochastic_from", 1.0) < 1,
        stochastic_from=float(real(getattr(q, "stochastic_from", 1.0))),
        levels=getattr(q, "levels", 1),
        odd_levels=getattr(q, "odd_levels", 1),
        magnitudes=getattr(q, "magnitudes", 0),
        cut=cut,
        offset=offset,
        smallest=float(smallest),
        per_smallest=float(real(1) / smallest),
        shrink=2.0 ** -getattr(q, "headroom", 0),
        kept=getattr(q, "kept", 0),
    )
