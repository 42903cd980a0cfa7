"""How one flat tensor is reduced: its pieces, each with its reducer, built once and used in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES
from lightning_gqsgd.layout import LENGTH, START, Segment, cut, pieces
from lightning_gqsgd.memory import MemoryStore
from lightning_gqsgd.reducers import REDUCERS, Reducer, Setting, StepKeys, Steps, between_nodes, run_virtual
from lightning_gqsgd.reducers.scatter import Scatter
from lightning_gqsgd.telemetry import SAMPLE_NUMEL, BucketCounters, Telemetry, sampled


def check_gradient(tensor: Tensor, what: str) -> None:
    """Raise ConfigError for a tensor that cannot be reduced."""
    if tensor.layout != torch.strided:
        raise ConfigError(
            f"{what} is sparse ({tensor.layout}); quantised allreduce needs dense gradients: "
            "build the embedding with sparse=False, or keep this model on plain DDP"
        )
    if tensor.dtype not in COMPUTE_DTYPES:
        names = ", ".join(str(dtype) for dtype in COMPUTE_DTYPES)
        raise ConfigError(f"{what} has dtype {tensor.dtype}; only floating-point tensors can be averaged: {names}")


class _Piece(NamedTuple):
    """Some coordinates, what reduces them, and where to sample them."""

    part: slice
    reducer: Reducer
    sample: list[slice]


class Plan:
    """The pieces of a flat tensor.

    Args:
        segments: the parameters in it, in order.
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
        counters: BucketCounters,
        telemetry: Telemetry,
        store: MemoryStore | None = None,
    ) -> list[Callable[[], Steps]]:
        """For each piece, a function that starts its steps on ``x``, which book the bytes that they send.

        ``store``: what this rank remembers, if the configuration has a memory.
        """
        config, ranks = self.setting.config, self.setting.ranks
        keys = StepKeys.of(config, step, ranks)
        counters.calls += 1
        counters.numel += self.numel
        samples = config.reducer != "native" and config.sample_every and step % config.sample_every == 0

        def start(piece: _Piece) -> Steps:
            steps = self._steps(x, piece, rank, keys, store)
            if samples:
                steps = sampled(steps, x, piece.sample, self._result(rank), ranks, telemetry)
            return _booked(steps, piece.reducer, counters)

        return [partial(start, piece) for piece in self._pieces]

    def average(
        self,
        gradients: Sequence[Tensor],
        step: int,
        stores: Sequence[MemoryStore | None],
        *,
        only_first: bool = False,
    ) -> int:
        """Replace the gradients of virtual ranks in this process by their mean; return the bytes that a rank sends.

        ``only_first``: rank 0's only; the others' are left in any state.
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

    def _cut(self, segments: Sequence[Segment]) -> list[_Piece]:
        found = []
        for table in _tables(segments, self.setting):
            part = _span(table)
            table[:, START] -= part.start
            found.append(_Piece(part, REDUCERS[self.setting.config.reducer](table, self.setting), [_middle(part)]))
        return found

    def _steps(self, x: Tensor, piece: _Piece, rank: int, keys: StepKeys, store: MemoryStore | None) -> Steps:
        return piece.reducer.steps(x[piece.part], rank, keys, store)

    def _result(self, rank: int) -> slice:
        """In which of a piece's samples a rank finds the mean."""
        return slice(None)


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
        whole, numel = self.setting.config.scale_per == "parameter", max(1, self.setting.piece_numel // ranks)
        lengths = [len(table) for table in pieces(tables[0], numel, whole_parameters=whole)]
        found = []
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            runs = [table[end - length : end] for table in tables]
            columns = _span(runs[0])
            for rank, run in enumerate(runs):
                run[:, START] += rank * (columns.stop - columns.start) - columns.start
            middle = _middle(columns, SAMPLE_NUMEL // ranks)
            sample = [slice(rank * share + middle.start, rank * share + middle.stop) for rank in range(ranks)]
            found.append(_Piece(columns, Scatter(np.concatenate(runs), self.setting), sample))
        return found

    def _steps(self, x: Tensor, piece: _Piece, rank: int, keys: StepKeys, store: MemoryStore | None) -> Steps:
        parts = x.view(self.setting.ranks, -1)[:, piece.part]
        together = parts.reshape(-1)  # a copy, unless this is the only piece
        bad = yield from piece.reducer.steps(together, rank, keys, store)
        parts[rank] = together.view(parts.shape)[rank]
        return bad

    def _result(self, rank: int) -> slice:
        return slice(rank, rank + 1)


def _tables(segments: Sequence[Segment], setting: Setting) -> list[np.ndarray]:
    """The block tables of all pieces."""
    config = setting.config
    table = cut(segments, config.block_size)
    if config.reducer == "native":  # takes the tensor whole, so that it gives DDP's bits
        return [table] if len(table) else []
    return pieces(table, setting.piece_numel, whole_parameters=config.scale_per == "parameter")


def _booked(steps: Steps, reducer: Reducer, counters: BucketCounters) -> Steps:
    result = yield from steps
    counters.bytes_sent += reducer.sent_bytes
    counters.message_bytes += reducer.message_bytes
    return result


def _span(table: np.ndarray) -> slice:
    """The coordinates of a run of blocks."""
    return slice(int(table[0, START]), int(table[-1, START] + table[-1, LENGTH]))


def _middle(part: slice, most: int = SAMPLE_NUMEL) -> slice:
    """The middle coordinates of some."""
    start = part.start + max(0, (part.stop - part.start - most) // 2)
    return slice(start, min(part.stop, start + most))


def compile_kernels(config: GQSGDConfig, dtype: torch.dtype, device: torch.device, ranks: int) -> None:
    """Run what ``ranks`` ranks need once on virtual ones, so that no step waits for a compiler: on as many where their
    number is part of what is compiled, on a GPU, and otherwise on two.

    Raises:
        ConfigError: see `check_device`.
    """
    check_device(config, device)
    if config.reducer == "native" or device.type not in ("cpu", "cuda"):
        return
    segments = [Segment(0, 64, raw=False), Segment(1, 8, raw=True)]
    plain = GQSGDConfig(reducer="two_shot")
    for one in [config, *([plain] if config.warmup_steps else [])]:
        count = max(2, ranks // max(1, one.node_size)) if device.type == "cuda" else 2
        one = between_nodes(one, ranks) if one.reducer == "hierarchical" else one
        one = replace(one, bits=max(one.bits, 2)) if one.reducer == "sum" else one
        stores = [MemoryStore(one, count, {0: 64}, dtype, device) for _ in range(count)]
        gradients = [torch.ones(72, dtype=dtype, device=device) for _ in range(count)]
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            Plan(segments, Setting(one, count, dtype)).average(gradients, 0, stores)


def check_device(config: GQSGDConfig, device: torch.device) -> None:
    """Raise ConfigError for a configuration that is not for tensors on a device."""
    if config.coder == "elias" and device.type != "cpu":
        raise ConfigError(
            f"coder='elias' is for tensors on the CPU, not on {device}: its codes have no fixed length; take "
            "coder='fixed'"
        )
