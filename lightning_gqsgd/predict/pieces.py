"""The pieces of a bucket, as runs of blocks: what `plan.Plan` makes, without a row for each block of a large model.

Most pieces of a large model are alike: their reducers compute and send the same. `pieces_of` says in `Piece.alike` all
that this depends on, so that one of several alike pieces is enough to learn it from (`profile`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from lightning_gqsgd.kernels.layout import ALIGNMENT, BLOCKS, COLUMNS, INDEX, PARAMETER, Segment, cut, owners
from lightning_gqsgd.kernels.protocol import Quantiser
from lightning_gqsgd.reducers import REDUCERS, Setting, between_nodes
from lightning_gqsgd.spec.fields import Fields

#: The shards that a piece has at a number of ranks, for reducers whose work and messages depend on sizes only.
_SHARDS: dict[str, Callable[[int], int]] = {"two_shot": lambda ranks: ranks, "gather": lambda ranks: 1}


class Blocks(NamedTuple):
    """Consecutive blocks of one parameter.

    Attributes:
        parameter: number of the parameter.
        first: number of the first block in its parameter.
        blocks: number of blocks.
        numel: number of coordinates; all blocks but the last one of the parameter are full.
        raw: whether the parameter travels uncompressed.
        of: number of blocks of the whole parameter.
    """

    parameter: int
    first: int
    blocks: int
    numel: int
    raw: bool
    of: int


@dataclass(frozen=True)
class Piece:
    """A piece; it equals every piece whose reducer computes and sends the same.

    Attributes:
        setting: what its reducer is built for.
        alike: all that its reducer's work and messages depend on, besides the setting.
        runs: its blocks.
    """

    setting: Setting
    alike: tuple[Any, ...]
    runs: tuple[Blocks, ...] = field(compare=False)

    @property
    def numel(self) -> int:
        """Number of coordinates."""
        return sum(run.numel for run in self.runs)

    def table(self) -> np.ndarray:
        """The block table, which counts from the piece's first coordinate; see `layout.cut`."""
        table = cut([Segment(run.parameter, run.numel, run.raw) for run in self.runs], self.setting.config.block_size)
        counts = [run.blocks for run in self.runs]
        table[:, INDEX] += np.repeat([run.first for run in self.runs], counts)
        table[:, BLOCKS] = np.repeat([run.of for run in self.runs], counts)
        return table


def can_be_alike(config: Fields) -> bool:
    """Whether `pieces_of` knows the pieces of a configuration: it remembers nothing, and its scales are of blocks."""
    return not config.remembers and config.scale_per == "block"


def pieces_of(segments: Sequence[Segment], setting: Setting) -> list[Piece]:
    """The pieces of a bucket, as `plan.Plan` cuts it."""
    size = setting.config.block_size
    runs = [_whole(segment, size) for segment in segments if segment.numel]
    total = sum(run.numel for run in runs)
    if not total:
        return []
    if not REDUCERS[setting.config.reducer].compresses:
        # It takes the tensor whole, so the number of blocks is no matter.
        return [Piece(setting, (total,), (_whole(Segment(0, total, raw=False), size),))]
    count = max(1, -(-total // setting.piece_size.within(total)))
    parts = _split(runs, [total * k / count for k in range(1, count)], size)
    return [Piece(setting, _alike(part, setting), tuple(part)) for part in parts if part]


def _whole(segment: Segment, size: int) -> Blocks:
    """All blocks of a parameter; ``size``: coordinates of a full block."""
    blocks = -(-segment.numel // size)
    return Blocks(segment.parameter, 0, blocks, segment.numel, bool(segment.raw), blocks)


def _split(runs: Sequence[Blocks], bounds: Sequence[float], size: int) -> list[list[Blocks]]:
    """The runs, cut behind the block in which each bound lies, as `layout.pieces` and `Hierarchical` do it.

    Args:
        runs: the runs.
        bounds: rising numbers of coordinates.
        size: coordinates of a full block.
    """
    parts: list[list[Blocks]] = [[]]
    # ``start``: the first coordinate of what waits
    waiting = list(reversed(runs))
    start = 0
    for bound in bounds:
        before = math.ceil(bound)  # an integer is less than the bound if it is less than this one
        while waiting:
            run = waiting.pop()
            taken = _blocks_to(run, before - start, size)
            if taken < run.blocks:
                left, right = _cut_behind(run, taken, size)
                parts[-1] += [left] if left.blocks else []
                start += left.numel
                waiting.append(right)
                break
            parts[-1].append(run)
            start += run.numel
            if start >= before:
                break
        parts.append([])
    parts[-1] += reversed(waiting)
    return parts


def _blocks_to(run: Blocks, bound: int, size: int) -> int:
    """How many blocks of a run begin before a bound, which counts from the start of the run."""
    return min(run.blocks, max(0, -(-bound // size)))


def _cut_behind(run: Blocks, count: int, size: int) -> tuple[Blocks, Blocks]:
    numel = min(run.numel, count * size)
    left = run._replace(blocks=count, numel=numel)
    return left, run._replace(first=run.first + count, blocks=run.blocks - count, numel=run.numel - numel)


def _alike(runs: Sequence[Blocks], setting: Setting) -> tuple[Any, ...]:
    """Return a key of all that the work and the messages of a piece depend on."""
    config = setting.config
    if config.reducer != "hierarchical":
        return _of_one_level(runs, setting)
    total = sum(run.numel for run in runs)
    parts = _split(runs, [total * k / config.node_size for k in range(1, config.node_size)], config.block_size)
    numels = [sum(run.numel for run in part) for part in parts]
    inner = Setting(between_nodes(config, setting.ranks), setting.ranks // config.node_size, setting.dtype)
    each = [_of_one_level(part, inner) for part in parts if part]
    if inner.config.reducer not in _SHARDS:
        return (total, *numels, *each)
    # Rank 0 sends its own part between nodes, and pads it to the largest one inside the node.
    return (total, numels[0], max(numels), each[0], max(shard_bytes for *_, shard_bytes in each))


def _of_one_level(runs: Sequence[Blocks], setting: Setting) -> tuple[Any, ...]:
    """Return the key of a piece of a one-level reducer; in the end the bytes of a shard's message."""
    name = setting.config.reducer
    if name not in _SHARDS:
        return tuple(runs)
    sizes = (sum(run.numel for run in runs), sum(run.blocks for run in runs))
    return (*sizes, *_shards(runs, setting, _SHARDS[name](setting.ranks)))


def _shards(runs: Sequence[Blocks], setting: Setting, shards: int) -> tuple[int, int, int]:
    """How many blocks rank 0 owns, how many of them are uncompressed, and the bytes of a shard's message: see
    `layout.place_by_owner`.

    Owners take turns at the blocks of a parameter, so each of them has as many blocks as the others, or one more.
    """
    size = setting.config.block_size
    q = setting.codec.quantiser(size)
    rank = np.arange(shards)
    scales, rest, blocks, raw = (np.zeros(shards, dtype=np.int64) for _ in range(4))
    for run, owner in zip(runs, _first_owners(runs, shards), strict=True):
        counts = run.blocks // shards + ((rank - owner) % shards < run.blocks % shards)
        blocks += counts
        raw += counts if run.raw else 0
        scales += 0 if run.raw else counts * setting.scale_bytes
        last = run.numel - (run.blocks - 1) * size
        full_bytes, last_bytes = (_record(length, run.raw, q, setting.raw_bytes) for length in (size, last))
        rest += counts * full_bytes
        rest[(owner + run.blocks - 1) % shards] += last_bytes - full_bytes
    return int(blocks[0]), int(raw[0]), int((_aligned(scales) + rest).max())


def _first_owners(runs: Sequence[Blocks], shards: int) -> list[int]:
    """The owners of the first block of each run."""
    rows = np.zeros((len(runs), COLUMNS), dtype=np.int64)
    rows[:, PARAMETER], rows[:, INDEX] = [run.parameter for run in runs], [run.first for run in runs]
    found: list[int] = owners(rows, shards, striped=False).tolist()
    return found


@lru_cache(maxsize=1 << 12)
def _record(length: int, raw: bool, q: Quantiser, raw_bytes: int) -> int:
    """Bytes of a block's record, aligned."""
    return int(_aligned(np.int64(length * raw_bytes if raw else q.record_bytes(np.array([length]), raw_bytes)[0])))


def _aligned(length: Any) -> Any:
    return -(-length // ALIGNMENT) * ALIGNMENT
