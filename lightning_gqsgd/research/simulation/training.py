"""`simulate`: trains virtual workers in one process, with the objects of a real training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError, check_whole
from lightning_gqsgd.local_steps.choosing import asks_for_local_steps, options_of, pop_options
from lightning_gqsgd.presets import LOCAL_PRESETS, PRESETS, did_you_mean_preset, make_config
from lightning_gqsgd.research.simulation.local import Crowd, LocalWorkers
from lightning_gqsgd.research.simulation.problems import Problem
from lightning_gqsgd.research.simulation.record import Record, Rows
from lightning_gqsgd.research.simulation.virtual import VirtualRanks, relative_error

#: The name for training without compression.
UNCOMPRESSED = "ddp"
#: Learning rate of the default optimizer.
DEFAULT_LR = 0.1
#: Problems with fewer coordinates run on one of torch's threads: with more threads, such small operations take up to
#: five times as long on a busy machine.
SMALL = 1 << 17

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


class _EveryStep:
    """Workers whose gradients are averaged in every step."""

    def __init__(self, problem: Problem, workers: int, config: GQSGDConfig, make_optimizer: MakeOptimizer) -> None:
        self._problem = problem
        self._workers = workers
        self._parameter = torch.nn.Parameter(problem.start().clone())
        self._ranks = VirtualRanks(workers, problem.segments, self._parameter.dtype, config)
        self._optimizer = make_optimizer([self._parameter])
        self.config = self._ranks.config
        self.error = math.nan

    @property
    def x(self) -> Tensor:
        return self._parameter.data

    @property
    def bytes_sent(self) -> int:
        return self._ranks.bytes_sent

    @property
    def wire_bits(self) -> float:
        return self._ranks.wire_bits

    def train(self, step: int) -> None:
        gradients = self._problem.gradients(self.x, step, self._workers).unbind(0)
        self._parameter.grad = self._ranks.mean(gradients, step)
        self.error = relative_error(self._parameter.grad, gradients)
        self._optimizer.step()

    def finish(self) -> None:
        """Do nothing: gradients are averaged in every step."""


#: The kinds of virtual workers that `simulate` trains.
Trainer = _EveryStep | LocalWorkers


def simulate(
    preset: str | GQSGDConfig,
    problem: Problem,
    *,
    workers: int,
    steps: int,
    optimizer: MakeOptimizer | None = None,
    lr: float | None = None,
    seed: int = 0,
    record_every: int | None = None,
    progress: bool = True,
    **fields: Any,
) -> Record:
    """Train virtual workers in this process, with the codec, memory and reducer objects of a real training.

    With ``local_steps``, or a preset of local steps, each worker trains on its own, and the workers' changes are
    averaged every ``local_steps`` steps, as in `LocalSteps`. The record then describes the anchor, which all workers
    share; its bytes are means over all workers. If the last step ends a round early, there is a last average.

    Args:
        preset: name of a preset (see `presets.PRESETS`), or of a preset of local steps (see
            `presets.LOCAL_PRESETS`), ``"ddp"`` for the exact mean, or a configuration.
        problem: the problem to train on, e.g. from `problems`. The run has the dtype of its gradients.
        workers: number of virtual workers.
        steps: number of steps.
        optimizer: a function that takes a list of one flat parameter and returns an optimizer. None: SGD with the
            learning rate ``lr``. With local steps, it makes the inner optimizer, from a list with one flat parameter
            for each worker.
        lr: learning rate of the default optimizer. None: 0.1.
        seed: seed of the dither, and of the choice of workers that take part in a round. The problem has its own seed.
        record_every: number of steps between two rows of the record. None: there are about 100 rows. The last step has
            a row.
        progress: whether to show a progress bar.
        **fields: fields of `GQSGDConfig` that override the preset's. The problem decides which parameters stay
            uncompressed, so ``min_numel`` and ``exclude`` have no effect. ``warmup_steps``, ``sample_every`` and
            ``connections`` have none, either. Also ``local_steps``, the number of steps in a round, and the other
            fields of `local_steps.options.LocalOptions`. Further, ``participation``: the number of workers that take
            part in a round, drawn at random for each round (FedPAQ, arXiv 1909.13014); the anchor moves by the mean of
            their changes. And ``local_steps_of``: a list with each worker's number of steps in a round, at most
            ``local_steps`` (GenQSGD, arXiv 2110.12987); without ``local_steps``, a round has as many steps as the
            largest of them.

    Returns:
        The record. If parameters or loss stop being finite, the run ends there; see `Record.diverged_at`.

    Raises:
        ConfigError: for an unknown preset, or an argument that cannot work.
    """
    every = _interval(steps, record_every)
    trainer = _trainer(preset, problem, workers, {"seed": seed, **fields}, _maker(optimizer, lr))
    name = preset if isinstance(preset, str) else preset.describe()
    rows = Rows(problem, trainer)
    if not rows.add(trainer.x, 0, trainer.error):
        raise ConfigError(f"the loss of {problem} is not finite before training; start somewhere else")
    diverged_at = None
    small = trainer.x.numel() < SMALL
    with one_thread(small), _bar(f"{name}, {workers} workers", steps, shown=progress) as advance:
        for step in range(steps):
            trainer.train(step)
            done = step + 1
            if done == steps:
                trainer.finish()
            finite = bool(trainer.x.isfinite().all())
            if finite and (done % every == 0 or done == steps):
                finite = rows.add(trainer.x, done, trainer.error)
            if not finite:
                diverged_at = done
                break
            advance()
    return rows.record(name, workers, trainer.x, diverged_at)


def _trainer(
    preset: str | GQSGDConfig, problem: Problem, workers: int, fields: dict[str, Any], make_optimizer: MakeOptimizer
) -> Trainer:
    check_whole(workers=workers)
    known = (UNCOMPRESSED, *PRESETS, *LOCAL_PRESETS)
    if isinstance(preset, str) and preset not in known:
        near = did_you_mean_preset(preset, known)
        raise ConfigError(f"unknown preset {preset!r}{near} (presets: {', '.join(known)})")
    given = pop_options(fields)
    # Only virtual workers have these.
    virtual = {name: fields.pop(name, None) for name in ("participation", "local_steps_of")}
    if given["every"] is None and virtual["local_steps_of"] is not None:
        given["every"] = max(virtual["local_steps_of"], default=1)
    chosen = GQSGDConfig(reducer="native") if preset == UNCOMPRESSED else preset
    if not asks_for_local_steps(chosen, {**given, **virtual}):
        return _EveryStep(problem, workers, make_config(chosen, **fields), make_optimizer)
    options, compression = options_of(chosen, given)
    config = make_config(compression, **fields)
    crowd = Crowd(workers, virtual["participation"], virtual["local_steps_of"], config.seed)
    return LocalWorkers(problem, options, config, crowd, make_optimizer)


def _maker(make: MakeOptimizer | None, lr: float | None) -> MakeOptimizer:
    """Returns the function that creates the optimizer."""
    if make is None:
        return lambda parameters: torch.optim.SGD(parameters, lr=DEFAULT_LR if lr is None else lr)
    if lr is not None:
        raise ConfigError(f"lr={lr} is for the default optimizer; give it to yours, e.g. lambda p: Adam(p, lr={lr})")
    return make


def _interval(steps: int, every: int | None) -> int:
    check_whole(steps=steps, record_every=1 if every is None else every)
    return max(1, steps // 100) if every is None else every


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Make torch use one thread within this context, if ``wanted``."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if wanted else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _bar(label: str, steps: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Show a progress bar within this context, and yield a function that advances it by a step."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=not shown) as bar:
        task = bar.add_task(label, total=steps)
        yield lambda: bar.advance(task)
