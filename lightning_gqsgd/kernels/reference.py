"""Readable kernels in plain PyTorch, on any device. The fast kernels are tested against them.

`protocol.Kernels` describes the functions and their arguments. Each function views the coordinates of its blocks as a
matrix [blocks, block_size], in which short blocks are padded with zeros. The quantisers in `codecs` encode and decode
such a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from lightning_gqsgd.kernels.dither import uniform, words
from lightning_gqsgd.kernels.layout import INDEX, LENGTH, PARAMETER, RAW, START, table_on
from lightning_gqsgd.kernels.narrowing import rounded
from lightning_gqsgd.kernels.packing import pack, pack_raw, positions, read_scales, unpack, unpack_raw, write_scales
from lightning_gqsgd.kernels.protocol import (
    Coding,
    Quantiser,
    ScaledQuantiser,
    SummableQuantiser,
    WholeQuantiser,
)
from lightning_gqsgd.kernels.rotation import rotated
from lightning_gqsgd.kernels.wire import (
    COMPUTE_DTYPES,
    NO_ORIGIN,
    SCALE_FORMATS,
    Key,
    Origin,
    Share,
    in_finite_range,
    magnitudes,
)

#: Number of lanes in which `block_moments` adds.
LANES = 16


def block_maxima(x: Tensor, blocks: Tensor) -> Tensor:
    """Find the largest magnitude of each block; see `protocol.Kernels.block_maxima`."""
    blocks = table_on(x.device, blocks)
    values = _gather(x, blocks, int(blocks[:, LENGTH].max()) if len(blocks) else 1)
    return magnitudes(values).amax(dim=1) if len(blocks) else magnitudes(values)[:, 0]


def block_moments(x: Tensor, blocks: Tensor) -> Tensor:
    """Sum |x| and x² of each block; see `protocol.Kernels.block_moments`."""
    blocks = table_on(x.device, blocks)
    width = int(blocks[:, LENGTH].max()) if len(blocks) else 1
    values = _gather(x, blocks, -(-width // LANES) * LANES).double()
    terms = torch.stack([values.abs(), values.square()], dim=1).unflatten(2, (-1, LANES))
    total = torch.zeros(len(blocks), 2, dtype=torch.float64, device=x.device)
    lanes = torch.zeros(len(blocks), 2, LANES, dtype=torch.float64, device=x.device)
    # The order of additions is fixed: the fast kernels have to give the same bits, and `sum` may use another order.
    for row in terms.unbind(2):
        lanes += row
    for lane in lanes.unbind(2):
        total += lane
    return total


def rotate(
    x: Tensor, blocks: Tensor, key: Key, block_size: int, *, inverse: bool = False, origin: Origin = NO_ORIGIN
) -> None:
    """Rotate blocks by the randomised Hadamard transform, or back; see `protocol.Kernels.rotate`."""
    blocks = _counted_from(origin, table_on(x.device, blocks))
    coded = blocks[blocks[:, RAW] == 0]
    _scatter(rotated(_gather(x, coded, block_size), coded, key, inverse=inverse), coded, x)


def encode(x: Tensor, how: Coding, wire: Tensor, key: Key, scales: Tensor | None = None) -> None:
    """Encode blocks into a message; see `protocol.Kernels.encode`."""
    blocks = _counted_from(how.origin, table_on(x.device, how.blocks))
    coded = blocks[:, RAW] == 0
    values = _gather(x, blocks, how.q.block_size)
    if how.rotation is not None:
        values[coded] = rotated(values[coded], blocks[coded], how.rotation)
    _write(values, blocks, wire, how.q, key, scales)


def reduce(wires: Tensor, how: Coding, x: Tensor, keys: Sequence[Key], own: int, out: Tensor, out_key: Key) -> None:
    """Average the messages of one shard, and encode the mean; see `protocol.Kernels.reduce`."""
    blocks = _counted_from(how.origin, table_on(x.device, how.blocks))
    coded = blocks[:, RAW] == 0
    total = _sum(wires, blocks, how.q, keys, COMPUTE_DTYPES[x.dtype], own)
    mine = _gather(x, blocks[coded], how.q.block_size)
    if how.rotation is not None:
        mine = rotated(mine, blocks[coded], how.rotation)
    total[coded] = _with_own(total[coded], mine, len(keys))
    _write(_divided(total, len(keys)), blocks, out, how.q, out_key, None)


def decode(wires: Tensor, how: Coding, x: Tensor, keys: Sequence[Key], own: int | None = None) -> int:
    """Decode messages, and write their mean into ``x``; see `protocol.Kernels.decode`."""
    blocks = _counted_from(how.origin, table_on(x.device, how.blocks))
    coded = blocks[:, RAW] == 0
    mean = _sum(wires, blocks, how.q, keys, COMPUTE_DTYPES[x.dtype], own)
    # If this rank's own coordinates are added, the sum is divided after that, below.
    if own is None:
        mean = _divided(mean, len(keys))
    if how.rotation is not None:
        mean[coded] = rotated(mean[coded], blocks[coded], how.rotation, inverse=True)
    if own is not None:
        mean[coded] = _with_own(mean[coded], _gather(x, blocks[coded], how.q.block_size), len(keys))
        mean = _divided(mean, len(keys))
    # Only coded blocks are clamped. Raw blocks may overflow, as in plain DDP.
    mean[coded] = in_finite_range(mean[coded], x.dtype)
    return _scatter(mean, blocks, x)


def decode_sum(wire: Tensor, how: Coding, x: Tensor, keys: Sequence[Key], scales: Tensor) -> int:
    """Decode the sum of all ranks' codes, and write the mean into ``x``; see `protocol.Kernels.decode_sum`."""
    blocks = _counted_from(how.origin, table_on(x.device, how.blocks))
    q = cast(SummableQuantiser, how.q)
    values, finite = SCALE_FORMATS[COMPUTE_DTYPES[x.dtype]].scales(scales)
    codes = unpack(wire, blocks, q.bits, q.block_size, summable=q.summable)
    mean = q.decode_sum(codes, values, [uniform(blocks, key, q.block_size) for key in keys])
    mean[~finite] = torch.nan
    return _scatter(in_finite_range(mean, x.dtype), blocks, x)


def narrow(x: Tensor, blocks: Tensor, out: Tensor, key: Key, block_size: int, factor: float, limit: int) -> None:
    """Round coordinates to bf16 at random; see `protocol.Kernels.narrow`."""
    blocks = table_on(x.device, blocks)
    values = _gather(x, blocks, block_size) * torch.tensor(factor, dtype=torch.float32, device=x.device)
    random = (uniform(blocks, key, block_size) * 2**16).long()
    _scatter(rounded(values, random, limit), blocks, out)


def combine(mine: Tensor, theirs: Tensor, how: Coding, key: Key) -> None:
    """Add the codes of two messages in pairs, without bias; see `protocol.Kernels.combine`."""
    blocks = _counted_from(how.origin, table_on(mine.device, how.blocks))
    q = cast(SummableQuantiser, how.q)
    codes, others = (unpack(wire, blocks, q.bits, q.block_size, summable=False) for wire in (mine, theirs))
    random = words(blocks, key, torch.arange(q.block_size, device=blocks.device))
    pack(q.combine(codes, others, random), blocks, mine, q.bits, summable=False)


def _counted_from(origin: Origin, blocks: Tensor) -> Tensor:
    """Returns a block table with an origin added to its numbers."""
    if origin == NO_ORIGIN:
        return blocks
    counted = blocks.clone()
    counted[:, PARAMETER] += origin.parameter
    counted[:, INDEX] += origin.block
    return counted


def _write(values: Tensor, blocks: Tensor, wire: Tensor, q: Quantiser, key: Key, scales: Tensor | None) -> None:
    """Write the records of all blocks. ``values`` are their coordinates, [B, block_size]."""
    raw = blocks[:, RAW] == 1
    pack_raw(values[raw], blocks[raw], wire)
    coded = blocks[~raw]
    values = values[~raw]
    if not len(coded):
        return
    if q.is_whole:
        cast(WholeQuantiser, q).write(values, coded, wire, key)
        return
    form = SCALE_FORMATS[values.dtype]
    bits = form.rounded_up(magnitudes(values).amax(dim=1).long()) if scales is None else scales[~raw].long()
    used, finite = form.scales(bits)
    random = uniform(coded, key, q.block_size)
    codes, flags = cast(ScaledQuantiser, q).encode(values, coded[:, LENGTH], used, random)
    # Such blocks decode to NaN or to zeros with any codes. Zeros make messages equal on all devices.
    codes[~finite | (used == 0)] = 0
    write_scales(form.sent(bits, flags), coded, wire, form)
    pack(codes, coded, wire, q.bits, summable=q.summable)


def _sum(
    wires: Tensor, blocks: Tensor, q: Quantiser, keys: Sequence[Key], compute: torch.dtype, own: int | None
) -> Tensor:
    """Returns the sum of the decoded messages times ``Share.each``, added in order and in the compute dtype: [B,
    block_size].

    Only the raw blocks of source ``own`` are taken from its message.
    """
    each = Share.of(len(keys)).each
    raw = blocks[:, RAW] == 1
    coded = blocks[~raw]
    total = torch.zeros(len(blocks), q.block_size, dtype=compute, device=wires.device)
    for source, (wire, key) in enumerate(zip(wires, keys, strict=True)):
        # Raw blocks include those of this rank's own message, so that every rank adds in the same order.
        total[raw] += unpack_raw(wire, blocks[raw], compute, q.block_size) * each
        if source == own or not len(coded):
            continue
        if q.is_whole:
            total[~raw] += cast(WholeQuantiser, q).read(wire, coded, compute, key, each)
        else:
            total[~raw] += _read_scaled(wire, coded, cast(ScaledQuantiser, q), key, compute, each)
    # Decoding leaves dither beyond the end of a short block.
    total[~positions(blocks, q.block_size)[1]] = 0
    return total


def _with_own(total: Tensor, mine: Tensor, sources: int) -> Tensor:
    """Returns the sum of `_sum` for coded blocks plus one more source's coordinates; NaN if a block is not finite."""
    finite = mine.isfinite().all(dim=1, keepdim=True)
    return torch.where(finite, total + mine * Share.of(sources).each, torch.nan)


def _divided(total: Tensor, sources: int) -> Tensor:
    """Returns the mean from a sum of `_sum` over ``sources`` sources."""
    return total / torch.full_like(total, Share.of(sources).rest)


def _read_scaled(
    wire: Tensor, blocks: Tensor, q: ScaledQuantiser, key: Key, compute: torch.dtype, factor: float
) -> Tensor:
    """Returns the coordinates of one message's coded blocks times a factor; NaN if the scale of a block is not
    finite."""
    form = SCALE_FORMATS[compute]
    bits, flags = form.received(read_scales(wire, blocks, form))
    scales, finite = form.scales(bits)
    codes = unpack(wire, blocks, q.bits, q.block_size, summable=q.summable)
    values = q.decode(codes, scales * factor, flags, uniform(blocks, key, q.block_size))
    limit = torch.finfo(compute).max * factor  # the sum of all messages stays finite
    values = values.clamp(-limit, limit)
    values[~finite] = torch.nan
    return values


def _gather(x: Tensor, blocks: Tensor, width: int) -> Tensor:
    """Returns the coordinates of the blocks in the compute dtype, padded with zeros: [B, width]."""
    j, inside = positions(blocks, width)
    values = torch.zeros(inside.shape, dtype=COMPUTE_DTYPES[x.dtype], device=x.device)
    values[inside] = x[(blocks[:, START, None] + j)[inside]].to(values.dtype)
    return values


def _scatter(values: Tensor, blocks: Tensor, x: Tensor) -> int:
    """Write the coordinates of blocks into ``x``, rounded to its dtype. Returns the number of blocks that are then not
    finite."""
    j, inside = positions(blocks, values.shape[1])
    rounded = values.to(x.dtype)
    x[(blocks[:, START, None] + j)[inside]] = rounded[inside]
    return int((~rounded.isfinite() & inside).any(dim=1).sum())
