"""Proximal training over a graph: DPSVRG, and DSPG to compare it with.

Workers minimise F(x) = mean of f_i(x) + λ |x|_1 and exchange models with their neighbours only (Li, Xu, Wang, Wang, Lui
2021, arXiv 2112.10389; the equations are those of the reference, derived from the abstract and the parent methods).
In one inner step, worker i has

    v_i = ∇f_i(x_i; batch) - ∇f_i(s_i; batch) + ∇f_i(s_i)      (SVRG; s_i is the worker's latest snapshot),
    y_i = x_i - a v_i,   y <- W^c y   (c rounds of gossip),   x_i = soft(y_i, a λ),

and takes a snapshot, with its full gradient, whenever a stage of K_s = ceil(growth^s first) inner steps begins. The
number of rounds c of gossip grows by one with each inner step of a stage, up to a limit. DSPG takes v_i to be the
gradient of a batch, one round of gossip, and a step that falls with 1/sqrt(t).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from lightning_gqsgd.errors import ConfigError, check_at_least, check_positive
from lightning_gqsgd.research.optim.proximal import soft_threshold
from lightning_gqsgd.research.simulation.graph import Graph
from lightning_gqsgd.research.simulation.problems import Problem


@dataclass(frozen=True)
class Penalised:
    """F(x) = mean of f_i(x) + λ |x|_1, with gradients of batches and full gradients of f_i.

    Args:
        batches: the problem with gradients of batches.
        whole: the same problem with full gradients.
        l1: λ, at least 0.
        batch_share: number of samples of a batch divided by that of a full gradient, above 0 and at most 1; for the
            budget.

    Raises:
        ConfigError: if a number is out of its range.
    """

    batches: Problem
    whole: Problem
    l1: float
    batch_share: float

    def __post_init__(self) -> None:
        check_at_least(0, l1=self.l1)
        if not 0 < self.batch_share <= 1:
            raise ConfigError(f"batch_share={self.batch_share!r} is out of range: above 0, and at most 1")

    def objective(self, x: Tensor) -> float:
        """Returns F(x)."""
        return self.whole.loss(x) + self.l1 * float(x.abs().sum())


@dataclass
class GossipRecord:
    """Record of a run over a graph.

    Attributes:
        objective: F at the mean of all workers' models, after each stage (for DSPG, after each epoch).
        epochs: full gradients' worth of samples that each worker has seen by then.
        rounds: rounds of gossip by then.
        disagreement: l2 distance of the models from their mean, over all workers, by then.
        models: models of the workers at the end, [workers, d].
        bytes_sent: bytes that the busiest worker has sent in all rounds.
    """

    models: Tensor
    objective: list[float] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    disagreement: list[float] = field(default_factory=list)
    bytes_sent: int = 0

    def note(self, problem: Penalised, graph: Graph, epochs: float, rounds: int) -> None:
        """Add a row for the current models."""
        mean = self.models.mean(0)
        self.objective.append(problem.objective(mean))
        self.epochs.append(epochs)
        self.rounds.append(rounds)
        self.disagreement.append(float((self.models - mean).norm()))
        self.bytes_sent = rounds * graph.sent_bytes(mean.numel(), mean.element_size())


@dataclass(frozen=True)
class DPSVRG:
    """Decentralised proximal SVRG; see the module's docstring.

    Args:
        lr: step a, above 0.
        first: number of inner steps of the first stage, at least 1.
        growth: factor from one stage's number of inner steps to the next one's, at least 1.
        most_rounds: largest number of rounds of gossip after an inner step, at least 1. With 1, there is always one
            round.

    Raises:
        ConfigError: if a number is out of its range.
    """

    lr: float
    first: int = 10
    growth: float = 1.1
    most_rounds: int = 4

    def __post_init__(self) -> None:
        check_positive(lr=self.lr)
        check_at_least(1, first=self.first, growth=self.growth, most_rounds=self.most_rounds)

    def run(self, problem: Penalised, graph: Graph, epochs: float) -> GossipRecord:
        """Train until the workers have seen ``epochs`` full gradients' worth of samples; the last stage is finished."""
        x = problem.whole.start().repeat(graph.ranks, 1)
        record = GossipRecord(x)
        seen = 0.0
        rounds = 0
        step = 0
        stage = 0
        record.note(problem, graph, seen, rounds)
        while seen < epochs:
            snapshot = x
            full = problem.whole.gradients(snapshot, step, graph.ranks)
            inner = math.ceil(self.growth**stage * self.first)
            for k in range(inner):
                fresh, stale = (problem.batches.gradients(at, step, graph.ranks) for at in (x, snapshot))
                times = min(1 + k, self.most_rounds)
                y = graph.mix(x - self.lr * (fresh - stale + full), times)
                x = soft_threshold(y, self.lr * problem.l1)
                rounds = rounds + times
                step = step + 1
            seen += 1 + 2 * inner * problem.batch_share
            stage += 1
            record.models = x
            record.note(problem, graph, seen, rounds)
        return record


@dataclass(frozen=True)
class DSPG:
    """Decentralised stochastic proximal gradient: a round of gossip in each step, whose length is lr / sqrt(1 + t/tau).

    Args:
        lr: first step, above 0.
        tau: number of steps after which the step is lr / sqrt(2), above 0.

    Raises:
        ConfigError: if a number is out of its range.
    """

    lr: float
    tau: float = 1.0

    def __post_init__(self) -> None:
        check_positive(lr=self.lr, tau=self.tau)

    def run(self, problem: Penalised, graph: Graph, epochs: float) -> GossipRecord:
        """Train until the workers have seen ``epochs`` full gradients' worth of samples."""
        x = problem.whole.start().repeat(graph.ranks, 1)
        record = GossipRecord(x)
        record.note(problem, graph, 0.0, 0)
        per_epoch = max(1, round(1 / problem.batch_share))
        for step in range(math.ceil(epochs * per_epoch)):
            lr = self.lr / math.sqrt(1 + step / self.tau)
            y = graph.mix(x - lr * problem.batches.gradients(x, step, graph.ranks))
            x = record.models = soft_threshold(y, lr * problem.l1)
            if (step + 1) % per_epoch == 0:
                record.note(problem, graph, (step + 1) * problem.batch_share, step + 1)
        return record
