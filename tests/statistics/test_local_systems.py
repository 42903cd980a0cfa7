"""The smallest experiment of every system of local steps, on virtual workers, with the numbers that were found before.

A simulation of each system by itself gave the earlier numbers (one seed, other data); the objects of the product have
to give the same relations, and orders of magnitude.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_gqsgd.simulation import simulate
from lightning_gqsgd.simulation.problems import DigitsMLP, LeastSquares, LogisticRegression, Quadratic
from lightning_gqsgd.simulation.record import Record

#: QSGD's codes with s levels and one l2 norm, which FedPAQ has.
QSGD: dict[str, Any] = {"norm": "l2", "dither": "stochastic", "block_size": 104, "reducer": "gather"}


def test_fedpaq() -> None:
    """Logistic regression, d = 100, 50 workers of which 25 take part in a round, 100 local steps; a bit takes 100/32
    times a step. At equal steps the loss rises mildly with H, and the time falls like 1/H; s = 10 is nearly as good as
    fp32, s = 1 is too coarse. Gap @ time found before: fp32 H = 1 .0100 @ 10100, fp32 H = 10 .0223 @ 1100, s = 10 H =
    10 .0215 @ 266, s = 10 H = 25 .0303 @ 166, s = 1 H = 10 .128 @ 172. The data of that table are not known, so the
    gaps differ; the times are those of the codes. On d = 100 a message is padded to a multiple of 16 bytes, which times
    leave out."""
    problem = LogisticRegression(dimension=100, rows=1000, parts=50, spread=1.0, regularisation=0.01)
    least = simulate("ddp", problem, workers=1, steps=1000, lr=1.0, progress=False).last()

    def run(preset: str, every: int, width: float, **fields: Any) -> tuple[float, float]:
        given = {"local_steps": every, "participation": 25, "outer": "sgd", **fields}
        record = simulate(preset, problem, workers=50, steps=100, lr=0.2, progress=False, **given)
        return record.last() - least, 100 + 100 / every * 100 * width / 32

    def levels(number: int, bits: int) -> dict[str, Any]:
        return {**QSGD, "levels": number, "bits": bits}

    every_step, plain = run("ddp", 1, 32), run("ddp", 10, 32)
    scale = 16 / 100
    ten = run("gqsgd_fedpaq", 10, 5 + scale, **levels(10, 5))
    seldom = run("gqsgd_fedpaq", 25, 5 + scale, **levels(10, 5))
    coarse = run("gqsgd_fedpaq", 10, 2 + scale, **levels(1, 2))
    times = [time for _, time in (every_step, plain, ten, seldom, coarse)]
    assert times == pytest.approx([10100, 1100, 266, 166, 172], rel=0.1)
    assert every_step[0] < plain[0] < ten[0] < seldom[0] < coarse[0]
    assert ten[0] == pytest.approx(plain[0], rel=0.4)
    assert seldom[0] < 0.06
    assert coarse[0] > 4 * ten[0]


@dataclass
class Uneven(LeastSquares):
    """Least squares whose workers differ in smoothness: rows of worker i have a largest eigenvalue of L_i."""

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


@pytest.mark.slow
def test_chb() -> None:
    """Least squares, d = 50, 9 workers, L_i = (1.3^i + 1)², i = 0..8, until f - f* = 1e-7: censored heavy ball needs
    about as many steps as heavy ball, with at most half of the uploads. Found before: heavy ball 227 steps and 2043
    uploads, censored 211 and 500; gradient descent 389 and 3501, censored 372 and 734."""
    problem = Uneven(dimension=50, rows=900, parts=9, noise=0.1, dtype=torch.float64)
    workers, numel, lr = 9, 50, 1 / problem.smoothness

    def run(threshold: float | None, outer: str) -> tuple[int, int]:
        """Steps and uploads until the target."""
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

    plain, censored = run(None, "heavy_ball"), run(0.1, "heavy_ball")
    print(plain, censored)
    assert censored[0] < 1.15 * plain[0]
    assert censored[1] < plain[1] / 2
    slow, slow_censored = run(None, "sgd"), run(0.1, "sgd")
    assert slow[0] > 1.4 * plain[0]
    assert slow_censored[0] < 1.15 * slow[0]
    assert slow_censored[1] < slow[1] / 2


@pytest.mark.slow
def test_sparseloco() -> None:
    """Digits, 4 workers with digits of their own, 480 steps. 1.6 % of changes at 2 bits, H = 8, are nearly as good as
    whole changes at a twentieth of the bytes. With more bytes, 2 bits of all coordinates, twice as seldom, have a
    larger loss. Found with these data: loss .222 at 3460 kB, .248 at 170 kB; H = 15 .348 at 91 kB, .405 at 109 kB."""
    problem = DigitsMLP(by_label=True)

    def run(preset: str, every: int, **fields: Any) -> Record:
        given: dict[str, Any] = {"local_steps": every, "record_every": 480, "progress": False, **fields}
        return simulate(preset, problem, workers=4, steps=480, lr=0.2, **given)

    whole, sparse = run("ddp", 8, outer="sgd"), run("gqsgd_sparseloco", 8)
    assert sparse.last() < 1.2 * whole.last()
    assert sparse.bytes_sent[-1] < whole.bytes_sent[-1] / 20
    seldom, dense = run("gqsgd_sparseloco", 15), run("gqsgd_fedpaq", 30, bits=2)
    assert seldom.bytes_sent[-1] < dense.bytes_sent[-1]
    assert seldom.last() < 0.95 * dense.last()


def test_censored_workers_that_are_at_rest_send_a_byte() -> None:
    problem = Quadratic(200, condition=1, dtype=torch.float64)
    record = simulate("gqsgd_chb", problem, workers=3, steps=60, lr=1.0, outer="sgd", record_every=1, progress=False)
    assert record.loss[-1] < 1e-20
    assert record.bytes_sent[-1] - record.bytes_sent[-11] == 10 * 2


def test_genqsgd_lets_slow_workers_make_fewer_steps() -> None:
    """10 workers, half of which make 4 steps in a round and half 1, with codes both ways. The anchor takes the mean of
    the changes. In as many rounds, that is better than 1 step of all workers, and worse than 4."""
    problem = LogisticRegression(dimension=100, rows=1000, parts=10, spread=0.3, regularisation=0.01)

    def loss(steps_of: list[int]) -> Record:
        rounds = 25
        given: dict[str, Any] = {"local_steps_of": steps_of, "reducer": "two_shot", "bits": 6}
        steps = rounds * max(steps_of)
        return simulate("gqsgd_fedpaq", problem, workers=10, steps=steps, lr=0.1, progress=False, **given)

    slow, mixed, fast = loss([1] * 10), loss([4] * 5 + [1] * 5), loss([4] * 10)
    assert slow.bytes_sent[-1] == mixed.bytes_sent[-1] == fast.bytes_sent[-1]
    assert fast.last() < mixed.last() < slow.last()
