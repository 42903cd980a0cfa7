"""The plan of local steps of GenQSGD, and what the command line says of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lightning_gqsgd.cli.app import app
from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.predict.local_plan import Learning, Limits, LocalProblem, Machine, plan

#: Ten workers, half of them five times as fast, and the constants of the released code, CuiYing123456/GenQSGD.
WORKER: dict[str, Any] = {"cycles": 1e8, "power": 1.5, "rate": 5e6, "levels": 2**14, "count": 5}
GIVEN: dict[str, Any] = {
    "workers": [{**WORKER, "frequency": 1e10 / 6}, {**WORKER, "frequency": 2e9 / 6}],
    "server": {"cycles": 100, "frequency": 3e9, "power": 20, "rate": 7.5e7, "levels": 2**32},
    "learning": {
        "dimension": 128 * 784,
        "gap": 2.5,
        "gradient_bound": 33.63,
        "smoothness": 0.084,
        "noise": 33.18,
        "lr": 0.01,
        "energy_coefficient": 2e-28,
    },
    "limits": {"seconds": 1e6, "error": 0.25},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The problem as a file."""
    file = tmp_path / "problem.json"
    file.write_text(json.dumps(GIVEN))
    return file


def test_energies_of_genqsgd_at_a_speed_ratio_of_five(path: Path) -> None:
    """Found before: GenQSGD 6438 J, PR-SGD (B = 1) 7911, FedAvg 11182, PM-SGD (K = 1) 14555. FedAvg has a
    fixed number of samples in a round, which that table does not say; 3 steps on batches of 10 have that energy."""
    problem = LocalProblem.load(path)
    assert plan(problem).energy == pytest.approx(6438, rel=1e-4)
    assert plan(problem, batch=1).energy == pytest.approx(7911, rel=1e-4)
    given = problem.best((3, 3), batch=10)
    assert given is not None
    assert given.energy == pytest.approx(11182, rel=1e-4)
    assert plan(problem, most_steps=1).energy == pytest.approx(14555, rel=1e-4)
    assert (plan(problem).steps, plan(problem).batch, plan(problem).rounds) == ((4, 4), 2, 835)


def test_no_neighbour_of_the_plan_is_better_within_the_limits(path: Path) -> None:
    problem = LocalProblem.load(path)
    problem = dataclasses.replace(problem, limits=dataclasses.replace(problem.limits, seconds=1900))
    best = plan(problem)
    assert best.seconds <= 1900
    assert best.error <= 0.25
    assert best.energy > 6438  # the limit of time costs energy
    for change in itertools.product((-1, 0, 1), repeat=4):
        rounds, batch = best.rounds + change[0], best.batch + change[1]
        steps = [k + more for k, more in zip(best.steps, change[2:], strict=True)]
        if min(batch, *steps) >= 1:
            energy, seconds, error = problem.cost(rounds, steps, batch)
            assert energy >= best.energy or seconds > 1900 or error > 0.25


def _least_energy(problem: LocalProblem, steps: tuple[int, ...]) -> float:
    """The least energy of all plans with at most 300 rounds and batches of at most 300; infinity if there is none."""
    numbers = torch.arange(1, 301, dtype=torch.float64)
    energy, seconds, error = map(torch.as_tensor, problem.cost(numbers[:, None], steps, numbers))  # type: ignore[arg-type]
    kept = (error <= problem.limits.error) & (seconds <= problem.limits.seconds)
    return float(energy[kept].min()) if kept.any() else math.inf


@pytest.mark.parametrize("seconds", [3, 30, 300, math.inf])
@pytest.mark.parametrize("noise", [1, 10, 30])
@pytest.mark.parametrize("cycles", [1e6, 1e8, 1e9])
def test_no_plan_that_keeps_the_limits_is_cheaper(seconds: float, noise: float, cycles: float) -> None:
    """With few rounds or small batches, it matters most that both are integers."""
    worker = Machine(cycles=cycles, frequency=2e9, power=1, rate=1e7, levels=100, count=4)
    server = Machine(cycles=1e8, frequency=3e9, power=20, rate=1e8, levels=100)
    for error in (2, 5, 20, 100):
        learning = Learning(1000, 2, gradient_bound=0.5, smoothness=0.5, noise=noise, lr=0.1, energy_coefficient=1e-28)
        problem = LocalProblem((worker,), server, learning, Limits(seconds, error))
        for steps in ((1,), (2,), (4,)):
            least = _least_energy(problem, steps)
            best = problem.best(steps)
            assert (best is None) == math.isinf(least)
            assert best is None or best.energy <= least * (1 + 1e-6)


def test_a_plan_of_one_round_is_found_within_a_limit_of_time() -> None:
    """There had been none, because only batches around the best real number were tried."""
    worker = Machine(cycles=1e9, frequency=1e9, power=50, rate=1e5, levels=100, count=4)  # a second for a sample
    server = Machine(cycles=1, frequency=1e9, power=1, rate=1e6, levels=100)
    learning = Learning(
        dimension=1000, gap=1, gradient_bound=0.1, smoothness=0.1, noise=100, lr=0.1, energy_coefficient=1e-30
    )
    made = plan(LocalProblem((worker,), server, learning, Limits(seconds=90, error=5)))
    assert (made.rounds, made.steps, made.batch) == (1, (7,), 12)
    assert (made.seconds <= 90, made.error <= 5) == (True, True)


def test_slow_workers_make_fewer_steps_where_time_is_short(path: Path) -> None:
    problem = LocalProblem.load(path)
    shortest = next(
        found
        for seconds in range(1000, 3000, 20)
        if (
            found := _planned(dataclasses.replace(problem, limits=dataclasses.replace(problem.limits, seconds=seconds)))
        )
    )
    assert shortest.steps[1] < shortest.steps[0]


def _planned(problem: LocalProblem) -> Any:
    try:
        return plan(problem)
    except ConfigError:
        return None


def test_the_command_line(path: Path) -> None:
    result = CliRunner().invoke(app, ["advise", "--local-steps", str(path)])
    assert result.exit_code == 0, result.output
    assert "least energy: 835 rounds of 4, 4 local steps (by kind of workers) on batches of 2: 6438 J" in result.stdout
    assert "one step per round: 2323 rounds, batches of 3: 14555 J" in result.stdout
    result = CliRunner().invoke(app, ["advise", "--local-steps", str(path), "--json"])
    assert json.loads(result.stdout)["others"]["one sample per step"]["energy"] == pytest.approx(7911, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"limits": {"seconds": 10, "error": 0.25}}, "no plan keeps an error of 0.25 within 10 s"),
        (
            {"limits": {"seconds": 10}},
            "problem.json: limits is a dictionary without error; docs/local_",
        ),
        (
            {"limits": {"seconds": 10, "errors": 0.25}},
            "limits is a dictionary without error and with the unknown errors",
        ),
        ({"workers": []}, "leaves nobody to train"),
        ({"workers": [3]}, "workers is 3, and not a dictionary"),
        ({"server": {**GIVEN["server"], "rate": 0}}, "Machine.rate=0 is out of range"),
        ({"other": 1}, "the problem is a dictionary with the unknown other"),
    ],
)
def test_what_cannot_work_is_one_line(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    file = tmp_path / "problem.json"
    file.write_text(json.dumps({**GIVEN, **change}))
    with pytest.raises(ConfigError, match=words):
        plan(LocalProblem.load(file))
    result = CliRunner().invoke(app, ["advise", "--local-steps", str(file)])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [("--model", "a:b"), ("--link", "1gbit"), ("--nodes", "4"), ("--codec", "h100"), ("--plot", "a.png")],
)
def test_options_of_clusters_are_refused_beside_local_steps(option: str, value: str, path: Path) -> None:
    result = CliRunner().invoke(app, ["advise", "--local-steps", str(path), option, value])
    assert result.exit_code == 2
    assert f"{option}: no effect beside --local-steps, whose file has all numbers; leave out either" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    for path, words in (
        (tmp_path / "x.json", "is not JSON"),
        (tmp_path / "y.json", "cannot be read"),
        (Path("/dev/zero"), "is not a regular file"),
    ):
        with pytest.raises(ConfigError, match=f"{path} {words}.*; docs/local_systems.md has an example"):
            LocalProblem.load(path)
