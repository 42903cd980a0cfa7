"""How one flat tensor is reduced: its pieces, each with its reducer, built once and used in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES
from lightning_gqsgd.layout import LENGTH, START, Segment, cut, pieces
from lightning_gqsgd.memory import MemoryStore
from lightning_gqsgd.reducers import REDUCERS, Reducer, Setting, StepKeys, Steps, between_nodes, run_virtual
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


class Plan:
    """The pieces of a flat tensor.

    Args:
        segments: the parameters in it, in order.
        setting: configuration, with the reducer chosen, number of ranks and dtype.
    """

    def __init__(self, segments: Sequence[Segment], setting: Setting) -> None:
        self.setting = setting
        self.numel = sum(segment.numel for segment in segments)
        self._pieces: list[tuple[slice, Reducer]] = []
        for table in _tables(segments, setting.config):
            part = slice(int(table[0, START]), int(table[-1, START] + table[-1, LENGTH]))
            table[:, START] -= part.start
            self._pieces.append((part, REDUCERS[setting.config.reducer](table, setting)))

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

        def start(part: slice, reducer: Reducer) -> Steps:
            steps = reducer.steps(x[part], rank, keys, store)
            if samples:
                steps = sampled(steps, x[part], _middle(part), ranks, telemetry)
            return _booked(steps, reducer, counters)

        return [partial(start, part, reducer) for part, reducer in self._pieces]

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
        for part, reducer in self._pieces:
            ranks = enumerate(zip(gradients, stores, strict=True))
            run_virtual(
                [reducer.steps(x[part], rank, keys, store) for rank, (x, store) in ranks], only_first=only_first
            )
        return self.sent_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that each rank sends; see `reducers.base.Reducer`."""
        return sum(reducer.sent_bytes for _, reducer in self._pieces)

    @property
    def message_bytes(self) -> int:
        """Bytes that one rank's coordinates take on the wire once; see `reducers.base.Reducer`."""
        return sum(reducer.message_bytes for _, reducer in self._pieces)


def _tables(segments: Sequence[Segment], config: GQSGDConfig) -> list[np.ndarray]:
    """The block tables of all pieces."""
    table = cut(segments, config.block_size)
    if config.reducer == "native":  # takes the tensor whole, so that it gives DDP's bits
        return [table] if len(table) else []
    return pieces(table, whole_parameters=config.scale_per == "parameter")


def _booked(steps: Steps, reducer: Reducer, counters: BucketCounters) -> Steps:
    result = yield from steps
    counters.bytes_sent += reducer.sent_bytes
    counters.message_bytes += reducer.message_bytes
    return result


def _middle(part: slice) -> slice:
    """The middle coordinates of a piece, counted from its start."""
    start = max(0, (part.stop - part.start - SAMPLE_NUMEL) // 2)
    return slice(start, min(part.stop - part.start, start + SAMPLE_NUMEL))


def compile_kernels(config: GQSGDConfig, dtype: torch.dtype, device: torch.device, ranks: int) -> None:
    """Run what ``ranks`` ranks need once on two virtual ones, so that no step waits for a compiler."""
    if config.reducer == "native" or device.type != "cpu":
        return
    segments = [Segment(0, 64, raw=False), Segment(1, 8, raw=True)]
    plain = GQSGDConfig(reducer="two_shot")
    for one in [config, *([plain] if config.warmup_steps else [])]:
        one = between_nodes(one, ranks) if one.reducer == "hierarchical" else one
        one = replace(one, bits=max(one.bits, 2)) if one.reducer == "sum" else one
        stores = [MemoryStore(one, 2, {0: 64}, dtype, device) for _ in range(2)]
        gradients = [torch.ones(72, dtype=dtype) for _ in range(2)]
        Plan(segments, Setting(one, ranks=2, dtype=dtype)).average(gradients, 0, stores)
