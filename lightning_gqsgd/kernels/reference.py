"""Readable kernels in plain PyTorch, on any device: the truth that the fast ones are tested against.

Every function views the coordinates of its blocks as a matrix [blocks, block_size], short blocks padded. All functions
exist with the same names and arguments in `cpu`, and give the same codes there.

Common arguments: ``x`` flat gradient tensor (fp32, fp16, bf16, fp64); ``blocks`` block table, int64 [B, 8] (see
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
    Kind,
    Quantiser,
    ScaleFormat,
    Share,
)
from lightning_gqsgd.layout import CODES, INDEX, LENGTH, PARAMETER, RAW, SCALE, START

_MASK = 0xFFFFFFFF
_LANES = 16


def block_maxima(x: Tensor, blocks: Tensor) -> Tensor:
    """Largest magnitude of each block, as the order-preserving bits of the compute dtype: int32 or int64 [B].

    NaN and infinity come out larger than any finite number, so that an integer MAX over ranks keeps them.
    """
    values = _gather(x, blocks, int(blocks[:, LENGTH].max()) if len(blocks) else 1)
    return _magnitudes(values).amax(dim=1) if len(blocks) else _magnitudes(values)[:, 0]


def block_moments(x: Tensor, blocks: Tensor) -> Tensor:
    """Sums of each block: Σ x, Σ |x|, Σ x², fp64 [B, 3]. Added up in 16 lanes, lane l from coordinates l, l + 16, ...,
    and then over lanes, so that all kernels give the same bits."""
    width = int(blocks[:, LENGTH].max()) if len(blocks) else 1
    values = _gather(x, blocks, -(-width // _LANES) * _LANES).double()
    terms = torch.stack([values, values.abs(), values.square()], dim=1).unflatten(2, (-1, _LANES))
    total = torch.zeros(len(blocks), 3, dtype=torch.float64, device=x.device)
    lanes = torch.zeros(len(blocks), 3, _LANES, dtype=torch.float64, device=x.device)
    for row in terms.unbind(2):
        lanes += row
    for lane in lanes.unbind(2):
        total += lane
    return total


def rotate(x: Tensor, blocks: Tensor, key: Key, block_size: int, *, inverse: bool = False) -> None:
    """Turn each block that is not raw, in place, by H D, or back by D H: D random signs, H orthonormal Hadamard.

    ``x`` is fp32 or fp64; no block is longer than ``block_size``. A block whose length is no power of two is turned in
    parts: the largest power of two first.
    """
    coded = blocks[blocks[:, RAW] == 0]
    _scatter(_turned(_gather(x, coded, block_size), coded, key, inverse=inverse), coded, x)


def encode(
    x: Tensor,
    blocks: Tensor,
    wire: Tensor,
    key: Key,
    q: Quantiser,
    maxima: Tensor | None = None,
    base: int = 0,
    rotation: Key | None = None,
) -> None:
    """Write every block's record: its scale (where the table has a place for it) and codes, or its raw coordinates.

    ``maxima``: scales to use, bits as from `block_maxima`, coordinates beyond are clipped; None takes each block's
    own, rounded up to the wire's format. ``base``: byte of the message at which ``wire`` starts. ``rotation``: key by
    which blocks are turned first, as by `rotate`; ``x`` stays as it is.
    """
    values = _gather(x, blocks, q.block_size)
    if rotation is not None:
        coded = blocks[:, RAW] == 0
        values[coded] = _turned(values[coded], blocks[coded], rotation)
    _encode(values, blocks, wire, key, q, maxima, base)


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


def decode(
    wires: Tensor,
    blocks: Tensor,
    x: Tensor,
    keys: Sequence[Key],
    q: Quantiser,
    base: int = 0,
    rotation: Key | None = None,
) -> int:
    """Write the mean of the decoded messages ``wires`` [sources, bytes] into ``x``; return the number of non-finite
    blocks. ``base``: byte of the whole message at which each starts. ``rotation``: key by which the mean is turned
    back."""
    mean = _mean(wires, blocks, base, keys, q, x.dtype)
    if rotation is not None:
        coded = blocks[:, RAW] == 0
        mean[coded] = _turned(mean[coded], blocks[coded], rotation, inverse=True)
    return _scatter(mean, blocks, x)


def decode_sum(wire: Tensor, maxima: Tensor, blocks: Tensor, x: Tensor, keys: Sequence[Key], q: Quantiser) -> int:
    """Write the mean that a message of summed codes stands for into ``x``; return the number of non-finite blocks."""
    ranks = len(keys)
    scales, finite = _from_bits(maxima, COMPUTE_DTYPES[x.dtype])
    codes = _unpack(wire, blocks, 0, q)
    if q.kind == Kind.EXPONENTIAL:
        mean = _exponential_values(codes, scales * (2.0**q.headroom / ranks), q)
        mean[~finite] = torch.nan
        return _scatter(mean, blocks, x)
    stochastic = torch.full(scales.shape, q.always_stochastic, device=x.device)
    middle = torch.full(scales.shape, ranks * (q.levels - 1) / 2, device=x.device)
    offset = middle[:, None].repeat(1, q.block_size)
    for key in keys if not q.always_stochastic else ():
        offset += _dither(blocks, key, q.block_size) - 0.5
    mean = _values(codes, offset, middle, scales, stochastic)
    mean[~finite] = torch.nan
    return _scatter(mean, blocks, x)


def combine(mine: Tensor, theirs: Tensor, blocks: Tensor, base: int, key: Key, q: Quantiser) -> None:
    """Replace exponential codes without mantissa by codes of the sums with others', without bias.

    With magnitudes 2^-a >= 2^-b, D = b - a: equal signs give 2^(1-a) with probability 2^-D, else 2^-a; opposite ones
    give 2^-(a+1) with probability 2^(1-D), else 2^-a, and zero for D = 0. What would pass the last magnitude stays
    there. A draw has 32 bits, so what is rarer than 2^-32 does not happen.

    Args:
        mine, theirs: uint8 [shard bytes], codes without scales; ``mine`` is changed.
        base: byte of the message at which they start.
    """
    mask, sign = (1 << (q.bits - 1)) - 1, 1 << (q.bits - 1)
    one, other = _unpack(mine, blocks, base, q), _unpack(theirs, blocks, base, q)
    swap = (other & mask) > (one & mask)
    large, small = torch.where(swap, other, one), torch.where(swap, one, other)
    a, b = large & mask, small & mask
    opposite = ((large ^ small) & sign) != 0
    distance = a - b - opposite.long()
    fires = _words(blocks, key, torch.arange(q.block_size, device=blocks.device)) < (1 << (32 - distance.clamp(0, 32)))
    moved = torch.where(opposite, a - fires.long(), (a + fires.long()).clamp(max=q.magnitudes))
    moved = torch.where(opposite & (distance < 0), 0, moved)
    result = torch.where(b == 0, a, moved)
    _pack(torch.where(result == 0, 0, (large & sign) | result), blocks, mine, base, q)


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
    if q.kind == Kind.TOP_K:
        _pack_largest(values, coded, wire, base, q)
        return
    form = SCALE_FORMATS[values.dtype]
    scale_bits = form.rounded_up(_magnitudes(values).amax(dim=1).long()) if maxima is None else maxima[~raw].long()
    scales, finite = _from_bits(scale_bits, values.dtype)
    stochastic = _rounds_stochastically(values, coded, q)
    to_codes = _exponential_codes if q.kind == Kind.EXPONENTIAL else _codes
    codes = to_codes(values, coded, scales, stochastic, key, q)
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
    uniform = _dither(blocks, key, q.block_size)
    if q.nearest:  # zeros are half-way between two levels: were they one of them, all ranks would err alike
        uniform = torch.where(values == 0, uniform, 0.5)
    return (y + (uniform.to(y.dtype) - (zero - middle)[:, None])).nan_to_num().floor().long() + zero[:, None]


def _exponential_codes(values: Tensor, blocks: Tensor, scales: Tensor, _: Tensor, key: Key, q: Quantiser) -> Tensor:
    """Sign and magnitude, int64 [B, block_size]."""
    cut, one = _cut(values.dtype, q.mantissa)
    uniform = _dither(blocks, key, q.block_size)
    y = (values.abs() * (1 / scales)[:, None]).clamp(max=1).nan_to_num() * 2.0**-q.headroom
    random = (uniform.double() * 2.0**cut).long()
    magnitude = ((_magnitudes(y).long() + random) >> cut) - (one - q.magnitudes)
    smallest = _floats(torch.full_like(y, (one - q.magnitudes + 1) << cut).long(), y.dtype)
    magnitude = torch.where(y < smallest, (y * (1 / smallest) > uniform.to(y.dtype)).long(), magnitude)
    return torch.where(magnitude > 0, magnitude | ((values < 0).long() << (q.bits - 1)), 0)


def _exponential_values(codes: Tensor, scales: Tensor, q: Quantiser) -> Tensor:
    """Coordinates that exponential codes stand for."""
    cut, one = _cut(scales.dtype, q.mantissa)
    magnitude, sign = codes & ((1 << (q.bits - 1)) - 1), codes >> (q.bits - 1)
    y = _floats((magnitude + (one - q.magnitudes)) << cut, scales.dtype)
    limit = torch.finfo(scales.dtype).max
    return torch.where(magnitude > 0, y * (1 - 2 * sign) * scales[:, None], 0).clamp(-limit, limit)


def _cut(dtype: torch.dtype, mantissa: int) -> tuple[int, int]:
    """How many bits of the mantissa exponential codes drop, and the bits of 1.0 without them."""
    form = SCALE_FORMATS[dtype]
    one = form.infinity >> form.mantissa >> 1  # its exponent, half of infinity's
    return form.mantissa - mantissa, one << mantissa


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
        if q.kind == Kind.TOP_K:
            mean[~raw] += _unpack_largest(wire, coded, base, compute, q) * share.each
            continue
        scale_codes = torch.zeros_like(coded[:, SCALE])
        for byte in range(form.nbytes):
            scale_codes |= wire[coded[:, SCALE] - base + byte].long() << 8 * byte
        scales, finite = _from_bits(_wire_bits(scale_codes, form), compute)
        codes = _unpack(wire, coded, base, q)
        if q.kind == Kind.EXPONENTIAL:
            values = _exponential_values(codes, scales * share.each, q)
        else:
            stochastic = (scale_codes & 1) == 1
            middle = (torch.where(stochastic, q.odd_levels, q.levels) - 1) / 2
            dither = torch.zeros(1) if q.nearest else _dither(coded, key, q.block_size) - 0.5
            offset = middle[:, None] + torch.where(stochastic[:, None], 0, dither)
            values = _values(codes, offset, middle, scales * share.each, stochastic)
        values[~finite] = torch.nan
        mean[~raw] += values
    mean = mean / torch.full_like(mean, share.rest)
    mean[~_positions(blocks, q.block_size)[1]] = 0
    return mean


def _magnitudes(values: Tensor) -> Tensor:
    """Magnitudes as integers, which are ordered like them, with NaN above infinity above everything finite."""
    return values.abs().view(SCALE_FORMATS[values.dtype].integer)


def _floats(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers with these bits."""
    return bits.to(SCALE_FORMATS[dtype].integer).view(dtype)


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
    return _floats(torch.where(finite, bits, 0), dtype), finite


def _ulp(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def _dither(blocks: Tensor, key: Key, width: int) -> Tensor:
    """v, uniform on (0, 1): fp32 [B, width]."""
    half = (blocks[:, LENGTH] + 1) // 2
    j = torch.arange(width, device=blocks.device)
    second = j >= half[:, None]
    h = _words(blocks, key, torch.where(second, j - half[:, None], j))
    k = torch.where(second, h >> 16, h & 0xFFFF)
    return k.float() * DITHER_UNIT + DITHER_FIRST


def _words(blocks: Tensor, key: Key, places: Tensor) -> Tensor:
    """Uniform 32-bit integers of places in blocks, [width] or [B, width]: int64 [B, width]."""
    parameter, index = blocks[:, PARAMETER], blocks[:, INDEX]
    a = _mix((_mix(key[0] ^ parameter) + GOLDEN * index) & _MASK)
    b = _mix(_mix((key[1] + parameter) & _MASK) ^ index)
    return _finish(_start((a[:, None] + places) & _MASK) ^ b[:, None])


def _turned(values: Tensor, blocks: Tensor, key: Key, *, inverse: bool = False) -> Tensor:
    """What `rotate` makes of the coordinates of blocks, [B, width]; the padding stays zero."""
    width = values.shape[1]
    signs = torch.where(_dither(blocks, key, width) < 0.5, -1, 1).to(values.dtype)
    values = values.clone() if inverse else values * signs
    start = torch.zeros_like(blocks[:, LENGTH])
    for power in (1 << k for k in reversed(range(width.bit_length()))):
        some = (blocks[:, LENGTH] & power) != 0
        places = (start[some, None] + torch.arange(power, device=values.device)[None], some.nonzero())
        part = values[places[1], places[0]]
        values[places[1], places[0]] = _hadamard(part) * torch.tensor(power**-0.5, dtype=values.dtype)
        start = start + some * power
    return values * signs if inverse else values


def _hadamard(values: Tensor) -> Tensor:
    """Products with the Hadamard matrix, [rows, power of two]; not normalised."""
    half = 1
    while half < values.shape[1]:
        first, second = values.unflatten(1, (-1, 2, half)).unbind(2)
        values = torch.stack([first + second, first - second], dim=2).flatten(1)
        half *= 2
    return values


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


def _pack_largest(values: Tensor, blocks: Tensor, wire: Tensor, base: int, q: Quantiser) -> None:
    """For each block, the coordinates with the largest magnitudes (the first of equal ones), then their places, both in
    the order of places."""
    inside = _positions(blocks, values.shape[1])[1]
    order = torch.where(inside, _magnitudes(values).long(), -1).argsort(dim=1, descending=True, stable=True)
    for k, count in enumerate(q.kept_of(blocks[:, LENGTH]).tolist()):
        places = order[k, :count].sort().values
        at = int(blocks[k, CODES]) - base
        kept = _bytes_of(values[k, places]).flatten()
        wire[at : at + len(kept)] = kept
        wire[at + len(kept) : at + len(kept) + 2 * count] = _bytes_of(places.to(torch.int16)).flatten()


def _unpack_largest(wire: Tensor, blocks: Tensor, base: int, dtype: torch.dtype, q: Quantiser) -> Tensor:
    """Kept coordinates at their places, zero elsewhere; NaN everywhere if one is not finite: [B, block_size]."""
    values = torch.zeros(len(blocks), q.block_size, dtype=dtype, device=wire.device)
    for k, count in enumerate(q.kept_of(blocks[:, LENGTH]).tolist()):
        at = int(blocks[k, CODES]) - base
        middle = at + count * dtype.itemsize
        places = wire[middle : middle + 2 * count].clone().view(torch.int16).long() & 0xFFFF
        kept = wire[at:middle].clone().view(dtype)
        values[k, places] = kept
        if not kept.isfinite().all():
            values[k] = torch.nan
    return values
