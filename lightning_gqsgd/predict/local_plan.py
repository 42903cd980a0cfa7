"""Plans the number of local steps of each worker in a round, and the batch size, for the least energy within limits of
time and error: the plan of GenQSGD (Li, Cui, Lau, arXiv 2110.12987; journal 2111.13526).

Of n workers, worker i makes K_i steps on batches of B samples in each of K_0 rounds, and sends its change at s_i
levels; the server sends the mean at s_0 levels. With M_s = 32 + d + d log2 s bits for d coordinates at s levels, the
cycles of a sample C_i, the cycles per second F_i, the transmission power p_i, the rate r_i and the energy coefficient
a:

    time    T = K_0 (B max_i C_i/F_i K_i + C_0/F_0 + max_i M_i/r_i + M_0/r_0)
    energy  E = K_0 (B Σ a C_i F_i² K_i + a C_0 F_0² + Σ p_i M_i/r_i + p_0 M_0/r_0)
    error   C = c1/(γ K_0 Σ K_i) + c2 γ² max K_i² + c3 γ/B + c4 γ Σ q_i K_i² / Σ K_i

    c1 = 2 n (f_0 - f*),   c2 = 4 G² L²,   c3 = L σ²/n,   c4 = 2 L G²,   q_i = q(s_0) + q(s_i) + q(s_0) q(s_i),
    q(s) = min(d/s², √d/s)

with the smoothness L, the bound of gradients G, the deviation of a sample's gradient σ and the step γ. The formulas
are those of the released code, CuiYing123456/GenQSGD, which solves the problem by geometric programming. Here, workers
with equal numbers make equally many steps, and all combinations of K_i are tried. For each of them, the least energy
and time of real numbers of rounds and samples have a closed form, and integers are tried where these keep the limits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lightning_gqsgd.errors import ConfigError, check_real
from lightning_gqsgd.predict import files

#: The largest number of combinations of steps that are tried.
_MOST_COMBINATIONS = 2_000_000
#: The largest number of integers that are tried for rounds, and for the batch.
_MOST_INTEGERS = 1_000_000
#: Plans whose energies differ by less than this share count as equal.
_CLOSE = 1e-6


@dataclass(frozen=True)
class Machine:
    """A machine: a kind of workers, or the server.

    Attributes:
        cycles: cycles for the gradient of one sample; for the server, cycles of a round.
        frequency: cycles per second.
        power: watts while it sends.
        rate: bits per second that it sends.
        levels: s, number of levels of its messages, 1 or more.
        count: number of such workers.
    """

    cycles: float
    frequency: float
    power: float
    rate: float
    levels: float
    count: int = 1


@dataclass(frozen=True)
class Learning:
    """Constants of the learning problem.

    Attributes:
        dimension: d, number of coordinates.
        gap: f_0 - f*, the loss at the start minus the smallest loss.
        gradient_bound: G.
        smoothness: L.
        noise: σ.
        lr: γ, the step.
        energy_coefficient: a, joules per cycle and squared cycle per second.
    """

    dimension: int
    gap: float
    gradient_bound: float
    smoothness: float
    noise: float
    lr: float
    energy_coefficient: float


@dataclass(frozen=True)
class Limits:
    """Limits that a plan has to keep.

    Attributes:
        seconds: the longest time T.
        error: the largest bound of the mean squared gradient, C.
    """

    seconds: float
    error: float


@dataclass(frozen=True)
class LocalPlan:
    """A plan and its costs.

    Attributes:
        rounds: K_0.
        steps: K_i of each kind of workers.
        batch: B.
        energy: joules.
        seconds: T.
        error: C.
    """

    rounds: int
    steps: tuple[int, ...]
    batch: int
    energy: float
    seconds: float
    error: float


@dataclass(frozen=True)
class LocalProblem:
    """The problem that `plan` solves.

    Raises:
        ConfigError: if a number is not above 0, or if there are no workers.
    """

    workers: tuple[Machine, ...]
    server: Machine
    learning: Learning
    limits: Limits

    def __post_init__(self) -> None:
        if not self.workers:
            raise ConfigError("workers=[] leaves nobody to train; give at least one kind of workers")
        parts: list[Machine | Learning | Limits] = [*self.workers, self.server, self.learning, self.limits]
        for part in parts:
            for name, value in asdict(part).items():
                check_real(f"{type(part).__name__}.{name}", value, math.nextafter(0, 1), math.inf)

    @classmethod
    def load(cls, path: Path) -> LocalProblem:
        """Read the problem from a JSON file with the entries ``workers``, ``server``, ``learning`` and ``limits``.

        Raises:
            ConfigError: if the file cannot be read, or has other entries or numbers.
        """
        remedy = "docs/local_systems.md has an example"
        given = files.json_in(path, remedy)
        try:
            parts = files.arguments(cls, given, "the problem")
            workers = [files.arguments(Machine, entry, "workers") for entry in files.rows(parts["workers"], "workers")]
            server = files.arguments(Machine, parts["server"], "server")
            learning = files.arguments(Learning, parts["learning"], "learning")
            limits = files.arguments(Limits, parts["limits"], "limits")
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}; {remedy}") from None
        machines = tuple(Machine(**worker) for worker in workers)
        return cls(machines, Machine(**server), Learning(**learning), Limits(**limits))

    def cost(self, rounds: float, steps: Sequence[int], batch: float) -> tuple[float, float, float]:
        """Returns a plan's energy in joules, its seconds and its error, by the formulas of the module."""
        each = self._round(steps)
        c = self._errors(steps)
        energy = rounds * (batch * each.batch_energy + each.energy)
        seconds = rounds * (batch * each.batch_seconds + each.seconds)
        return energy, seconds, c.by_rounds / rounds + c.fixed + c.by_batch / batch

    def best(self, steps: Sequence[int], batch: int | None = None, below: float = math.inf) -> LocalPlan | None:
        """Returns the plan of least energy with these steps of each kind of workers; None if no plan keeps the limits.

        Args:
            steps: K_i of each kind.
            batch: B; None means the best one.
            below: the energy of another plan, in joules; plans that need as much are not returned.
        """
        errors = self._errors(steps)
        each = self._round(steps)
        left = self.limits.error - errors.fixed
        if left <= 0 or _least(errors, left, each.batch_seconds, each.seconds) > self.limits.seconds:
            return None
        if _least(errors, left, each.batch_energy, each.energy) > below * (1 - _CLOSE):
            return None
        fewest = errors.by_rounds / left
        smallest = errors.by_batch / left
        if batch is None:
            # The fewest rounds of each small batch, and the smallest batch of each small number of rounds. The real
            # numbers that keep the limit of the error have (K_0 - fewest) (B - smallest) = fewest smallest.
            spread = math.sqrt(fewest * smallest)
            batches = _integers(smallest, spread)
            rounds = _integers(fewest, spread)
            others = np.maximum(1.0, np.ceil(errors.by_batch / (left - errors.by_rounds / rounds)))
        elif batch > smallest:
            batches = np.array([float(batch)])
            rounds = others = np.array([])
        else:
            return None
        rounds = np.append(np.ceil(errors.by_rounds / (left - errors.by_batch / batches)), rounds)
        batches = np.append(batches, others)
        energies = rounds * (batches * each.batch_energy + each.energy)
        is_late = rounds * (batches * each.batch_seconds + each.seconds) > self.limits.seconds
        energies[is_late] = math.inf
        place = energies.argmin()
        if not energies[place] < below:
            return None
        size = int(batches[place])
        return LocalPlan(int(rounds[place]), tuple(steps), size, *self.cost(int(rounds[place]), steps, size))

    def most_steps(self) -> int:
        """Returns the largest number of steps of a worker that the limit of the error allows, for any other choices."""
        learning = self.learning
        c2 = 4 * learning.gradient_bound**2 * learning.smoothness**2
        return max(1, math.floor(math.sqrt(self.limits.error / c2) / learning.lr))

    def _errors(self, steps: Sequence[int]) -> _Errors:
        of = self.learning
        n = sum(worker.count for worker in self.workers)
        total = sum(worker.count * k for worker, k in zip(self.workers, steps, strict=True))
        down = self._variance(self.server)
        ups = [self._variance(worker) for worker in self.workers]
        rounding = sum(
            worker.count * (down + up + down * up) * k**2
            for worker, up, k in zip(self.workers, ups, steps, strict=True)
        )
        return _Errors(
            by_rounds=2 * n * of.gap / (of.lr * total),
            by_batch=of.smoothness * of.noise**2 / n * of.lr,
            fixed=(
                4 * of.gradient_bound**2 * of.smoothness**2 * of.lr**2 * max(steps) ** 2
                + 2 * of.smoothness * of.gradient_bound**2 * of.lr * rounding / total
            ),
        )

    def _round(self, steps: Sequence[int]) -> _Round:
        a = self.learning.energy_coefficient
        server = self.server
        pairs = list(zip(self.workers, steps, strict=True))
        sending = [(worker, self._bits(worker) / worker.rate) for worker in self.workers]
        back = self._bits(server) / server.rate
        return _Round(
            batch_energy=sum(worker.count * a * worker.cycles * worker.frequency**2 * k for worker, k in pairs),
            energy=a * server.cycles * server.frequency**2
            + sum(worker.count * worker.power * seconds for worker, seconds in sending)
            + server.power * back,
            batch_seconds=max(worker.cycles / worker.frequency * k for worker, k in pairs),
            seconds=server.cycles / server.frequency + max(seconds for _, seconds in sending) + back,
        )

    def _bits(self, machine: Machine) -> float:
        """Returns M_s."""
        d = self.learning.dimension
        return 32 + d + d * math.log2(machine.levels)

    def _variance(self, machine: Machine) -> float:
        """Returns q(s)."""
        d = self.learning.dimension
        return min(d / machine.levels**2, math.sqrt(d) / machine.levels)


@dataclass(frozen=True)
class _Errors:
    """The error is by_rounds / K_0 + by_batch / B + fixed."""

    by_rounds: float
    by_batch: float
    fixed: float


@dataclass(frozen=True)
class _Round:
    """A round takes B batch_energy + energy joules, and B batch_seconds + seconds seconds."""

    batch_energy: float
    energy: float
    batch_seconds: float
    seconds: float


def _least(errors: _Errors, left: float, by_sample: float, by_round: float) -> float:
    """Returns the least of K_0 (B ``by_sample`` + ``by_round``) over the real numbers that keep the limit of the error.

    Let r and c be the errors of rounds and batches, and R be ``left``, which the limit leaves for r/K_0 + c/B. With
    K_0 = r B / (R B - c) and u = R B - c, it is r/R² (x u + y/u + z), where x, y and z do not depend on u.
    """
    inner = by_sample * errors.by_batch
    return errors.by_rounds * ((math.sqrt(inner) + math.sqrt(inner + left * by_round)) / left) ** 2


def _integers(above: float, spread: float) -> np.ndarray:
    """Returns the integers above a number, up to one at a distance of ``spread``; of more than `_MOST_INTEGERS`, some
    whose distances grow with that from the first."""
    first = math.floor(above) + 1
    count = max(1, math.ceil(above + spread) - first + 1)
    if count <= _MOST_INTEGERS:
        return first + np.arange(float(count))
    return first - 1 + np.unique(np.geomspace(1, count, _MOST_INTEGERS).round())


def plan(problem: LocalProblem, *, batch: int | None = None, most_steps: int | None = None) -> LocalPlan:
    """Returns the plan of least energy that keeps the limits; see the module's docstring.

    Args:
        problem: workers, server, constants of the learning problem, and limits.
        batch: B; None means the best one.
        most_steps: the largest number of steps of a worker in a round; None means as many as the error allows. 1 is
            training without local steps.

    Raises:
        ConfigError: if no plan keeps the limits, or if too many would have to be tried.
    """
    most = problem.most_steps() if most_steps is None else min(most_steps, problem.most_steps())
    kinds = len(problem.workers)
    if most**kinds > _MOST_COMBINATIONS:
        raise ConfigError(
            f"{kinds} kinds of workers with up to {most} steps each are {most**kinds:,} plans, more than "
            f"{_MOST_COMBINATIONS:,}; join kinds that are alike, or give most_steps"
        )
    best = None
    for steps in itertools.product(range(1, most + 1), repeat=kinds):
        best = problem.best(steps, batch, math.inf if best is None else best.energy) or best
    if best is None:
        raise ConfigError(
            f"no plan keeps an error of {problem.limits.error:g} within {problem.limits.seconds:g} s; allow more, take "
            "a smaller lr, or more levels"
        )
    return best
