"""How one flat tensor is reduced: its pieces, each with its reducer, built once and used in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES
from lightning_gqsgd.layout import LENGTH, START, Segment, cut, pieces
from lightning_gqsgd.reducers import REDUCERS, Reducer, Setting, StepKeys, Steps, run_virtual
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
        table = cut(segments, setting.config.block_size)
        # The native allreduce takes the tensor whole, so that it gives DDP's bits.
        whole = setting.config.reducer == "native"
        tables = ([table] if len(table) else []) if whole else pieces(table)
        reducer = REDUCERS[setting.config.reducer]
        self._pieces: list[Reducer] = [reducer(piece, setting) for piece in tables]
        self._samples = [_sample_of(int(one[0, START]), int(one[-1, START] + one[-1, LENGTH])) for one in tables]

    def starts(
        self, x: Tensor, rank: int, step: int, counters: BucketCounters, telemetry: Telemetry
    ) -> list[Callable[[], Steps]]:
        """For each piece, a function that starts its steps on ``x``; books the bytes."""
        config, ranks = self.setting.config, self.setting.ranks
        keys = StepKeys.of(config, step, ranks)
        counters.calls += 1
        counters.numel += self.numel
        counters.bytes_sent += sum(piece.sent_bytes for piece in self._pieces)
        counters.message_bytes += sum(piece.message_bytes for piece in self._pieces)
        starts: list[Callable[[], Steps]] = [partial(piece.steps, x, rank, keys) for piece in self._pieces]
        if config.reducer == "native" or not config.sample_every or step % config.sample_every:
            return starts
        return [
            partial(_start_sampled, start, x, part, ranks, telemetry)
            for start, part in zip(starts, self._samples, strict=True)
        ]


def _start_sampled(start: Callable[[], Steps], x: Tensor, part: slice, ranks: int, telemetry: Telemetry) -> Steps:
    return sampled(start(), x, part, ranks, telemetry)


def _sample_of(start: int, stop: int) -> slice:
    """The middle coordinates of a piece."""
    middle = (start + stop - SAMPLE_NUMEL) // 2
    return slice(max(start, middle), min(stop, middle + SAMPLE_NUMEL))


def compile_kernels(config: GQSGDConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Run everything once on two virtual ranks, so that no step waits for a compiler."""
    if config.reducer == "native" or device.type != "cpu":
        return
    names = {config.reducer} | ({"two_shot"} if config.warmup_steps else set())
    for name in names:
        setting = Setting(_with_reducer(config, name), ranks=2, dtype=dtype)
        (table,) = pieces(cut([Segment(0, 64, raw=False), Segment(1, 8, raw=True)], config.block_size))
        piece, keys = REDUCERS[name](table, setting), StepKeys.of(config, 0, 2)
        run_virtual([piece.steps(torch.ones(72, dtype=dtype), rank, keys) for rank in range(2)])


def _with_reducer(config: GQSGDConfig, name: str) -> GQSGDConfig:
    return replace(config, reducer=name, scale="auto", bits=max(config.bits, 2) if name == "sum" else config.bits)
