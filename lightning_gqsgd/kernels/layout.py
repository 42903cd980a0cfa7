"""Cuts the parameters of a bucket into blocks, and assigns blocks to positions in messages.

A *block* is a run of at most ``block_size`` coordinates of one parameter. Its dither depends on the number of the
parameter and on the number of the block in the parameter, so that results do not depend on how parameters are grouped
into buckets. A *piece* is a run of blocks that are sent as one message. Buckets are cut into pieces so that encoding,
sending and decoding overlap, and so that scratch memory stays bounded. Each piece is divided into *shards*, one for
every rank that owns a part of the sum.

A shard's message has the scales of blocks, then codes, then uncompressed coordinates. Each record is aligned to 16
bytes.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.kernels import kernels_for
from lightning_gqsgd.kernels.wire import NO_ORIGIN, Origin

if TYPE_CHECKING:
    from lightning_gqsgd.kernels.protocol import Quantiser

# Columns of a block table (int64).
START = 0  # number of the first coordinate in the flat tensor
LENGTH = 1  # number of coordinates
PARAMETER = 2  # number of the parameter
INDEX = 3  # number of the block in its parameter
SCALE = 4  # byte position of the scale in the messages; -1: no scale is sent
CODES = 5  # byte position of the codes (or of the raw coordinates)
RAW = 6  # 1: the block is sent uncompressed
BLOCKS = 7  # number of blocks of the parameter
COLUMNS = 8

ALIGNMENT = 16
#: Number of coordinates of a piece with 8 bits per coordinate or more. While the first or the last piece of a bucket is
#: sent, nothing else is: Gloo does not send and receive one message at the same time. This favours small pieces. Every
#: collective costs about 0.5 ms of processor time, which favours large pieces.
PIECE_NUMEL = 1 << 19
#: The largest factor by which pieces with fewer bits are larger. Scratch memory grows with the pieces.
_MOST_GROWTH = 4
#: Pieces are larger than `PIECE_NUMEL` only if a bucket has at least about this number of them.
_SEVERAL = 6
#: The largest number of consecutive blocks of a parameter with the same owner, if owners are fixed (`place_by_owner`).
MAX_STRIPE = 8


class PieceSize(NamedTuple):
    """The approximate number of coordinates of a piece.

    Attributes:
        least: the size of a piece in a flat tensor that has enough coordinates for one.
        most: the size in a large tensor, which has enough pieces to send some while others are encoded.
    """

    least: int = PIECE_NUMEL
    most: int = PIECE_NUMEL

    @classmethod
    def of_bits(cls, bits: int) -> PieceSize:
        """Returns the size over Gloo for codes of ``bits`` bits. With fewer bits, a message of the same bytes has more
        coordinates."""
        return cls(PIECE_NUMEL, PIECE_NUMEL * max(1, min(_MOST_GROWTH, 8 // bits)))

    def times(self, factor: int) -> PieceSize:
        """Returns the size multiplied by ``factor``."""
        return PieceSize(factor * self.least, factor * self.most)

    def within(self, numel: int) -> int:
        """Returns the approximate largest number of coordinates of a piece, in a flat tensor of ``numel``
        coordinates."""
        return min(self.most, max(self.least, -(-numel // _SEVERAL)))


#: The size if nothing is known about the messages.
USUAL_SIZE = PieceSize()


class Segment(NamedTuple):
    """A parameter's place in a flat tensor.

    Attributes:
        parameter: number of the parameter in the model, the same on all ranks.
        numel: number of coordinates; segments follow each other without gaps.
        raw: True if the parameter is sent uncompressed.
        choice: number of the parameter's configuration, among the configurations of the tensor.
    """

    parameter: int
    numel: int
    raw: bool
    choice: int = 0


class Run(NamedTuple):
    """Compressed coordinates of one parameter: stretches of equal length, at equal distances.

    Owners have stripes, see `place_by_owner`. One run has all stripes of an owner, so that one operation copies them.

    Attributes:
        start: number of the first coordinate in the flat tensor.
        parameter: number of the parameter.
        offset: number of the first coordinate in the parameter.
        numel: number of consecutive coordinates of a stretch.
        stretches: number of stretches.
        stride: number of coordinates from the start of a stretch to the start of the next; 0 if there is only one.
    """

    start: int
    parameter: int
    offset: int
    numel: int
    stretches: int = 1
    stride: int = 0

    def with_next(self, stretch: Run) -> Run | None:
        """Returns the run that also has a stretch behind its last one; None if the stretch has another length, distance
        or parameter."""
        stride = self.stride or stretch.start - self.start
        distance = self.stretches * stride
        next_of_run = Run(self.start + distance, self.parameter, self.offset + distance, self.numel)
        return self._replace(stretches=self.stretches + 1, stride=stride) if stretch == next_of_run else None


@dataclass(frozen=True, eq=False)
class Part:
    """A subset of the blocks of a layout, and the runs that they form.

    Attributes:
        blocks: block table, int64 [number of blocks, COLUMNS], on the host.
        block_size: the largest number of coordinates in a block.
        device: the device of the tensors to which kernels apply the table.
        origin: what kernels add to the numbers in the table.
    """

    blocks: Tensor
    block_size: int
    device: torch.device = torch.device("cpu")
    origin: Origin = NO_ORIGIN

    def at(self, origin: Origin) -> Part:
        """Returns the same blocks, whose numbers count from an origin. The table is shared."""
        return self if origin == self.origin else replace(self, origin=origin)

    @cached_property
    def kernels(self) -> ModuleType:
        """The kernels for tensors on ``device``; see `kernels_for`."""
        return kernels_for(self.device)

    def __getstate__(self) -> dict[str, Any]:
        # Modules cannot be copied or pickled. A copy looks up its kernels again.
        return {name: value for name, value in vars(self).items() if name != "kernels"}

    @cached_property
    def runs(self) -> list[Run]:
        """The runs of blocks that are not raw. Only a memory needs them."""
        return runs(self.blocks.numpy(), self.block_size)


@dataclass(frozen=True, eq=False)
class Layout:
    """The positions of the blocks of one piece, in the flat tensor and in the messages.

    Attributes:
        table: int64 [number of blocks, COLUMNS], on the host, in the order of coordinates. This order is fast because
            processors prefetch memory that is read in sequence. In the order of owners, encoding would take up to twice
            as long if coordinates are not in a cache.
        order: numbers of the blocks of each shard, one shard after the other, int64 [number of blocks].
        first: for each shard, the place in ``order`` where its blocks begin; then the length of ``order``.
        shard_bytes: length of one shard's message in bytes.
        block_size: the largest number of coordinates in a block.
        device: the device of the tensors that parts are for.
    """

    table: np.ndarray
    order: np.ndarray
    first: tuple[int, ...]
    shard_bytes: int
    block_size: int
    device: torch.device = torch.device("cpu")
    _copies: dict[torch.device, Layout] = field(default_factory=dict, init=False, repr=False)
    _parts: dict[tuple[int, ...], Part] = field(default_factory=dict, init=False, repr=False)

    def on(self, device: torch.device) -> Layout:
        """Returns the layout for tensors on a device. Reducers call this in every step."""
        if device == self.device:
            return self
        if device not in self._copies:
            self._copies[device] = replace(self, device=device)
        return self._copies[device]

    @property
    def blocks(self) -> Tensor:
        """The block table of `whole`."""
        return self.whole.blocks

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.first) - 1

    @cached_property
    def message_bytes(self) -> int:
        """Number of bytes of all shards' messages together."""
        return self.shards * self.shard_bytes

    @cached_property
    def whole(self) -> Part:
        """All blocks, with their positions in the message of all shards."""
        return self._part((), lambda: self.table)

    def others(self, index: int) -> Part:
        """Returns the coded blocks of other shards than ``index``, and all uncompressed blocks, with their positions in
        the message of all shards.

        The owner of shard ``index`` encodes these blocks, and the owners of the other shards decode the coded ones. It
        already has the coordinates of its own shard, so it reads only uncompressed blocks from its own message.
        """

        def table() -> np.ndarray:
            encoded = np.ones(len(self.table), dtype=bool)
            # A rank has its own coordinates exactly, so the coded blocks of its own shard need no message. Raw blocks
            # are always taken from messages, and are added in rank order.
            encoded[self.order[self.first[index] : self.first[index + 1]]] = False
            return self.table[encoded | (self.table[:, RAW] == 1)]

        return self._part((index,), table)

    def shard(self, index: int) -> Part:
        """Returns the blocks of one shard, with their positions in that shard's own message."""
        return self.shards_from(index, index + 1)

    def shards_from(self, low: int, high: int) -> Part:
        """Returns the blocks of the shards ``low`` to ``high - 1``, with their positions in the message of these
        shards."""

        def table() -> np.ndarray:
            table = self.table[self.order[self.first[low] : self.first[high]]]
            table[:, CODES] -= low * self.shard_bytes
            table[:, SCALE] -= np.where(table[:, SCALE] >= 0, low * self.shard_bytes, 0)
            return table

        return self._part((low, high), table)

    def _part(self, key: tuple[int, ...], make: Callable[[], np.ndarray]) -> Part:
        """Returns the part with a key. Its table is built once."""
        if key not in self._parts:
            self._parts[key] = Part(torch.from_numpy(make()), self.block_size, self.device)
        return self._parts[key]


#: Copies of block tables on devices, by the identity of the table on the host. They are deleted with that table.
_copies: dict[tuple[int, torch.device], Tensor] = {}


def table_on(device: torch.device, blocks: Tensor) -> Tensor:
    """Returns a block table on a device, for PyTorch's operations on the current stream. It is copied there once.

    Fast kernels have smaller tables of their own, so most configurations need no copy.
    """
    if blocks.device == device:
        return blocks
    key = id(blocks), device
    if key not in _copies:
        _copies[key] = blocks.to(device)  # the host waits, so that every stream can use the copy
        weakref.finalize(blocks, _copies.pop, key).atexit = False
    copy = _copies[key]
    if copy.is_cuda:
        # Otherwise, PyTorch could reuse the memory of a deleted copy while this stream still reads it.
        copy.record_stream(torch.cuda.current_stream(device))
    return copy


class BlockRun(NamedTuple):
    """Consecutive blocks of one parameter. A block table has a row for each block.

    Predictions for large models use runs, because their block tables would have millions of rows.

    Attributes:
        parameter: number of the parameter.
        first: number of the first block in its parameter.
        blocks: number of blocks.
        numel: number of coordinates. All blocks except the last block of the parameter are full.
        raw: True if the parameter is sent uncompressed.
        of: number of blocks of the whole parameter.
    """

    parameter: int
    first: int
    blocks: int
    numel: int
    raw: bool
    of: int

    def cut(self, count: int, block_size: int) -> tuple[BlockRun, BlockRun]:
        """Returns the run of the first ``count`` blocks, and the run of the other blocks."""
        numel = min(self.numel, count * block_size)
        rest = self._replace(first=self.first + count, blocks=self.blocks - count, numel=self.numel - numel)
        return self._replace(blocks=count, numel=numel), rest


def whole(segments: Iterable[Segment], block_size: int) -> list[BlockRun]:
    """Returns all blocks of consecutive segments: one run for each segment that is not empty."""
    made = []
    for segment in segments:
        blocks = -(-segment.numel // block_size)
        if blocks:
            made.append(BlockRun(segment.parameter, 0, blocks, segment.numel, segment.raw, blocks))
    return made


def table_of(block_runs: Sequence[BlockRun], block_size: int) -> np.ndarray:
    """Returns the block table of runs. Coordinates are counted from the first coordinate of the first run.

    Positions in messages are not set yet.
    """
    rows = np.array(block_runs, dtype=np.int64).reshape(-1, len(BlockRun._fields))
    parameter, first, counts, numel, raw, of = rows.T
    before = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.zeros((len(before), COLUMNS), dtype=np.int64)
    table[:, LENGTH] = np.minimum(block_size, np.repeat(numel, counts) - before * block_size)
    table[:, START] = np.cumsum(table[:, LENGTH]) - table[:, LENGTH]
    table[:, INDEX] = np.repeat(first, counts) + before
    for column, values in ((PARAMETER, parameter), (RAW, raw), (BLOCKS, of)):
        table[:, column] = np.repeat(values, counts)
    return table


def cut(segments: Iterable[Segment], block_size: int) -> np.ndarray:
    """Returns the block table of consecutive segments. Positions in messages are not set yet."""
    return table_of(whole(segments, block_size), block_size)


def block_runs_of(table: np.ndarray) -> list[BlockRun]:
    """Returns the runs of a block table: the inverse of `table_of`."""
    parameter = table[:, PARAMETER]
    index = table[:, INDEX]
    goes_on = (parameter[1:] == parameter[:-1]) & (index[1:] == index[:-1] + 1)
    first = np.flatnonzero(np.append(True, ~goes_on)[: len(table)])
    counts = np.diff(np.append(first, len(table)))
    numel = np.add.reduceat(table[:, LENGTH], first) if len(first) else first
    rows = np.stack([parameter[first], index[first], counts, numel, table[first, RAW], table[first, BLOCKS]], axis=1)
    return [BlockRun(*row) for row in rows.tolist()]


def runs(table: np.ndarray, block_size: int) -> list[Run]:
    """Returns the runs of blocks that are not raw. Stretches are as long as possible. The blocks can be in any
    order."""
    table = table[table[:, RAW] == 0]
    table = table[np.argsort(table[:, START], kind="stable")]
    start = table[:, START]
    parameter = table[:, PARAMETER]
    numel = table[:, LENGTH]
    offset = table[:, INDEX] * block_size
    # A run has to be contiguous in the flat tensor and in the parameter.
    goes_on = parameter[1:] == parameter[:-1]
    for at in (start, offset):
        goes_on = goes_on & (at[1:] == at[:-1] + numel[:-1])
    first = np.flatnonzero(np.append(True, ~goes_on)[: len(table)])
    total = np.add.reduceat(numel, first) if len(first) else numel
    rows = np.stack([start[first], parameter[first], offset[first], total], axis=1)
    made: list[Run] = []
    for row in rows.tolist():
        stretch = Run(*row)
        longer = made[-1].with_next(stretch) if made else None
        if longer is None:
            made.append(stretch)
        else:
            made[-1] = longer
    return made


def pieces(
    block_runs: Sequence[BlockRun], piece_numel: int, block_size: int, *, whole_parameters: bool = False
) -> list[list[BlockRun]]:
    """Returns the runs cut into pieces of at most ``piece_numel`` coordinates, of nearly equal size.

    If ``whole_parameters`` is true, parameters are not cut, so pieces can be larger.
    """
    count = max(1, -(-sum(run.numel for run in block_runs) // piece_numel))
    return [part for part in divided(block_runs, count, block_size, whole_parameters=whole_parameters) if part]


def divided(
    block_runs: Sequence[BlockRun], parts: int, block_size: int, *, whole_parameters: bool = False
) -> list[list[BlockRun]]:
    """Returns the runs cut into ``parts`` parts of nearly equal size. A part can be empty. Blocks are not cut, and
    parameters are not cut either if ``whole_parameters`` is true."""
    total = sum(run.numel for run in block_runs)
    made: list[list[BlockRun]] = [[]]
    waiting = deque(block_runs)
    start = 0  # number of the first waiting coordinate
    # Bounds are numbers of coordinates and not of blocks, because small parameters have short blocks, which would make
    # small parts. A part ends behind the block that contains its bound.
    for bound in (math.ceil(total * k / parts) for k in range(1, parts)):
        while waiting and start < bound:
            run = waiting.popleft()
            # A scale that belongs to a whole parameter needs all of its blocks in one piece.
            taken = run.blocks if whole_parameters else min(run.blocks, -(-(bound - start) // block_size))
            head, rest = run.cut(taken, block_size)
            made[-1].append(head)
            start += head.numel
            if rest.blocks:
                waiting.appendleft(rest)
        made.append([])
    made[-1] += waiting
    return made


def place(table: np.ndarray, q: Quantiser, *, shards: int, scale_bytes: int, raw_bytes: int) -> Layout:
    """Returns a layout that divides the blocks among ``shards`` shards with nearly equal bytes. Each shard has
    consecutive blocks. If the table consists of ``shards`` runs of blocks with equal lengths, each run is a shard.

    Args:
        table: block table, [blocks, COLUMNS].
        q: the quantiser.
        shards: number of shards.
        scale_bytes: bytes of one block's scale in the message; 0 if the message has no scales.
        raw_bytes: bytes per uncompressed coordinate.
    """
    record = _records(table, q, raw_bytes)
    ends = np.cumsum(record + np.where(table[:, RAW] == 1, 0, scale_bytes))
    total = int(ends[-1]) if len(table) else 0
    inner = np.searchsorted(ends, [total * k / shards for k in range(1, shards)], side="left") + 1
    first = [0, *np.minimum(inner, len(table)).tolist(), len(table)]
    return _placed(table, np.arange(len(table)), first, record, scale_bytes, q.block_size)


def place_by_owner(
    table: np.ndarray, q: Quantiser, *, shards: int, scale_bytes: int, raw_bytes: int, striped: bool
) -> Layout:
    """Returns a layout in which the shard of a block depends only on the numbers of the block and of its parameter.

    So results that depend on a block's owner do not depend on how parameters are put into buckets and pieces, and the
    owner's memory of its blocks stays valid.

    Args:
        table, q, shards, scale_bytes, raw_bytes: see `place`.
        striped: see `owners`.
    """
    owner = owners(table, shards, striped=striped)
    # A stable sort keeps the blocks of an owner in the order of coordinates.
    order = np.argsort(owner, kind="stable")
    first = [0, *np.cumsum(np.bincount(owner, minlength=shards)).tolist()]
    return _placed(table, order, first, _records(table, q, raw_bytes), scale_bytes, q.block_size)


def sizes_by_owner(
    block_runs: Sequence[BlockRun], q: Quantiser, *, shards: int, scale_bytes: int, raw_bytes: int
) -> tuple[int, ...]:
    """Returns the sizes that determine the work and the messages of the rank that owns the first shard, in the layout
    that `place_by_owner` returns for runs without stripes: the numbers of coordinates and of blocks, of the first
    shard's blocks and of those of them that are uncompressed, and the bytes of a shard's message.

    No table is built. The blocks of a parameter go to the owners in turn, so their numbers of blocks differ by at most
    one. See `place` for the arguments.
    """
    rows = np.zeros((len(block_runs), COLUMNS), dtype=np.int64)
    rows[:, PARAMETER] = [run.parameter for run in block_runs]
    rows[:, INDEX] = [run.first for run in block_runs]
    rank = np.arange(shards)
    scales, rest, blocks, raw = np.zeros((4, shards), dtype=np.int64)
    for run, owner in zip(block_runs, owners(rows, shards, striped=False).tolist(), strict=True):
        counts = run.blocks // shards + ((rank - owner) % shards < run.blocks % shards)
        blocks += counts
        raw += counts * run.raw
        scales += counts * (not run.raw) * scale_bytes
        full_bytes = _record_bytes(q.block_size, run.raw, q, raw_bytes)
        rest += counts * full_bytes
        # The last block of a parameter may be shorter than the others.
        last = run.numel - (run.blocks - 1) * q.block_size
        rest[(owner + run.blocks - 1) % shards] += _record_bytes(last, run.raw, q, raw_bytes) - full_bytes
    numel = sum(run.numel for run in block_runs)
    total = sum(run.blocks for run in block_runs)
    return numel, total, int(blocks[0]), int(raw[0]), int((_align(scales) + rest).max())


def owners(table: np.ndarray, shards: int, *, striped: bool) -> np.ndarray:
    """Returns the shard of each block, int64 [blocks].

    The blocks of a parameter go to the shards in turn. The first shard follows from a multiple of the golden ratio, so
    that small parameters spread evenly.

    Args:
        table: block table, [blocks, COLUMNS].
        shards: number of shards.
        striped: whether a turn is a stripe of several blocks (see `stripe`), for owners that have a memory. Turns of
            one block make the sizes of shards more equal.
    """
    turn = table[:, INDEX] // stripe(table[:, BLOCKS], shards) if striped else table[:, INDEX]
    return (turn + first_owners(table[:, PARAMETER], shards)) % shards


def first_owners(parameters: np.ndarray, shards: int) -> np.ndarray:
    """Returns the shard of the first block of each parameter. ``parameters`` are numbers of parameters."""
    # 40503/65536 is about the golden ratio minus 1. The fractional parts of its multiples spread evenly over 0 to 1.
    return parameters * 40503 % 65536 * shards // 65536


def stripe(blocks: np.ndarray, shards: int) -> np.ndarray:
    """Returns the number of consecutive blocks with the same owner, for parameters of ``blocks`` blocks.

    The number is small, so that owners have nearly equal parts. It is above 1 for large parameters, so that their
    blocks need not be handled one by one.
    """
    return np.clip(blocks // (4 * shards), 1, MAX_STRIPE)


def _records(table: np.ndarray, q: Quantiser, raw_bytes: int) -> np.ndarray:
    """Returns the number of bytes of each block's record, aligned."""
    length = table[:, LENGTH]
    return _align(np.where(table[:, RAW] == 1, length * raw_bytes, q.record_bytes(length, raw_bytes)))


@lru_cache(maxsize=1 << 12)
def _record_bytes(length: int, raw: bool, q: Quantiser, raw_bytes: int) -> int:
    """Returns the number of bytes of the record of one block with ``length`` coordinates, aligned."""
    row = np.zeros((1, COLUMNS), dtype=np.int64)
    row[:, LENGTH] = length
    row[:, RAW] = raw
    return int(_records(row, q, raw_bytes)[0])


def _placed(
    table: np.ndarray, order: np.ndarray, first: list[int], record: np.ndarray, scale_bytes: int, block_size: int
) -> Layout:
    """Returns the layout in which shard k has the blocks ``order[first[k]:first[k + 1]]``, with positions in the table.

    A shard's message has the scales, the codes and the uncompressed blocks, in this order.
    """
    raw = table[order, RAW] == 1
    record = record[order]
    table = table.copy()
    shard = np.repeat(np.arange(len(first) - 1), np.diff(first))
    scales, scales_bytes = _positions(np.where(raw, 0, scale_bytes), first, shard)
    codes, codes_bytes = _positions(np.where(raw, 0, record), first, shard)
    raws, raws_bytes = _positions(np.where(raw, record, 0), first, shard)
    before_codes = _align(scales_bytes)
    # All shards have the length of the longest shard, because all-to-all and all-gather need parts of equal length.
    shard_bytes = int((before_codes + codes_bytes + raws_bytes).max())
    start = shard_bytes * shard
    table[order, SCALE] = np.where(raw | (scale_bytes == 0), -1, start + scales)
    table[order, CODES] = start + before_codes[shard] + np.where(raw, codes_bytes[shard] + raws, codes)
    return Layout(table, order, tuple(first), shard_bytes, block_size)


def _positions(sizes: np.ndarray, first: list[int], shard: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the position of each block in its shard, and the number of bytes of each shard. ``sizes`` has the bytes
    of each block."""
    ends = np.concatenate([[0], np.cumsum(sizes)])
    starts = ends[first[:-1]]
    return ends[:-1] - starts[shard], ends[first[1:]] - starts


def _align(length: np.ndarray) -> np.ndarray:
    return -(-length // ALIGNMENT) * ALIGNMENT
