"""Readable kernels in plain PyTorch, on any device: the truth that the fast ones are tested against.

Every function views the coordinates of its blocks as a matrix [blocks, block_size], short blocks padded. All functions
exist with the same names and arguments in `cpu`, and give the same codes there.

Common arguments: ``x`` flat gradient tensor (fp32, fp16, bf16, fp64); ``blocks`` block table, int64 [B, 7] (see
`layout`); ``wire`` uint8 message(s); ``key`` the two dither keys of a stream; ``q`` the quantiser.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gqsgd.kernels.wire import (
    COMPUTE_DTYPES,
    DITHER_FIRST,
    DITHER_UNIT,
    GOLDEN,
    MULTIPLY_1,
    MULTIPLY_2,
    SCALE_FORMATS,
    Key,
    Quantiser,
    ScaleFormat,
    Share,
)
from lightning_gqsgd.layout import CODES, INDEX, LENGTH, PARAMETER, RAW, SCALE, START

_MASK = 0xFFFFFFFF
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def block_maxima(x: Tensor, blocks: Tensor) -> Tensor:
    """Largest magnitude of each block, as the order-preserving bits of the compute dtype: int32 or int64 [B].

    NaN and infinity come out larger than any finite number, so that an integer MAX over ranks keeps them.
    """
    values = _gather(x, blocks, int(blocks[:, LENGTH].max()) if len(blocks) else 1)
    return _magnitudes(values).amax(dim=1) if len(blocks) else _magnitudes(values)[:, 0]


def encode(x: Tensor, blocks: Tensor, wire: Tensor, key: Key, q: Quantiser, maxima: Tensor | None = None) -> None:
    """Write every block's record: its scale (where the table has a place for it) and codes, or its raw coordinates.

    ``maxima``: scales to use, bits as from `block_maxima`; None takes each block's own, rounded up to the wire's
    format.
    """
    _encode(_gather(x, blocks, q.block_size), blocks, wire, key, q, maxima, base=0)


def reduce(
    wires: Tensor,
    blocks: Tensor,
    base: int,
    out: Tensor,
    keys: Sequence[Key],
    out_key: Key,
    q: Quantiser,
    dtype: torch.dtype,
) -> None:
    """Decode one shard's messages of all ranks, average them in rank order, and encode the mean.

    Args:
        wires: uint8 [ranks, shard bytes].
        base: byte position of the shard in the whole message, which the table's positions count from.
        out: uint8 [shard bytes].
        keys: dither keys of the ranks; ``out_key`` that of the mean.
        dtype: dtype of raw coordinates.
    """
    mean = _mean(wires, blocks, base, keys, q, dtype)
    _encode(mean, blocks, out, out_key, q, None, base)


def decode(wires: Tensor, blocks: Tensor, x: Tensor, keys: Sequence[Key], q: Quantiser) -> int:
    """Write the mean of the decoded messages ``wires`` [sources, bytes] into ``x``; return the number of non-finite
    blocks."""
    return _scatter(_mean(wires, blocks, 0, keys, q, x.dtype), blocks, x)


def decode_sum(wire: Tensor, maxima: Tensor, blocks: Tensor, x: Tensor, keys: Sequence[Key], q: Quantiser) -> int:
    """Write the mean that a message of summed codes stands for into ``x``; return the number of non-finite blocks."""
    ranks = len(keys)
    scales, finite = _from_bits(maxima, COMPUTE_DTYPES[x.dtype])
    codes = _unpack(wire, blocks, 0, q)
    stochastic = torch.full(scales.shape, q.always_stochastic, device=x.device)
    middle = torch.full(scales.shape, ranks * (q.levels - 1) / 2, device=x.device)
    offset = middle[:, None].repeat(1, q.block_size)
    for key in keys if not q.always_stochastic else ():
        offset += _dither(blocks, key, q.block_size) - 0.5
    mean = _values(codes, offset, middle, scales, stochastic)
    mean[~finite] = torch.nan
    return _scatter(mean, blocks, x)


# ---------------------------------------------------------------------------------------------------------------------


def _encode(
    values: Tensor,
    blocks: Tensor,
    wire: Tensor,
    key: Key,
    q: Quantiser,
    maxima: Tensor | None,
    base: int,
) -> None:
    raw = blocks[:, RAW] == 1
    _pack_raw(values[raw], blocks[raw], wire, base)
    coded, values = blocks[~raw], values[~raw]
    if not len(coded):
        return
    form = SCALE_FORMATS[values.dtype]
    scale_bits = _rounded_up(_magnitudes(values).amax(dim=1).long(), form) if maxima is None else maxima[~raw].long()
    scales, finite = _from_bits(scale_bits, values.dtype)
    stochastic = _rounds_stochastically(values, coded, q)
    codes = _codes(values, coded, scales, stochastic, key, q)
    codes[~finite | (scales == 0)] = 0
    sent = coded[:, SCALE] >= 0
    scale_codes = torch.where(finite, (((scale_bits + 1) >> form.shift) << 1) | stochastic, -1)[sent]
    for byte in range(form.nbytes):
        wire[coded[sent, SCALE] - base + byte] = (scale_codes >> 8 * byte & 0xFF).to(torch.uint8)
    _pack(codes, coded, wire, base, q)


def _rounds_stochastically(values: Tensor, blocks: Tensor, q: Quantiser) -> Tensor:
    """Which blocks have so many zeros: bool [B]."""
    zeros = ((values == 0) & _positions(blocks, values.shape[1])[1]).sum(dim=1)
    share = torch.tensor(q.stochastic_from, dtype=values.dtype, device=values.device)
    return zeros > share.double() * blocks[:, LENGTH]


def _codes(values: Tensor, blocks: Tensor, scales: Tensor, stochastic: Tensor, key: Key, q: Quantiser) -> Tensor:
    """Codes 0 to K-1, int64 [B, block_size]."""
    levels = torch.where(stochastic, q.odd_levels, q.levels)
    middle, zero = ((levels - 1) / 2).to(scales.dtype), levels // 2
    inverse = middle / scales
    inverse = torch.where(scales * inverse < middle, inverse * (1 + 2 * _ulp(scales.dtype)), inverse)
    y = (values * inverse[:, None]).clamp(-middle[:, None], middle[:, None])
    dither = _dither(blocks, key, q.block_size).to(y.dtype) - (zero - middle)[:, None]
    return (y + dither).nan_to_num().floor().long() + zero[:, None]


def _values(codes: Tensor, offset: Tensor, middle: Tensor, scales: Tensor, stochastic: Tensor) -> Tensor:
    """Coordinates that (sums of) codes stand for; ``middle``: the code for zero; ``offset``: the same, dithered."""
    middle = middle.to(scales.dtype)
    step = scales / middle
    step = torch.where(stochastic & (step * middle < scales), step * (1 + 2 * _ulp(scales.dtype)), step)
    limit = torch.where(stochastic, scales, torch.finfo(scales.dtype).max)[:, None]
    return ((codes.float() - offset).to(scales.dtype) * step[:, None]).clamp(-limit, limit)


def _mean(wires: Tensor, blocks: Tensor, base: int, keys: Sequence[Key], q: Quantiser, dtype: torch.dtype) -> Tensor:
    """Mean of the decoded messages, added up in order, in the compute dtype: [B, block_size]."""
    compute = COMPUTE_DTYPES[dtype]
    form = SCALE_FORMATS[compute]
    share = Share.of(len(keys))
    raw = blocks[:, RAW] == 1
    coded = blocks[~raw]
    mean = torch.zeros(len(blocks), q.block_size, dtype=compute, device=wires.device)
    for wire, key in zip(wires, keys, strict=True):
        mean[raw] += _unpack_raw(wire, blocks[raw], base, compute, q.block_size) * share.each
        if not len(coded):
            continue
        scale_codes = torch.zeros_like(coded[:, SCALE])
        for byte in range(form.nbytes):
            scale_codes |= wire[coded[:, SCALE] - base + byte].long() << 8 * byte
        scales, finite = _from_bits(_wire_bits(scale_codes, form), compute)
        stochastic = (scale_codes & 1) == 1
        middle = (torch.where(stochastic, q.odd_levels, q.levels) - 1) / 2
        dither = _dither(coded, key, q.block_size) - 0.5
        offset = middle[:, None] + torch.where(stochastic[:, None], 0, dither)
        values = _values(_unpack(wire, coded, base, q), offset, middle, scales * share.each, stochastic)
        values[~finite] = torch.nan
        mean[~raw] += values
    mean = mean / torch.full_like(mean, share.rest)
    mean[~_positions(blocks, q.block_size)[1]] = 0
    return mean


def _magnitudes(values: Tensor) -> Tensor:
    """Magnitudes as integers, which are ordered like them, with NaN above infinity above everything finite."""
    return values.abs().view(_INTEGERS[values.dtype])


def _rounded_up(bits: Tensor, form: ScaleFormat) -> Tensor:
    """Bits of the scales for largest magnitudes with these bits; of infinity, where they are not finite."""
    up = torch.where(bits > 0, (bits.clamp(min=form.tiny) + (1 << form.shift) - 1) >> form.shift << form.shift, 0)
    up = torch.where(up == form.infinity, form.infinity - 1, up)  # rounded up to it: the largest finite number
    return torch.where(bits >= form.infinity, form.infinity, up)


def _wire_bits(scale_codes: Tensor, form: ScaleFormat) -> Tensor:
    """Bits of the scales that codes on the wire stand for."""
    bits = (scale_codes >> 1) << form.shift
    bits = torch.where(bits == form.infinity, form.infinity - 1, bits)
    return bits.clamp(max=form.infinity)


def _from_bits(bits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales, and whether each is finite (a non-finite one is returned as 0)."""
    form = SCALE_FORMATS[dtype]
    bits = bits.long()
    finite = bits < form.infinity
    bits = torch.where((bits > 0) & (bits < form.tiny), form.tiny, bits)
    return torch.where(finite, bits, 0).to(_INTEGERS[dtype]).view(dtype), finite


def _ulp(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def _dither(blocks: Tensor, key: Key, width: int) -> Tensor:
    """v, uniform on (0, 1): fp32 [B, width]."""
    parameter, index = blocks[:, PARAMETER], blocks[:, INDEX]
    a = _mix((_mix(key[0] ^ parameter) + GOLDEN * index) & _MASK)
    b = _mix(_mix((key[1] + parameter) & _MASK) ^ index)
    half = (blocks[:, LENGTH] + 1) // 2
    j = torch.arange(width, device=blocks.device)
    second = j >= half[:, None]
    h = _finish(_start((a[:, None] + torch.where(second, j - half[:, None], j)) & _MASK) ^ b[:, None])
    k = torch.where(second, h >> 16, h & 0xFFFF)
    return k.float() * DITHER_UNIT + DITHER_FIRST


def _start(h: Tensor) -> Tensor:
    return ((h ^ (h >> 16)) * MULTIPLY_1) & _MASK


def _finish(h: Tensor) -> Tensor:
    h = ((h ^ (h >> 15)) * MULTIPLY_2) & _MASK
    return h ^ (h >> 16)


def _mix(h: Tensor) -> Tensor:
    return _finish(_start(h))


def _positions(blocks: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Number of each coordinate in its block, [1, width], and whether the block is that long, [B, width]."""
    j = torch.arange(width, device=blocks.device)[None]
    return j, j < blocks[:, LENGTH, None]


def _gather(x: Tensor, blocks: Tensor, width: int) -> Tensor:
    """Coordinates of the blocks in the compute dtype, padded with zeros: [B, width]."""
    j, inside = _positions(blocks, width)
    values = torch.zeros(inside.shape, dtype=COMPUTE_DTYPES[x.dtype], device=x.device)
    values[inside] = x[(blocks[:, START, None] + j)[inside]].to(values.dtype)
    return values


def _scatter(values: Tensor, blocks: Tensor, x: Tensor) -> int:
    j, inside = _positions(blocks, values.shape[1])
    x[(blocks[:, START, None] + j)[inside]] = values[inside].to(x.dtype)
    bad = ~values.isfinite() & inside
    return int(bad.any(dim=1).sum())


def _bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).reshape(*x.shape, x.element_size())


def _raw_places(blocks: Tensor, base: int, width: int, itemsize: int) -> tuple[Tensor, Tensor]:
    j, inside = _positions(blocks, width)
    first = (blocks[:, CODES, None] - base + j * itemsize)[inside]
    return first[:, None] + torch.arange(itemsize, device=blocks.device), inside


def _pack_raw(values: Tensor, blocks: Tensor, wire: Tensor, base: int) -> None:
    places, inside = _raw_places(blocks, base, values.shape[1], values.element_size())
    wire[places] = _bytes_of(values[inside])


def _unpack_raw(wire: Tensor, blocks: Tensor, base: int, dtype: torch.dtype, width: int) -> Tensor:
    places, inside = _raw_places(blocks, base, width, dtype.itemsize)
    values = torch.zeros(inside.shape, dtype=dtype, device=wire.device)
    values[inside] = wire[places].contiguous().view(dtype).flatten()
    return values


class _Run(NamedTuple):
    """Words with ``width`` bits of every code, from bit ``low`` on: lane l of word w has coordinate w + l * words."""

    low: int
    width: int
    nbytes: int  # of a word
    first: Tensor  # byte position after the start of the codes, [B]
    words: Tensor  # number of words, [B]


def _runs(blocks: Tensor, q: Quantiser) -> list[_Run]:
    length, zero = blocks[:, LENGTH], torch.zeros_like(blocks[:, LENGTH])
    if q.summable and 8 % q.bits:
        return [_Run(0, q.bits, 8, zero, -(-length // (64 // q.bits)))]
    runs: list[_Run] = []
    first, low = zero, 0
    for plane in (8, 4, 2, 1):
        if q.bits & plane:
            runs.append(_Run(low, plane, 1, first, -(-length * plane // 8)))
            first, low = first + runs[-1].words, low + plane
    return runs


def _pack(codes: Tensor, blocks: Tensor, wire: Tensor, base: int, q: Quantiser) -> None:
    """Lay out codes, int64 [B, width]."""
    j, inside = _positions(blocks, codes.shape[1])
    for run in _runs(blocks, q):
        word, lane = j % run.words[:, None], j // run.words[:, None]
        part = torch.where(inside, ((codes >> run.low) & ((1 << run.width) - 1)) << (run.width * lane), 0)
        packed = torch.zeros_like(codes).scatter_add_(1, word, part)
        filled = j < run.words[:, None]
        for byte in range(run.nbytes):
            places = (blocks[:, CODES, None] - base + run.first[:, None] + j * run.nbytes + byte)[filled]
            wire[places] = (packed[filled] >> 8 * byte & 0xFF).to(torch.uint8)


def _unpack(wire: Tensor, blocks: Tensor, base: int, q: Quantiser) -> Tensor:
    """Codes, int64 [B, block_size]; 0 beyond the end of a block."""
    j, inside = _positions(blocks, q.block_size)
    codes = torch.zeros(inside.shape, dtype=torch.int64, device=wire.device)
    for run in _runs(blocks, q):
        word, lane = j % run.words[:, None], j // run.words[:, None]
        start = blocks[:, CODES, None] - base + run.first[:, None] + word * run.nbytes
        value = sum(wire[start + byte].long() << 8 * byte for byte in range(run.nbytes))
        codes |= torch.where(inside, ((value >> (run.width * lane)) & ((1 << run.width) - 1)) << run.low, 0)
    return codes
