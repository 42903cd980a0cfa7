"""How one flat tensor is reduced: its pieces, each with its reducer, built once and used in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES
from lightning_gqsgd.layout import LENGTH, START, Segment, cut, pieces
from lightning_gqsgd.memory import MemoryStore
from lightning_gqsgd.reducers import REDUCERS, Setting, StepKeys, Steps, reduced, run_virtual
from lightning_gqsgd.reducers.base import HasSteps
from lightning_gqsgd.reducers.scatter import Scatter
from lightning_gqsgd.telemetry import SAMPLE_NUMEL, BucketCounters, Telemetry, sampled


def check_gradient(tensor: Tensor, what: str) -> None:
    """Raise ConfigError for a tensor that cannot be reduced."""
    if tensor.layout != torch.strided:
        raise ConfigError(
            f"{what} is sparse ({tensor.layout}); quantised allreduce needs dense gradients: "
            "build the embedding with sparse=False, or keep this model on plain DDP"
        )
    check_dtype(tensor.dtype, what)


def check_dtype(dtype: torch.dtype, what: str) -> None:
    """Raise ConfigError for a dtype whose numbers cannot be averaged."""
    if dtype not in COMPUTE_DTYPES:
        names = ", ".join(map(str, COMPUTE_DTYPES))
        raise ConfigError(f"{what} has dtype {dtype}; only floating-point tensors can be averaged: {names}")


class _Piece(NamedTuple):
    """Some coordinates, what reduces them, and where to sample them."""

    part: slice
    reducer: HasSteps
    sample: list[slice]


class Plan:
    """The pieces of a flat tensor.

    Args:
        segments: the parameters in the flat tensor, in order.
        setting: configuration, with the reducer chosen, number of ranks and dtype.
    """

    def __init__(self, segments: Sequence[Segment], setting: Setting) -> None:
        self.setting = setting
        self.numel = sum(segment.numel for segment in segments)
        self._pieces = self._cut(segments)

    def starts(
        self,
        x: Tensor,
        rank: int,
        step: int,
        store: MemoryStore,
        counters: BucketCounters,
        telemetry: Telemetry,
    ) -> list[Callable[[], Steps]]:
        """For each piece, a function that starts its steps on ``x``, which count the bytes that they send.

        Args:
            x: flat tensor, [numel].
            rank: this rank.
            step: number of the step, and of its dither.
            store: what this rank remembers.
            counters: of the bucket.
            telemetry: of the process.
        """
        config, ranks = self.setting.config, self.setting.ranks
        # Nothing is drawn for a native all-reduce, and the keys of a new step take time.
        keys = StepKeys.of(config, 0 if self.is_native else step, ranks)
        counters.calls += 1
        counters.numel += self.numel
        samples = self._compresses and config.sample_every and step % config.sample_every == 0

        def start(piece: _Piece) -> Steps:
            steps = self._steps(x, piece, rank, keys, store)
            if samples:
                steps = sampled(steps, x, piece.sample, self._result(rank), ranks, telemetry)
            return _counted(steps, piece.reducer, counters)

        return [partial(start, piece) for piece in self._pieces]

    def average(
        self,
        gradients: Sequence[Tensor],
        step: int,
        stores: Sequence[MemoryStore],
        *,
        only_first: bool = False,
    ) -> int:
        """Replace the gradients of virtual ranks in this process by their mean; return the bytes that a rank sends.

        Args:
            gradients: a flat tensor for each rank.
            step: number of the step, and of its dither.
            stores: what each rank remembers.
            only_first: replace rank 0's gradient only, and leave the others in any state.
        """
        keys = StepKeys.of(self.setting.config, step, self.setting.ranks)
        for piece in self._pieces:
            ranks = enumerate(zip(gradients, stores, strict=True))
            run_virtual([self._steps(x, piece, rank, keys, store) for rank, (x, store) in ranks], only_first=only_first)
        return self.sent_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that each rank sends; see `reducers.base.Reducer`."""
        return sum(piece.reducer.sent_bytes for piece in self._pieces)

    @property
    def message_bytes(self) -> int:
        """Bytes that one rank's coordinates take on the wire once; see `reducers.base.Reducer`."""
        return sum(piece.reducer.message_bytes for piece in self._pieces)

    @property
    def is_native(self) -> bool:
        """Whether the tensor is one piece that the backend's own all-reduce takes as it is."""
        return self.setting.config.reducer == "native" and len(self._pieces) == 1

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the tables of all pieces take, about."""
        return self._table_bytes

    def _cut(self, segments: Sequence[Segment]) -> list[_Piece]:
        made = []
        reducer = REDUCERS[self.setting.config.reducer]
        tables = _tables(segments, self.setting)
        self._table_bytes = 3 * sum(table.nbytes for table in tables)
        for table in tables:
            part = _span(table)
            table[:, START] -= part.start
            made.append(_Piece(part, reducer(table, self.setting), [_middle(part)]))
        return made

    def _steps(self, x: Tensor, piece: _Piece, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        return reduced(piece.reducer, x[piece.part], rank, keys, store)

    def _result(self, rank: int) -> slice:
        """In which of a piece's samples a rank finds the mean."""
        return slice(None)

    @property
    def _compresses(self) -> bool:
        """Whether there is an error to be sampled."""
        return REDUCERS[self.setting.config.reducer].compresses


class ScatterPlan(Plan):
    """The pieces of a flat tensor of which every rank needs the mean of one part only: a reduce-scatter.

    After a step, the r-th of as many equal parts as there are ranks holds the mean on rank r; the others hold anything.
    Each piece has the same coordinates of every part, so that each rank sends the others equal shares of it.

    Args:
        segments: the parameters' shards in the tensor, in order: each part has as many, of the same sizes.
        setting: configuration (its reducer does not count), number of ranks and dtype.
    """

    def _cut(self, segments: Sequence[Segment]) -> list[_Piece]:
        ranks, block_size = self.setting.ranks, self.setting.config.block_size
        each, share = len(segments) // ranks, self.numel // ranks
        tables = [cut(segments[rank * each : (rank + 1) * each], block_size) for rank in range(ranks)]
        self._table_bytes = 3 * sum(table.nbytes for table in tables)
        whole, numel = self.setting.config.scale_per == "parameter", max(1, self.setting.piece_numel // ranks)
        lengths = [len(table) for table in pieces(tables[0], numel, whole_parameters=whole)]
        made = []
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            runs = [table[end - length : end] for table in tables]
            columns = _span(runs[0])
            for rank, run in enumerate(runs):
                run[:, START] += rank * (columns.stop - columns.start) - columns.start
            middle = _middle(columns, SAMPLE_NUMEL // ranks)
            sample = [slice(rank * share + middle.start, rank * share + middle.stop) for rank in range(ranks)]
            made.append(_Piece(columns, Scatter(np.concatenate(runs), self.setting), sample))
        return made

    def _steps(self, x: Tensor, piece: _Piece, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        parts = x.view(self.setting.ranks, -1)[:, piece.part]
        together = parts.reshape(-1)  # a copy, unless this is the only piece
        bad = yield from reduced(piece.reducer, together, rank, keys, store)
        parts[rank] = together.view(parts.shape)[rank]
        return bad

    def _result(self, rank: int) -> slice:
        return slice(rank, rank + 1)

    @property
    def is_native(self) -> bool:
        """False: ranks need parts of the tensor only."""
        return False

    @property
    def _compresses(self) -> bool:
        return True


def _tables(segments: Sequence[Segment], setting: Setting) -> list[np.ndarray]:
    """The block tables of all pieces."""
    config = setting.config
    table = cut(segments, config.block_size)
    if not REDUCERS[config.reducer].compresses:  # takes the tensor whole, so that it gives DDP's bits
        return [table] if len(table) else []
    return pieces(table, setting.piece_numel, whole_parameters=config.scale_per == "parameter")


def _counted(steps: Steps, reducer: HasSteps, counters: BucketCounters) -> Steps:
    result = yield from steps
    counters.bytes_sent += reducer.sent_bytes
    counters.message_bytes += reducer.message_bytes
    return result


def _span(table: np.ndarray) -> slice:
    """The coordinates of a run of blocks."""
    return slice(int(table[0, START]), int(table[-1, START] + table[-1, LENGTH]))


def _middle(part: slice, most: int = SAMPLE_NUMEL) -> slice:
    """At most ``most`` coordinates from the middle of a run."""
    start = part.start + max(0, (part.stop - part.start - most) // 2)
    return slice(start, min(part.stop, start + most))
