"""The smallest experiments of systems of local steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from lightning_gqsgd.local_steps.choosing import make_local
from lightning_gqsgd.local_steps.rules.multi_step import MultiStep
from lightning_gqsgd.predict.local_plan import Learning, Limits, LocalProblem, Machine, plan
from lightning_gqsgd.research.experiments.rows import Row, normal, virtual
from lightning_gqsgd.research.simulation import simulate
from lightning_gqsgd.research.simulation.local import Crowd, LocalWorkers
from lightning_gqsgd.research.simulation.problems import DigitsMLP, LeastSquares, LogisticRegression
from lightning_gqsgd.research.simulation.record import Record

#: QSGD's codes with s levels and one l2 norm, which FedPAQ has.
QSGD: dict[str, Any] = {"norm": "l2", "dither": "stochastic", "block_size": 104, "reducer": "gather"}


def diloco() -> Iterator[Row]:
    """DiLoCo on the digits, from a network that is trained from scratch."""
    problem = DigitsMLP()

    def run(preset: str, **fields: Any) -> Record:
        return simulate(preset, problem, workers=4, steps=640, lr=0.2, record_every=640, progress=False, **fields)

    every_step = run("ddp")
    seldom = run("gqsgd_diloco")
    fewer = every_step.bytes_sent[-1] / seldom.bytes_sent[-1]
    yield Row("32 local steps at 4 bits: over 100 times fewer bytes", f"{fewer:.0f} times", fewer > 100)
    yield Row(
        "about as good as averaging in each step: within 2 points",
        f"accuracy {seldom.last('accuracy'):.3f}, {every_step.last('accuracy'):.3f}",
        seldom.last("accuracy") > every_step.last("accuracy") - 0.02,
    )


@cache
def _shared_regression() -> tuple[LogisticRegression, float]:
    """Returns logistic regression, d = 100, of which 50 workers have a part each; and its smallest loss."""
    problem = LogisticRegression(dimension=100, rows=1000, parts=50, spread=1.0, regularisation=0.01)
    return problem, simulate("ddp", problem, workers=1, steps=600, lr=1.0, progress=False).last()


def half_of_workers(preset: str, every: int, width: float, **fields: Any) -> tuple[float, float]:
    """Returns the loss above its minimum after 100 steps, with 25 of 50 workers in each round; and the time, in steps.

    Args:
        preset: name of the preset.
        every: number of steps of a round.
        width: bits per coordinate of a message. A bit of all coordinates takes 100/32 of the time of a step.
        **fields: fields of `GQSGDConfig`.
    """
    problem, least = _shared_regression()
    given = {"local_steps": every, "participation": 25, "outer": "sgd", **fields}
    record = simulate(preset, problem, workers=50, steps=100, lr=0.2, progress=False, **given)
    return record.last() - least, 100 + 100 / every * 100 * width / 32


def fedpaq() -> Iterator[Row]:
    """FedPAQ: partial participation, periodic averaging and quantised messages."""
    plain = half_of_workers("ddp", 10, 32)
    fine = half_of_workers("gqsgd_fedpaq", 10, 5.16, **QSGD, levels=10, bits=5)
    coarse = half_of_workers("gqsgd_fedpaq", 10, 2.16, **QSGD, levels=1, bits=2)
    words = f"gap {fine[0]:.3g}, fp32 {plain[0]:.3g}"
    yield Row("10 levels lose little, with half of 50 workers in a round", words, fine[0] < 1.4 * plain[0])
    times = f"{fine[1]:.0f}, fp32 {plain[1]:.0f}"
    yield Row("time, a bit taking 100/32 of a step: 266 against 1100", times, abs(fine[1] - 266) < 0.1 * 266)
    yield Row("1 level is too coarse", f"gap {coarse[0]:.3g}", coarse[0] > 3 * fine[0])


def genqsgd() -> Iterator[Row]:
    """GenQSGD's energies, with the constants of its released code, and workers that make different numbers of steps."""
    machine = partial(Machine, cycles=1e8, power=1.5, rate=5e6, levels=2**14, count=5)
    problem = LocalProblem(
        workers=(machine(frequency=1e10 / 6), machine(frequency=2e9 / 6)),
        server=Machine(cycles=100, frequency=3e9, power=20, rate=7.5e7, levels=2**32),
        learning=Learning(
            dimension=128 * 784,
            gap=2.5,
            gradient_bound=33.63,
            smoothness=0.084,
            noise=33.18,
            lr=0.01,
            energy_coefficient=2e-28,
        ),
        limits=Limits(seconds=1e6, error=0.25),
    )
    energies = {"6438": plan(problem), "7911": plan(problem, batch=1), "14555": plan(problem, most_steps=1)}
    names = ("least energy", "one sample per step", "one step per round")
    for name, (stated, found) in zip(names, energies.items(), strict=True):
        yield Row(f"{name}: {stated} J", f"{found.energy:.0f} J", abs(found.energy / float(stated) - 1) < 1e-3)
    logistic = LogisticRegression(dimension=100, rows=1000, parts=10, spread=0.3, regularisation=0.01)

    def loss(steps_of: list[int]) -> float:
        given: dict[str, Any] = {"local_steps_of": steps_of, "bits": 6, "progress": False}
        return simulate("gqsgd_genqsgd", logistic, workers=10, steps=25 * max(steps_of), lr=0.1, **given).last()

    slow, mixed, fast = loss([1] * 10), loss([4] * 5 + [1] * 5), loss([4] * 10)
    words = f"{fast:.3g} < {mixed:.3g} < {slow:.3g}"
    yield Row("slow workers may make fewer steps: loss between those of 4 and of 1 step", words, fast < mixed < slow)


def sparseloco() -> Iterator[Row]:
    """SparseLoCo on the digits, in which each worker has its own digits."""
    problem = DigitsMLP(by_label=True)

    def run(preset: str, **fields: Any) -> Record:
        given: dict[str, Any] = {"local_steps": 8, "record_every": 320, "progress": False, **fields}
        return simulate(preset, problem, workers=4, steps=320, lr=0.2, **given)

    whole = run("ddp", outer="sgd")
    sparse = run("gqsgd_sparseloco")
    fewer = whole.bytes_sent[-1] / sparse.bytes_sent[-1]
    yield Row("1.6 % of changes at 2 bits: a twentieth of the bytes", f"1/{fewer:.1f}", fewer > 20)
    yield Row(
        "nearly as good as whole changes",
        f"loss {sparse.last():.3g}, {whole.last():.3g}",
        sparse.last() < 1.3 * whole.last(),
    )


@dataclass
class Uneven(LeastSquares):
    """Least squares whose workers differ in smoothness: the largest eigenvalue for the rows of worker i is L_i."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.features *= torch.logspace(0, -0.7, self.dimension).double()
        of_row = torch.arange(self.rows) * self.parts // self.rows
        for worker in range(self.parts):
            own = self.features[of_row == worker]
            largest = float(torch.linalg.eigvalsh(own.T @ own / len(own))[-1])
            self.features[of_row == worker] = own * math.sqrt((1.3**worker + 1) ** 2 / largest)
        generator = torch.Generator().manual_seed(1)
        self.targets = self.features @ self.truth + self.noise * torch.randn(self.rows, generator=generator).double()
        hessian = self.features.T @ self.features / self.rows
        self.optimum = torch.linalg.solve(hessian, self.features.T @ self.targets / self.rows)
        self.smoothness = float(torch.linalg.eigvalsh(hessian)[-1])


def uploads(problem: Uneven, threshold: float | None, outer: str) -> tuple[int, int]:
    """Returns the number of steps until f - f* = 1e-7, and the number of uploads of all workers until then.

    Args:
        problem: the problem, with d = 50 and 9 workers.
        threshold: threshold of censoring; None means no censoring.
        outer: the outer optimizer.
    """
    workers, numel, lr = 9, 50, 1 / problem.smoothness
    rule = {} if threshold is None else {"rule": {"name": "censored", "threshold": threshold}}
    given: dict[str, Any] = {"outer": outer, "bits": 32, "record_every": 1, "progress": False, **rule}
    record = simulate(
        "gqsgd_chb" if rule else "gqsgd_fedpaq",
        problem,
        workers=workers,
        steps=400,
        lr=lr,
        **{"local_steps": 1, **given},
    )
    steps = int(record.step[record.metrics["excess"] <= 1e-7][0])
    if threshold is None:
        return steps, steps * workers
    whole = record.bytes_sent[record.step == steps][0] * workers
    return steps, round((whole - steps * workers * (workers - 1)) / ((workers - 1) * numel * 8))


def chb() -> Iterator[Row]:
    """Censored heavy ball: as many steps, with half of the uploads."""
    problem = Uneven(dimension=50, rows=900, parts=9, noise=0.1, dtype=torch.float64)
    plain = uploads(problem, None, "heavy_ball")
    censored = uploads(problem, 0.1, "heavy_ball")
    yield Row("about as many steps as heavy ball", f"{censored[0]}, {plain[0]}", censored[0] < 1.15 * plain[0])
    yield Row("at most half of its uploads", f"{censored[1]}, {plain[1]}", censored[1] < plain[1] / 2)


def left_over(messages: int) -> float:
    """Returns the share of |x|² that R messages of the largest 5 of 100 coordinates leave out; x is normal."""
    x = normal(0, 100)
    rank = virtual(1, 100, "topk_ef", density=0.05, block_size=104)
    total = rank.mean([x], 0)
    for step in range(1, messages):
        total = total + rank.mean([torch.zeros_like(x)], step)
    return float((x - total).square().sum() / x.square().sum())


def neolithic() -> Iterator[Row]:
    """NEOLITHIC's messages, and their rate at as many messages."""
    for messages in (4, 16):
        left = left_over(messages)
        bound = 0.95**messages
        yield Row(f"{messages} messages lose at most (1 - δ)^{messages} = {bound:.3g}", f"{left:.3g}", left <= bound)

    def best(messages: int) -> float:
        problem = LeastSquares(dimension=100, rows=4000, parts=8, spread=0.5, batch=4 * messages)
        given: dict[str, Any] = {"block_size": 104, "rule": MultiStep(messages), "progress": False}
        steps = 800 // messages
        runs = (
            simulate("gqsgd_neolithic", problem, workers=8, steps=steps, lr=lr, record_every=steps, **given)
            for lr in (0.02, 0.05, 0.1)
        )
        return min(run.last("excess") for run in runs)

    several = best(4)
    one = best(1)
    yield Row(
        "at as many messages, no worse than one for each batch, at the best of 3 steps",
        f"{several:.3g}, {one:.3g}",
        several < 1.05 * one,
    )


def plateau(preset: str, steps: int) -> float:
    """Returns the mean excess in the second half of noisy least squares, with 10 workers and batches of 16; d = 20."""
    problem = LeastSquares(dimension=20, rows=2000, parts=10, spread=1.0, batch=16)
    lr = 1 / (8 * problem.smoothness * (1 + math.sqrt(20)))
    given: dict[str, Any] = {"block_size": 24, "record_every": 10, "progress": False}
    return simulate(preset, problem, workers=10, steps=steps, lr=lr, **given).last("excess", rows=steps // 20)


def mcm_plateaus(steps: int) -> tuple[float, float]:
    """Returns the plateaus of MCM's preserved model, and of the model that its ranks have; see `plateau`."""
    problem = LeastSquares(dimension=20, rows=2000, parts=10, spread=1.0, batch=16)
    lr = 1 / (8 * problem.smoothness * (1 + math.sqrt(20)))
    options, config = make_local("gqsgd_mcm", {}, {"block_size": 24})
    workers = LocalWorkers(problem, options, config, Crowd(10), lambda parameters: torch.optim.SGD(parameters, lr=lr))
    excess = []
    for step in range(steps):
        workers.train(step)
        if step >= steps // 2 and step % 10 == 0:
            excess.append([problem.metrics(x)["excess"] for x in (workers.preserved, workers.x)])
    preserved, common = torch.tensor(excess).mean(0).tolist()
    return preserved, common


def mcm() -> Iterator[Row]:
    """MCM's plateaus on noisy least squares."""
    diana, artemis = (plateau(preset, 1200) for preset in ("diana", "artemis"))
    preserved, common = mcm_plateaus(1200)
    yield Row(
        "the way back costs little: the model of ranks is near DIANA, which compresses one way",
        f"{common:.3g}, {diana:.3g}",
        common < 2 * diana,
    )
    yield Row("far below Artemis", f"{common:.3g}, {artemis:.3g}", common < artemis / 2)
    words = f"{preserved:.3g}, the model of ranks {common:.3g}"
    yield Row("the preserved model lacks the noise of the way back", words, preserved < 0.9 * common)


def predictive_run(rule: str) -> Record:
    """Train the preset of predictive coding with a rule: digits, 5 workers, rounds of 10 steps of Adam."""
    problem = DigitsMLP(hidden=64)
    problem.segments = [segment._replace(raw=False) for segment in problem.segments]
    given: dict[str, Any] = {"local_steps": 10, "rule": rule, "record_every": 10, "progress": False}
    return simulate(
        "gqsgd_predictive", problem, workers=5, steps=200, optimizer=lambda p: torch.optim.Adam(p, lr=1e-3), **given
    )


def predictive() -> Iterator[Row]:
    """Predictive coding on the digits."""
    plain = predictive_run("mean")
    predicted = predictive_run("predicted")
    errors = float(predicted.relative_error[5:].mean()), float(plain.relative_error[5:].mean())
    yield Row("smaller errors than changes themselves", f"{errors[0]:.3g}, {errors[1]:.3g}", errors[0] < errors[1])
    taken = 1 - float(predicted.wire_bits[-1]) / 32
    yield Row("takes at least 97 % off fp32", f"{taken:.1%}", taken > 0.97)
