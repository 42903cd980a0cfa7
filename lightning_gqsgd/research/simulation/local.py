"""Local steps of virtual workers in one process, with the objects of `local_steps`: rounds, fragments, outer optimizer
and rule of averages.

In addition to the features of `LocalSteps`, workers may make different numbers of steps in a round (GenQSGD, arXiv
2110.12987). Also, only some workers, drawn again for each round, may take part in it (FedPAQ, arXiv 1909.13014): the
anchor then moves by the mean change of those workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError, check_integer
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.local_steps.averaging_loop import AveragingLoop, Pending
from lightning_gqsgd.local_steps.fragments import Entry, Fragment, fragments_of
from lightning_gqsgd.local_steps.options import LocalOptions
from lightning_gqsgd.local_steps.outer import make_outer
from lightning_gqsgd.local_steps.preserved import errors_by_parameter, is_preserved, own_errors, preserved
from lightning_gqsgd.local_steps.rules import MeanOf, RuleRequest, RuleRequests
from lightning_gqsgd.reducers import run_virtual
from lightning_gqsgd.reducers.memory import Keeps
from lightning_gqsgd.research.simulation.problems import Problem
from lightning_gqsgd.research.simulation.virtual import VirtualRanks, relative_error


@dataclass(frozen=True)
class Crowd:
    """The workers that take part in rounds, and their numbers of steps.

    Args:
        workers: number of workers.
        participation: number of workers that take part in a round, drawn at random without replacement for each round;
            None means all workers.
        steps_of: each worker's number of steps in a round, at least 1 and at most the steps of the round; None means
            all steps of the round.
        seed: seed of the draws.

    Raises:
        ConfigError: if a number is out of its range.
    """

    workers: int
    participation: int | None = None
    steps_of: Sequence[int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.participation is not None:
            check_integer("participation", self.participation, 1, self.workers)
        if self.steps_of is None:
            return
        if len(self.steps_of) != self.workers:
            raise ConfigError(
                f"local_steps_of={list(self.steps_of)} has {len(self.steps_of)} numbers for {self.workers} workers; "
                "give one for each worker"
            )
        for worker, steps in enumerate(self.steps_of):
            check_integer(f"local_steps_of[{worker}]", steps, 1, 2**31 - 1)

    @property
    def each_round(self) -> int:
        """Number of workers that take part in a round."""
        return self.workers if self.participation is None else self.participation

    def check(self, options: LocalOptions, config: GQSGDConfig) -> None:
        """Raise ConfigError for options that do not work with these workers or numbers of steps, and for options that
        are not simulated."""
        for name, usual in (("inner_state", "keep"), ("anchor_dtype", None), ("anchor_device", None)):
            if getattr(options, name) != usual:
                raise ConfigError(
                    f"{name}={getattr(options, name)!r} is not simulated; leave it out, or use LocalSteps"
                )
        if options.is_merged:
            raise ConfigError(
                f"local_steps={options.every_in_words()} with elastic={options.elastic}: virtual workers have no "
                "clocks and do not leave; give a number of steps"
            )
        if self.steps_of is not None:
            steps = options.steps_of_round(0)
            if callable(options.every) or max(self.steps_of) > steps:
                raise ConfigError(
                    f"local_steps_of={list(self.steps_of)} has more steps than a round of local_steps={steps}, or "
                    f"rounds differ; take local_steps={max(self.steps_of)}"
                )
        if self.participation is None or self.participation == self.workers:
            return
        if options.fragments > 1 or options.delay:
            raise ConfigError(
                f"participation={self.participation} with fragments={options.fragments} and delay={options.delay}: a "
                "worker takes part in whole rounds; take fragments=1 and delay=0"
            )
        if config.remembers or options.averaging.remembers:
            raise ConfigError(
                f"participation={self.participation} goes without a memory: others would have to know what the workers "
                "that sit a round out remember; take memory='none' and rule='mean'"
            )

    def of_round(self, number: int) -> list[int]:
        """Returns the workers that take part in a round, in order."""
        if self.each_round == self.workers:
            return list(range(self.workers))
        drawn = np.random.default_rng((self.seed, number)).permutation(self.workers)
        return sorted(drawn[: self.each_round].tolist())


class LocalWorkers(AveragingLoop["VirtualAverage"]):
    """Virtual workers that train separately.

    Args:
        problem: the problem to train on.
        options: when to average.
        config: the compression.
        crowd: the workers that take part in rounds, and their numbers of steps.
        make_optimizer: function that creates the inner optimizer from a list with one flat parameter for each worker.

    Attributes:
        config: the compression with the chosen reducer.
        error: relative L2 error of the latest mean change.

    Raises:
        ConfigError: if values cannot work.
    """

    def __init__(
        self,
        problem: Problem,
        options: LocalOptions,
        config: GQSGDConfig,
        crowd: Crowd,
        make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    ) -> None:
        start = problem.start()
        self.points = start.repeat(crowd.workers, 1)
        replicas = [_fragments(point, problem.segments, options) for point in self.points]
        super().__init__(options, replicas[0])
        self._replicas = [list(fragments) for fragments in zip(*replicas, strict=True)]  # by fragment and worker
        for first, *others in self._replicas:
            for other in others:  # the anchor has the same bits on all workers at all times
                other.bundles[0].anchors = first.bundles[0].anchors
        anchors = [anchor for fragment in self.fragments for _, anchor in fragment.entries()]
        self.outer = make_outer(options.outer, anchors)
        self._problem = problem
        self._crowd = crowd
        self._dtype = start.dtype
        self._requested = config
        self._ranks: dict[tuple[Segment, ...], VirtualRanks] = {}
        self.config = self._ranks_of(tuple(problem.segments)).config
        options.averaging.check(self.config)
        crowd.check(options, self.config)
        self._parameters = [nn.Parameter(point) for point in self.points]
        self._inner = make_optimizer(list(self._parameters))
        self._averagers = [
            [options.averaging.averager(of_worker.bundles[0], crowd.each_round) for of_worker in row]
            for row in self._replicas
        ]
        self._own_bytes = self._own_message_bytes = 0
        self._latest = self._ranks_of(tuple(problem.segments))
        self.error = math.nan

    @property
    def x(self) -> Tensor:
        """The anchors as one flat vector, [d]. All workers share them."""
        return torch.cat([anchor.flatten() for fragment in self.fragments for _, anchor in fragment.entries()])

    @property
    def preserved(self) -> Tensor:
        """The preserved model, [d]; if there is none, the anchors (see `local_steps.preserved`)."""
        errors = self._errors() if is_preserved(self.config, self.outer) else {}
        parts = [
            anchor.flatten() - errors.get(entry.segment.parameter, 0)
            for fragment in self.fragments
            for entry, anchor in fragment.entries()
        ]
        return torch.cat(parts)

    @property
    def bytes_sent(self) -> int:
        """Bytes that a worker has sent, as a mean over all workers."""
        by_ranks = sum(ranks.bytes_sent for ranks in self._ranks.values()) * self._crowd.each_round
        return (by_ranks + self._own_bytes) // self._crowd.workers

    @property
    def wire_bits(self) -> float:
        """Bits of one worker's message per coordinate in the latest average, as a mean over the workers that take
        part."""
        if self._own_message_bytes:
            return 8 * self._own_message_bytes / self._crowd.each_round / self.points.shape[1]
        return self._latest.wire_bits

    def train(self, step: int) -> None:
        """Make a step of all workers that train in this step, and the averages that are due."""
        gradients = self._problem.gradients(self.points, step, self._crowd.workers)
        done = self.step - self.rounds.begun_after
        training = set(self._crowd.of_round(self.rounds.number))
        for worker, parameter in enumerate(self._parameters):
            steps = None if self._crowd.steps_of is None else self._crowd.steps_of[worker]
            trains = worker in training and (steps is None or done < steps)
            parameter.grad = gradients[worker] if trains else None
        self._inner.step()
        self.advance()

    def finish(self) -> None:
        """Make the last average, as `LocalAverages.finish` does."""
        super().finish()
        if not is_preserved(self.config, self.outer):
            return
        for anchor, _, value in preserved(self.fragments, self._errors()):
            anchor.copy_(value)
        for replicas in self._replicas:
            for fragment in replicas:
                fragment.set_tensors()
        for ranks in self._ranks.values():
            for store in ranks.stores:
                store.forget(Keeps.DOWN_ERROR)

    def _errors(self) -> dict[int, Tensor]:
        """Returns the errors of the way back that owners remember, by parameter number."""
        errors: dict[int, Tensor] = {}
        for segments, ranks in self._ranks.items():
            numbers = [segment.parameter for segment in segments if not segment.raw]
            if numbers:
                everyone = torch.stack([own_errors(store, numbers) for store in ranks.stores])
                errors |= errors_by_parameter(ranks.stores[0], numbers, everyone)
        return errors

    def _start(self, number: int, delay: int) -> VirtualAverage:
        """Compute the whole average at once. Its mean is used when it is due, as `AveragingLoop` schedules it."""
        workers = self._crowd.of_round(self.rounds.number)
        replicas = self._replicas[number]
        changes = [replicas[worker].bundles[0].change() for worker in workers]
        exact = [change.clone() for change in changes]
        requests = [self._averagers[number][rank].requests(change) for rank, change in enumerate(changes)]
        segments = replicas[0].bundles[0].segments
        stores = self._ranks_of(segments).stores
        numbers = [segment.parameter for segment in segments if not segment.raw]
        errors = [store.errors(numbers) for store in stores]
        mean = self._answer(requests)
        if not mean.isfinite().all():  # as `LocalAverages` does with an average that is left out
            for store, error in zip(stores, errors, strict=True):
                store.put_back(error)
        self.error = relative_error(mean, exact)
        return VirtualAverage(number, self.step + delay, mean)

    def _wait(self, average: VirtualAverage) -> None:
        """Return at once: `_start` has computed the whole average."""

    def _is_finite(self, average: VirtualAverage) -> bool:
        return bool(average.mean.isfinite().all())

    def _apply(self, average: VirtualAverage, weight: float) -> None:
        """Move the anchors by the mean change, and all workers' parameters towards them by ``weight``."""
        replicas = self._replicas[average.fragment]
        replicas[0].move_anchors([average.mean], self.outer, plain=self._is_plain(average))
        for fragment in replicas:
            fragment.set_tensors(weight)

    def _go_back(self, average: VirtualAverage) -> None:
        """Set all workers' parameters back to the anchors."""
        for replicas in self._replicas:
            for fragment in replicas:
                fragment.set_tensors()

    def _answer(self, workers: Sequence[RuleRequests]) -> Tensor:
        """Run the averagers of all workers in lock-step. Returns the first worker's mean change."""
        step = self.averages * self.options.averaging.most_requests
        answer = None
        while True:
            requests: list[RuleRequest] = []
            for worker in workers:
                try:
                    requests.append(next(worker) if answer is None else worker.send(answer))
                except StopIteration as end:
                    mean = end.value
            if not requests:
                return mean
            answer = self._mean_of(requests, step)
            step += 1

    def _mean_of(self, requests: Sequence[RuleRequest], step: int) -> Tensor:
        first = requests[0]
        if isinstance(first, MeanOf):
            self._latest = self._ranks_of(first.segments)
            return self._latest.mean([request.x for request in requests], step)
        exchanges = [request for request in requests if not isinstance(request, MeanOf)]
        if len(exchanges) > 1:
            run_virtual([own.start() for own in exchanges])
        self._own_bytes += sum(own.sent_bytes for own in exchanges)
        self._own_message_bytes = sum(own.message_bytes for own in exchanges)
        return first.x

    def _ranks_of(self, segments: tuple[Segment, ...]) -> VirtualRanks:
        if segments not in self._ranks:
            device = self.points.device
            ranks = VirtualRanks(self._crowd.each_round, segments, self._dtype, self._requested, device=device)
            self._ranks[segments] = ranks
        return self._ranks[segments]


@dataclass(eq=False)
class VirtualAverage(Pending):
    """An average that is not used yet."""

    mean: Tensor


def _fragments(point: Tensor, segments: Sequence[Segment], options: LocalOptions) -> list[Fragment]:
    """Returns the fragments of one worker's flat parameter. Their tensors are views of it."""
    views = point.split([segment.numel for segment in segments])
    entries = [
        Entry(segment, f"parameter {segment.parameter}", view, False)
        for segment, view in zip(segments, views, strict=True)
    ]
    return fragments_of(entries, [], options)
