"""Trainings of the language model, which are kept once they are over."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import language_model as model


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    """A network of one small block, six steps."""
    sizes = {"steps": 6, "layers": 1, "width": 16, "batch": 1, "validate_every": 2}
    return argparse.Namespace(folder=str(tmp_path), seeds=1, most_rates=1, minutes=60.0, way=["ddp"], **sizes)


@pytest.mark.parametrize("way", ["4 bit", "ddp_bf16", "DiLoCo, H = 32, 4 bit", "MuLoCo, H = 32, 2 bit"])
def test_a_training_that_is_over_is_kept(
    way: str, options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "EVERY", 2)
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
