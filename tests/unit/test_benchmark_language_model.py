"""Trainings of the language model, which are kept once they are over."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import language_model as model


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    """A network of one small block, six steps."""
    sizes = {"steps": 6, "layers": 1, "width": 16, "batch": 1, "validate_every": 2}
    trained: dict[str, Any] = {
        "seeds": 1,
        "most_rates": 1,
        "whole_rates": 1,
        "sweep_steps": None,
        "minutes": 60.0,
        "way": ["ddp"],
    }
    return argparse.Namespace(folder=str(tmp_path), device="cpu", at_once=False, **trained, **sizes)


LOCAL = ("DiLoCo, H = 32, 4 bit", "MuLoCo, H = 32, 2 bit")


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("way", ["4 bit", "ddp_bf16", *LOCAL])
def test_a_training_that_is_over_is_kept(
    way: str, at_once: bool, options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way.startswith("MuLoCo") and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    monkeypatch.setattr(model, "EVERY", 2)
    options.at_once = at_once
    run = model.Run(way, 1e-3, 0)
    curve = model.Trainings(options).curve(run)
    assert curve is not None
    assert [step for step, _, _ in curve] == [0, 2, 4, 6]
    assert curve[-1][1] > 0
    options.minutes = 0.0  # it is read, not made again
    assert model.Trainings(options).curve(run) == curve
    assert model.Trainings(options).curve(model.Run(way, 2e-3, 0)) is None


def test_a_folder_has_trainings_with_one_set_of_settings(options: argparse.Namespace) -> None:
    model.Trainings(options)
    options.width = 32
    with pytest.raises(SystemExit, match=r"give another --folder"):
        model.Trainings(options)


def test_a_folder_of_another_text_or_of_trainings_at_once_is_refused(
    options: argparse.Namespace, tmp_path: Path
) -> None:
    model.Trainings(options)
    file = tmp_path / "settings.json"
    settings = json.loads(file.read_text())
    for other in ({"at_once": True}, {"text": "WikiText-2"}):
        file.write_text(json.dumps({**settings, **other}))
        with pytest.raises(SystemExit, match=r"give another --folder"):
            model.Trainings(options)


def test_steps_that_are_left_are_those_of_trainings_without_a_file(
    options: argparse.Namespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options.way, options.seeds, options.most_rates = ["ddp", "4 bit"], 2, 1
    model.Trainings(options)
    assert "up to 24 steps" in capsys.readouterr().err
    for seed in range(2):
        (tmp_path / f"{model.Run('ddp', model.ADAMW[0], seed).name}.json").write_text("[]")
    model.Trainings(options)
    assert "up to 12 steps" in capsys.readouterr().err


@pytest.mark.parametrize("apart", [False, True])
def test_workers_in_one_pass_have_the_gradients_of_one_after_the_other(apart: bool) -> None:
    """In bf16, at one point and at a point of each worker's own."""
    one_by_one = model.VirtualCharacters(3, 2, 32, 2)
    at_once = model.BatchedCharacters(torch.device("cpu"), 3, 2, 32, 2)
    x = one_by_one.start()
    assert torch.equal(at_once.start(), x)
    if apart:
        x = x + 0.02 * torch.randn(4, len(x), generator=torch.Generator().manual_seed(0))
    exact = one_by_one.gradients(x, 7, 4)
    found = at_once.gradients(x, 7, 4)
    assert found.dtype == torch.float32
    assert float((found - exact).norm(dim=1).max()) < 0.03 * float(exact.norm(dim=1).min())
    assert (found.norm(dim=1) <= 1 + 1e-5).all()
    point = x[0] if apart else x
    assert at_once.loss(point) == pytest.approx(one_by_one.loss(point), rel=0.01)


def test_rates_come_first_and_then_a_seed_of_all_ways_after_the_other(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time is over in the middle of the second seed: the table has what is there."""
    options.way, options.seeds, options.most_rates, options.sweep_steps = ["ddp", "4 bit"], 3, 2, 3
    made: list[model.Run] = []

    def curve(trainings: model.Trainings, run: model.Run) -> list[tuple[int, float, float]] | None:
        if len(made) == 7 and run not in made:
            return None
        made.append(run)
        return [(0, 0.0, 5.0), (6, 1.0, 2.0 + run.rate + run.seed / 100 + 0.1 * (run.way == "4 bit"))]

    monkeypatch.setattr(model.Trainings, "curve", curve)
    report = model.measure(options)
    best = model.ADAMW[0]
    tried = [model.Run(way, rate, 0, 3) for way in options.way for rate in model.ADAMW[:2]]
    assert made == [*tried, *(model.Run(way, best, 0) for way in options.way), model.Run("ddp", best, 1)]
    rows = {row[0]: dict(zip(report.columns, row, strict=True)) for row in report.rows}
    assert [row["seeds"] for row in rows.values()] == [2, 1]
    assert rows["4 bit"]["less ddp's"] == pytest.approx(0.1)  # of the seed that both have
    assert "Not over yet: ddp, 4 bit." in report.notes


def test_whole_trainings_of_the_best_rates_of_the_sweep_decide(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep prefers the third rate to the second one, and the second one ends lower."""
    options.most_rates, options.sweep_steps, options.whole_rates = 3, 3, 2
    _, second, third = model.ADAMW[:3]
    made: list[model.Run] = []

    def curve(trainings: model.Trainings, run: model.Run) -> list[tuple[int, float, float]]:
        made.append(run)
        slope = 1 if run.fewer_steps is None else -1
        return [(0, 0.0, 5.0), (6, 1.0, 2.0 + slope * run.rate)]

    monkeypatch.setattr(model.Trainings, "curve", curve)
    report = model.measure(options)
    assert made[3:5] == [model.Run("ddp", third, 0), model.Run("ddp", second, 0)]
    assert report.raw["ddp"]["rate"] == second
    assert f"Also trained with the first seed: ddp with {third:g}: {2 + third:.3f}." in report.notes


def test_minutes_are_those_of_operations_until_a_training_is_over() -> None:
    pace = model.Pace("cpu", 1000, 8)
    assert pace.operations == 6 * 1000 * 8 * 64 * 4
    assert pace.minutes(60) == pytest.approx(pace.operations / 2e10)
    pace.took(10, 5.0)
    pace.took(10, 15.0)
    assert pace.minutes(60) == pytest.approx(1.0)
    assert model.Pace("cuda", 10_800_000, 8).minutes(60_000) == pytest.approx(15)


def test_ways_that_are_not_over_are_named(options: argparse.Namespace) -> None:
    options.minutes = 0.0
    report = model.measure(options)
    assert report.rows == []
    assert "Not over yet: ddp." in report.notes


def test_fewer_bits_are_predicted_to_take_less_time_on_a_slow_link() -> None:
    problem = model.VirtualCharacters(0, 1, 16, 1)
    line = model.estimated(problem.network, 1e-3)
    names = ("ddp", "ddp_bf16", "DiLoCo, H = 32, 4 bit")
    seconds = [model.step_seconds(model.WAYS[name], line, 1e5) for name in names]
    assert seconds == sorted(seconds, reverse=True)
