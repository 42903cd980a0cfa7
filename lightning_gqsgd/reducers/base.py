"""What a reducer is: a description of one piece's way through encoding, exchanges and decoding.

A reducer issues no collective itself. Its `steps` yield the exchanges that they need and are resumed when those are
done, so that the same objects run over process groups (`pipeline`) and over virtual ranks in one process
(`run_virtual`). Stage k of a piece is what it yields k-th, and on every rank the pieces take a stage in the same order.
On a GPU, `steps` issue work and wait for none of it: they read no number from there.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs import Codec, codec_of
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.kernels.wire import Key, scale_format
from lightning_gqsgd.layout import PIECE_NUMEL
from lightning_gqsgd.memory import MemoryStore


class Scope(NamedTuple):
    """Which ranks an exchange is between: ``"all"``, those of one ``"node"``, or ``"peers"``, which have the same place
    on each node. Nodes have ``node_size`` consecutive ranks each."""

    kind: str
    node_size: int = 1

    def members(self, rank: int, ranks: int) -> range:
        """The ranks, of ``ranks``, that ``rank`` exchanges with, itself among them."""
        first = rank - rank % self.node_size
        return {
            "all": range(ranks),
            "node": range(first, first + self.node_size),
            "peers": range(rank % self.node_size, ranks, self.node_size),
        }[self.kind]


ALL = Scope("all")


class Exchange(NamedTuple):
    """A collective to run: ``all_to_all``, ``all_gather`` (output is [ranks, ...]), or ``sum`` and ``max`` (in place).

    ``splits``: of an ``all_to_all`` with unequal parts, how many elements of output and of input belong to each rank.
    ``scope``: between whom.
    """

    kind: str
    output: Tensor
    input: Tensor
    splits: tuple[list[int], list[int]] | None = None
    scope: Scope = ALL

    @classmethod
    def in_place(cls, kind: str, tensor: Tensor) -> Exchange:
        """A ``sum`` or ``max`` over all ranks."""
        return cls(kind, tensor, tensor)


#: A number of blocks; where it is only known on a GPU, 0-d and there, so that nothing waits for it.
Count = int | Tensor

Steps = Generator[Sequence[Exchange], None, Count]


@dataclass(frozen=True)
class Setting:
    """What a reducer is built for.

    Attributes:
        config: the configuration; its reducer is not "auto" any more.
        ranks: number of ranks.
        dtype: dtype of the gradients.
        piece_numel: the most coordinates of a piece, about; results do not depend on it.
    """

    config: GQSGDConfig
    ranks: int
    dtype: torch.dtype
    piece_numel: int = PIECE_NUMEL

    @property
    def codec(self) -> Codec:
        """The codec that the configuration names."""
        return codec_of(self.config)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block's scale in a message."""
        return 0 if self.config.codec == "top_k" else scale_format(self.dtype).nbytes

    @property
    def raw_bytes(self) -> int:
        """Bytes of an uncompressed coordinate."""
        return scale_format(self.dtype).raw_bytes


def uncompressed(setting: Setting) -> Setting:
    """The setting for parameters that travel uncompressed, beside others or in a warm-up: by `two_shot`, which adds in
    rank order, whatever the buckets; or as they do anyway, where the ways are other ones (native, hierarchical)."""
    if setting.config.reducer in ("native", "hierarchical"):
        return setting
    kept = {name: getattr(setting.config, name) for name in ("block_size", "seed", "sample_every")}
    return replace(setting, config=GQSGDConfig(reducer="two_shot", **kept))


@dataclass(frozen=True)
class StepKeys:
    """Keys of one step's random numbers, the same on every rank.

    Attributes:
        up: of each rank's codes on the way up.
        down: of the mean's on its way down.
        rotation: of the signs of rotations.
    """

    config: GQSGDConfig
    step: int
    up: tuple[Key, ...]
    down: Key
    rotation: Key

    @classmethod
    @lru_cache(maxsize=8)  # all buckets of a step have the same
    def of(cls, config: GQSGDConfig, step: int, ranks: int) -> StepKeys:
        """Keys of a step: stream 0 is the mean's, 1 to n are the ranks', the last is the rotation's."""
        up = tuple(config.dither_key(step, rank + 1) for rank in range(ranks))
        return cls(config, step, up, config.dither_key(step, 0), config.dither_key(step, 2**64 - 1))

    def node(self, hop: int, rank: int) -> Key:
        """Key of the sums that a rank makes of codes at a hop: a stream of its own beyond the ranks'."""
        ranks = len(self.up)
        return self.config.dither_key(self.step, ranks * (hop + 1) + rank + 1)


class Reducer(Protocol):
    """One piece of a flat tensor, made ready for a schedule of collectives.

    Attributes:
        sent_bytes: bytes that each rank sends (in a ring, where the collective is one).
        message_bytes: bytes that one rank's coordinates take on the wire once; over the number of coordinates, this is
            the bits per coordinate, whatever the number of ranks. Of the latest step, if lengths vary.
    """

    sent_bytes: int
    message_bytes: int

    def __init__(self, table: np.ndarray, setting: Setting) -> None: ...

    @staticmethod
    def stages(config: GQSGDConfig, ranks: int) -> int:
        """How often `steps` yields at most, which is the number of stages."""
        ...

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore | None = None) -> Steps:
        """Replace the coordinates of ``x``, which the table counts from, by the mean over ranks; return the number of
        non-finite blocks. ``store``: what this rank remembers; None if the configuration has no memory."""
        ...


def side_by_side(*several: Steps) -> Steps:
    """Several parts of a piece at once, stage by stage; returns the sum of what they return."""
    result: Count = 0
    going = list(several)
    while going:
        exchanges: list[Exchange] = []
        for one in list(going):
            try:
                exchanges += next(one)
            except StopIteration as end:
                result += end.value
                going.remove(one)
        if going:
            yield exchanges
    return result


def ring_bytes(message_bytes: int, ranks: int) -> int:
    """Bytes that each rank sends in a reduce-scatter and an all-gather of a message."""
    return 2 * (ranks - 1) * message_bytes // ranks


def run_virtual(steps: Sequence[Steps], *, only_first: bool = False) -> list[Count]:
    """Run one piece on virtual ranks in this process, in lock-step; return what each rank's steps returned.

    ``only_first``: once rank 0 has its result, which is everyone's, the others' steps are not finished.
    """
    results: list[Count] = []
    pending: list[Sequence[Exchange]] = []
    while not results:
        for one in steps:
            if results and only_first:
                one.close()
                continue
            try:
                pending.append(next(one))
            except StopIteration as end:
                results.append(end.value)
        for first, exchanges in enumerate(pending):
            for scope in dict.fromkeys(one.scope for one in exchanges):
                members = scope.members(first, len(pending))
                if members[0] == first:
                    theirs = [[one for one in pending[rank] if one.scope == scope] for rank in members]
                    for same in zip(*theirs, strict=True):
                        _exchange_virtually(same)
        pending = []
    return results


def _exchange_virtually(exchanges: Sequence[Exchange]) -> None:
    first, *others = exchanges
    if first.kind == "all_to_all":
        (_exchange_parts if first.splits else _exchange_equal_parts)(exchanges)
    elif first.kind == "all_gather":
        first.output.copy_(torch.stack([one.input for one in exchanges]).view_as(first.output))
        for other in others:  # one copy for all: n of them would take n² memory
            other.output.set_(first.output)  # type: ignore[call-overload]
    else:
        stacked = torch.stack([one.input for one in exchanges])
        result = stacked.amax(0) if first.kind == "max" else stacked.sum(0, dtype=stacked.dtype)
        for one in exchanges:
            one.output.copy_(result)


def _exchange_equal_parts(exchanges: Sequence[Exchange]) -> None:
    ranks = len(exchanges)
    sent = torch.stack([one.input.view(ranks, -1) for one in exchanges])
    for rank, one in enumerate(exchanges):
        one.output.view(ranks, -1).copy_(sent[:, rank])


def _exchange_parts(exchanges: Sequence[Exchange]) -> None:
    """Most of n² parts are empty: only the others are touched."""
    sent = {}
    for source, one in enumerate(exchanges):
        assert one.splits is not None
        for rank, start, length in _filled(one.splits[1]):
            sent[source, rank] = one.input.flatten()[start : start + length].clone()
    for rank, one in enumerate(exchanges):
        assert one.splits is not None
        for source, start, length in _filled(one.splits[0]):
            one.output.view(-1)[start : start + length] = sent[source, rank]


def _filled(split: list[int]) -> list[tuple[int, int, int]]:
    """Number, start and length of the parts that are not empty."""
    starts = accumulate(split, initial=0)
    return [
        (number, start, length) for number, (start, length) in enumerate(zip(starts, split, strict=False)) if length
    ]
