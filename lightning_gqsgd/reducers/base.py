"""What a reducer is: a description of one piece's way through encoding, exchanges and decoding.

A reducer issues no collective itself. Its `steps` yield the exchanges that they need and are resumed when those are
done, so that the same objects run over process groups (`pipeline`) and over virtual ranks in one process
(`run_virtual`). Stage k of a piece is what it yields k-th; every stage has a process group of its own, hence each rank
issues the same collectives in the same order in each group, however the stages of several pieces interleave.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs import LinearCodec
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.kernels.wire import Key

#: The most stages a reducer has, hence the number of process groups.
STAGES = 2


class Exchange(NamedTuple):
    """A collective to run: ``all_to_all``, ``all_gather`` (output is [ranks, ...]), or ``sum`` and ``max`` (in
    place)."""

    kind: str
    output: Tensor
    input: Tensor

    @classmethod
    def in_place(cls, kind: str, tensor: Tensor) -> Exchange:
        """A ``sum`` or ``max`` over all ranks."""
        return cls(kind, tensor, tensor)


Steps = Generator[Sequence[Exchange], None, int]


@dataclass(frozen=True)
class Setting:
    """What a reducer is built for.

    Attributes:
        config: the configuration; its reducer is not "auto" any more.
        ranks: number of ranks.
        dtype: dtype of the gradients.
    """

    config: GQSGDConfig
    ranks: int
    dtype: torch.dtype

    @property
    def codec(self) -> LinearCodec:
        """The codec that the configuration names."""
        return LinearCodec(self.config.bits, self.config.dither)


class StepKeys(NamedTuple):
    """Dither keys of one step: one per rank on the way up, one for the mean on its way down."""

    up: tuple[Key, ...]
    down: Key

    @classmethod
    def of(cls, config: GQSGDConfig, step: int, ranks: int) -> StepKeys:
        """Keys of a step, the same on every rank."""
        return cls(tuple(config.dither_key(step, rank + 1) for rank in range(ranks)), config.dither_key(step, 0))


class Reducer(Protocol):
    """One piece of a flat tensor, made ready for a schedule of collectives.

    Attributes:
        sent_bytes: bytes that each rank sends (in a ring, where the collective is one).
        message_bytes: bytes that one rank's coordinates take on the wire once; over the number of coordinates, this is
            the bits per coordinate, whatever the number of ranks.
    """

    sent_bytes: int
    message_bytes: int

    def __init__(self, table: np.ndarray, setting: Setting) -> None: ...

    def steps(self, x: Tensor, rank: int, keys: StepKeys) -> Steps:
        """Replace this piece's coordinates of ``x`` by the mean over ranks; return the number of non-finite blocks."""
        ...


def ring_bytes(message_bytes: int, ranks: int) -> int:
    """Bytes that each rank sends in a reduce-scatter and an all-gather of a message."""
    return 2 * (ranks - 1) * message_bytes // ranks


def run_virtual(steps: Sequence[Steps]) -> list[int]:
    """Run one piece on virtual ranks in this process, in lock-step; return what each rank's steps returned."""
    results: list[int] = []
    pending: list[Sequence[Exchange]] = []
    while not results:
        for one in steps:
            try:
                pending.append(next(one))
            except StopIteration as end:
                results.append(end.value)
        for same in zip(*pending, strict=True):
            _exchange_virtually(same)
        pending = []
    return results


def _exchange_virtually(exchanges: Sequence[Exchange]) -> None:
    kind, inputs = exchanges[0].kind, [one.input.clone() for one in exchanges]
    for rank, one in enumerate(exchanges):
        if kind == "all_to_all":
            parts = [whole.view(len(exchanges), -1)[rank] for whole in inputs]
            one.output.view(len(exchanges), -1).copy_(torch.stack(parts))
        elif kind == "all_gather":
            one.output.copy_(torch.stack(inputs).view_as(one.output))
        else:
            stacked = torch.stack(inputs)
            one.output.copy_(stacked.amax(0) if kind == "max" else stacked.sum(0, dtype=stacked.dtype))
