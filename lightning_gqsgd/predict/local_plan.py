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
with equal numbers make equally many steps, and all combinations of K_i are tried. For each of them, the best real
numbers of rounds and samples have a closed form, and the integers around it are searched, see `_Search`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_gqsgd.errors import ConfigError, check_real
from lightning_gqsgd.predict import files

#: The largest number of combinations of steps that are tried.
_MOST_COMBINATIONS = 2_000_000
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
        c = self._errors(steps)
        left = self.limits.error - c.fixed
        if left <= 0:
            return None
        search = _Search(self._round(steps), c, left, self.limits.seconds, below)
        if batch is None:
            search.over_batches()
            search.over_rounds()
        else:
            search.try_batch(batch)
        if search.found is None:
            return None
        rounds, size = search.found
        return LocalPlan(rounds, tuple(steps), size, *self.cost(rounds, steps, size))

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


class _Search:
    """Searches the integers K_0 and B of least energy, for given steps of all workers.

    Let R be the error that is left for rounds and batches, r/K_0 + c/B <= R. A round takes (a B + b) joules. As real
    numbers, K_0 = r B / (R B - c), so the energy is r (a B + b) B / (R B - c), with its minimum at the positive root of
    a R B² - 2 a c B - b c = 0. On both sides of it, the energy rises.

    An integer plan needs at least as much energy and time as the real numbers at the same B or K_0. So the search goes
    from the root to both sides, until the energy of the real numbers exceeds that of the best plan, or until their time
    exceeds the limit. Where B is small, it goes over B, and where K_0 is small, over K_0, because the smaller number
    changes most by being rounded up. They meet at (K_0 - r/R) = (B - c/R).

    Args:
        each: energy and seconds of a round.
        c: the errors.
        left: R.
        seconds: the limit of time.
        below: the energy of the best plan so far, in joules.

    Attributes:
        found: K_0 and B of the best plan; None if there is none.
    """

    def __init__(self, each: _Round, c: _Errors, left: float, seconds: float, below: float) -> None:
        self.found: tuple[int, int] | None = None
        self._each = each
        self._c = c
        self._left = left
        self._seconds = seconds
        self._below = below
        self._root = c.by_batch / left * (1 + math.sqrt(1 + left * each.energy / (each.batch_energy * c.by_batch)))
        self._spread = math.sqrt(c.by_rounds * c.by_batch) / left

    def over_batches(self) -> None:
        """Search over B, where it is small."""
        c = self._c
        each = self._each
        window = _between_roots(
            c.by_rounds * each.batch_seconds / self._seconds,
            c.by_rounds * each.seconds / self._seconds - self._left,
            c.by_batch,
        )
        self._outward(self._root, c.by_batch / self._left, window, self.try_batch)

    def over_rounds(self) -> None:
        """Search over K_0, where it is small."""
        c = self._c
        each = self._each
        window = _between_roots(
            (c.by_batch * each.batch_seconds + each.seconds * self._left) / self._seconds,
            -c.by_rounds * each.seconds / self._seconds - self._left,
            c.by_rounds,
        )
        start = c.by_rounds / (self._left - c.by_batch / self._root)
        self._outward(start, c.by_rounds / self._left, window, self._try_rounds)

    def try_batch(self, batch: int) -> float:
        """Try B with the fewest rounds. Returns the energy of the real numbers."""
        remaining = self._left - self._c.by_batch / batch
        if remaining <= 0:
            return 0.0
        rounds = self._c.by_rounds / remaining
        self._try(max(1, math.ceil(rounds)), batch)
        return self._energy(max(1.0, rounds), batch)

    def _try_rounds(self, rounds: int) -> float:
        """Try K_0 with the smallest batch. Returns the energy of the real numbers."""
        remaining = self._left - self._c.by_rounds / rounds
        if remaining <= 0:
            return 0.0
        batch = self._c.by_batch / remaining
        self._try(rounds, max(1, math.ceil(batch)))
        return self._energy(rounds, max(1.0, batch))

    def _try(self, rounds: int, batch: int) -> None:
        """Keep a plan that keeps the limit of time and needs less energy than the best one."""
        each = self._each
        energy = self._energy(rounds, batch)
        if energy < self._below and rounds * (batch * each.batch_seconds + each.seconds) <= self._seconds:
            self._below = energy
            self.found = rounds, batch

    def _energy(self, rounds: float, batch: float) -> float:
        return rounds * (batch * self._each.batch_energy + self._each.energy)

    def _outward(
        self, start: float, above: float, window: tuple[float, float] | None, attempt: Callable[[int], float]
    ) -> None:
        """Try integers from ``start`` to both sides.

        Args:
            start: the real number of least energy.
            above: all numbers have to be larger.
            window: the smallest and the largest number that may keep the limit of time; None if there are none.
            attempt: tries a number, and returns the energy of the real numbers.
        """
        if window is None:
            return
        first = max(1, math.floor(above) + 1, math.floor(window[0]))
        last = math.ceil(min(above + self._spread, window[1]))
        begin = max(first, math.ceil(min(start, last)))
        for numbers in (range(begin, last + 1), range(min(begin, last + 1) - 1, first - 1, -1)):
            for number in numbers:
                if attempt(number) > self._below * (1 - _CLOSE):
                    break


def _between_roots(square: float, linear: float, constant: float) -> tuple[float, float] | None:
    """Returns the positive numbers x with ``square`` x² + ``linear`` x + ``constant`` <= 0, as an interval; None if
    there are none. ``square`` is at least 0, and ``constant`` is above 0."""
    inner = linear * linear - 4 * square * constant
    if linear >= 0 or inner < 0:
        return None
    numerator = -linear + math.sqrt(inner)
    return 2 * constant / numerator, numerator / (2 * square) if square else math.inf


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
