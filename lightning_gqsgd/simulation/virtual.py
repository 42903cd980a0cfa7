"""The reducers on virtual ranks in one process: what a configuration does to given gradients, or to a training run,
without a network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from lightning_gqsgd.errors import ConfigError, counted
from lightning_gqsgd.layout import Segment
from lightning_gqsgd.memory import Keeps
from lightning_gqsgd.plan import Plan, check_gradient
from lightning_gqsgd.presets import PRESETS, make_config
from lightning_gqsgd.reducers import Setting, new_store, resolve
from lightning_gqsgd.simulation.problems import Problem
from lightning_gqsgd.simulation.record import Record, Rows
from lightning_gqsgd.sparse.options import refuse_for

#: The name for training without compression.
UNCOMPRESSED = "ddp"
#: Step of the default optimizer.
DEFAULT_LR = 0.1
#: Problems with fewer coordinates run on one of torch's threads: operations this small wait for each other on more,
#: five times as long on a busy machine.
SMALL = 1 << 17


class VirtualRanks:
    """Ranks in this process, with what each of them remembers: the codec, memory and reducer objects of training.

    Args:
        ranks: number of ranks.
        segments: the parameters in a gradient, in order.
        dtype: dtype of the gradients.
        preset: name of a preset; see `presets.PRESETS`.
        **fields: fields of `GQSGDConfig`.

    Attributes:
        config: the configuration, with its reducer chosen and the numbers of its memories.
        bytes_sent: bytes that each rank has sent so far.

    Raises:
        ConfigError: a configuration that cannot work.
    """

    def __init__(
        self,
        ranks: int,
        segments: Sequence[Segment],
        dtype: torch.dtype = torch.float32,
        preset: str | None = None,
        **fields: Any,
    ) -> None:
        self.config = resolve(make_config(preset, **fields), ranks)
        refuse_for(self.config, "simulations, which have dense gradients only")
        self.bytes_sent = 0
        self._dtype = dtype
        self._plan = Plan(segments, Setting(self.config, ranks, dtype))
        sizes = {segment.parameter: segment.numel for segment in segments if not segment.raw}
        device = torch.device("cpu")
        self._segments = list(segments)
        self.stores = [new_store(self.config, ranks, sizes, dtype, device) for _ in range(ranks)]

    @property
    def wire_bits(self) -> float:
        """Bits of one rank's message per coordinate, scales included; of variable lengths, the latest step's."""
        return 8 * self._plan.message_bytes / self._plan.numel

    def errors(self) -> Tensor:
        """What each rank remembers of the errors of its own messages, e of `memory.Memory`: [ranks, d].

        Raises:
            ConfigError: the configuration has no error memory.
        """
        if self.config.up is None or not self.config.up.keeps_error:
            raise ConfigError("there is no error memory; take memory='ef' or 'ecq'")
        kept = [
            torch.cat(
                [
                    torch.zeros(segment.numel, dtype=self._dtype)
                    if segment.raw
                    else store.row(Keeps.UP_ERROR, segment.parameter)
                    for segment in self._segments
                ]
            )
            for store in self.stores
        ]
        return torch.stack(kept)

    def average(self, gradients: Sequence[Tensor], step: int) -> list[Tensor]:
        """What each rank would hold after reducing its gradient; all with the same bits.

        Raises:
            ConfigError: the gradients and the segments have different numbers of coordinates.
        """
        self._check_sizes(gradients)
        results = [gradient.clone() for gradient in gradients]
        self.bytes_sent += self._plan.average(results, step, self.stores)
        return results

    def mean(self, gradients: Sequence[Tensor], step: int) -> Tensor:
        """As `average`, for rank 0 only, with less work where nothing is remembered."""
        self._check_sizes(gradients)
        results = [gradient.clone() for gradient in gradients]
        only_first = not self.config.remembers
        self.bytes_sent += self._plan.average(results, step, self.stores, only_first=only_first)
        return results[0]

    def _check_sizes(self, gradients: Sequence[Tensor]) -> None:
        for rank, gradient in enumerate(gradients):
            if gradient.numel() != self._plan.numel:
                raise ConfigError(
                    f"the gradient of rank {rank} has {counted(gradient.numel(), 'coordinate')}, the segments have "
                    f"{self._plan.numel:,}; give segments whose numel add up to the gradient's"
                )


def average(
    gradients: Sequence[Tensor],
    *,
    step: int = 0,
    segments: Sequence[Segment] | None = None,
    preset: str | None = None,
    **fields: Any,
) -> list[Tensor]:
    """What each rank would hold after reducing its gradient, with empty memory; see `VirtualRanks`.

    Args:
        gradients: one flat floating-point tensor per rank, all of one shape, dtype and device; not changed.
        step: number of the dither.
        segments: the parameters in a gradient, in order; None takes it as one compressed parameter.
        preset: name of a preset; see `presets.PRESETS`.
        **fields: fields of `GQSGDConfig`.

    Returns:
        One tensor per rank, all with the same bits.

    Raises:
        ConfigError: gradients or a configuration that cannot work.
    """
    _check(gradients)
    first = gradients[0]
    segments = segments or [Segment(0, first.numel(), raw=False)]
    return VirtualRanks(len(gradients), segments, first.dtype, preset, **fields).average(gradients, step)


def relative_error(estimate: Tensor, gradients: Sequence[Tensor]) -> float:
    """Relative L2 error of an estimate against the exact mean of the gradients."""
    mean = torch.stack([gradient.double() for gradient in gradients]).mean(0)
    return float((estimate.double() - mean).norm() / mean.norm())


def simulate(
    preset: str,
    problem: Problem,
    *,
    workers: int,
    steps: int,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
    lr: float | None = None,
    seed: int = 0,
    record_every: int | None = None,
    progress: bool = True,
    **fields: Any,
) -> Record:
    """Train in this process, with the codec, memory and reducer objects of training on virtual workers.

    Args:
        preset: name of a preset (see `presets.PRESETS`), or ``"ddp"``: the exact mean.
        problem: what to train on, e.g. of `problems`; the dtype of its gradients is the run's.
        workers: number of virtual workers.
        steps: number of steps.
        optimizer: makes any optimizer of the list of one flat parameter; None: SGD with the step ``lr``.
        lr: step of the default optimizer; None: 0.1.
        seed: of the dither. The problem's random numbers have a seed of their own.
        record_every: steps between two rows of the record; None: such that there are about 100. The last step has one.
        progress: show a bar.
        **fields: fields of `GQSGDConfig` that replace the preset's. What is raw is the problem's choice, so
            ``min_numel`` and ``exclude`` have no effect; nor have ``warmup_steps`` and ``sample_every``.

    Returns:
        The record. If parameters or loss stop being finite, the run ends there; see `Record.diverged_at`.

    Raises:
        ConfigError: an unknown preset or an argument that cannot work.
    """
    every = _interval(steps, record_every)
    ranks = _virtual_workers(preset, problem, workers, seed, fields)
    x = torch.nn.Parameter(problem.start().clone())
    update = _optimizer(x, optimizer, lr)
    rows = Rows()
    if not _booked(rows, problem, x.data, 0, ranks, math.nan):
        raise ConfigError(f"the loss of {problem} is not finite before training; start somewhere else")
    diverged_at = None
    with _one_thread(x.numel() < SMALL), _bar(f"{preset}, {workers} workers", steps, shown=progress) as advance:
        for step in range(steps):
            gradients = problem.gradients(x.data, step, workers).unbind(0)
            x.grad = ranks.mean(gradients, step)
            mean = x.grad.clone()  # an optimizer may change it
            update.step()
            done, finite = step + 1, bool(x.data.isfinite().all())
            if finite and (done % every == 0 or done == steps):
                finite = _booked(rows, problem, x.data, done, ranks, relative_error(mean, gradients))
            if not finite:
                diverged_at = done
                break
            advance()
    return rows.record(preset, ranks.config, workers, x, diverged_at)


def _virtual_workers(preset: str, problem: Problem, workers: int, seed: int, fields: dict[str, Any]) -> VirtualRanks:
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ConfigError(f"workers={workers!r} must be an integer of at least 1")
    if preset != UNCOMPRESSED and preset not in PRESETS:
        raise ConfigError(f"unknown preset {preset!r} (presets: {UNCOMPRESSED}, {', '.join(PRESETS)})")
    dtype = problem.start().dtype
    fields = {"seed": seed, **fields}
    if preset == UNCOMPRESSED:
        return VirtualRanks(workers, problem.segments, dtype, **{**fields, "reducer": "native"})
    return VirtualRanks(workers, problem.segments, dtype, preset, **fields)


def _optimizer(
    x: Tensor, make: Callable[[list[Tensor]], torch.optim.Optimizer] | None, lr: float | None
) -> torch.optim.Optimizer:
    if make is None:
        return torch.optim.SGD([x], lr=DEFAULT_LR if lr is None else lr)
    if lr is not None:
        raise ConfigError(f"lr={lr} is for the default optimizer; give it to yours, e.g. lambda p: Adam(p, lr={lr})")
    return make([x])


def _interval(steps: int, every: int | None) -> int:
    for name, value in (("steps", steps), ("record_every", 1 if every is None else every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r} must be an integer of at least 1")
    return max(1, steps // 100) if every is None else every


def _booked(rows: Rows, problem: Problem, x: Tensor, step: int, ranks: VirtualRanks, error: float) -> bool:
    """Add a row, unless the loss is not finite."""
    sent = {"bytes_sent": ranks.bytes_sent, "wire_bits": ranks.wire_bits}
    return rows.add(problem.loss(x), problem.metrics(x), step=step, relative_error=error, **sent)


@contextmanager
def _one_thread(wanted: bool) -> Iterator[None]:
    """Let torch use one thread, if wanted."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if wanted else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _bar(label: str, steps: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar that the function advances by a step."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=not shown) as bar:
        task = bar.add_task(label, total=steps)
        yield lambda: bar.advance(task)


def _check(gradients: Sequence[Tensor]) -> None:
    if not gradients:
        raise ConfigError("no gradients were given; give one flat tensor per rank")
    for rank, gradient in enumerate(gradients):
        check_gradient(gradient, f"the gradient of rank {rank}")
        kind, expected = ((g.shape, g.dtype, g.device) for g in (gradient, gradients[0]))
        if gradient.ndim != 1 or kind != expected:
            raise ConfigError(
                f"the gradient of rank {rank} is {tuple(gradient.shape)} {gradient.dtype} on {gradient.device}, that "
                f"of rank 0 {tuple(gradients[0].shape)} {gradients[0].dtype} on {gradients[0].device}; "
                "give flat tensors of one shape, dtype and device"
            )
