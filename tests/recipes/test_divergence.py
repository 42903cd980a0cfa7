"""Trainings that end with numbers that are not finite, and runs that make no step."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig
from rich.console import Console

from recipes.comparison import runner
from recipes.comparison.plan import Cell
from recipes.comparison.results import Run
from recipes.comparison.runner import run_all
from recipes.launch.command_line import refusals_in_one_line
from recipes.training.report import strict
from recipes.training.train import train

Tiny = Callable[..., DictConfig]


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.usefixtures("clean_process")
def test_a_training_that_diverges_says_so_and_fails(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped, refusals_in_one_line():
        train(tiny("model.width=8", "optimizer.lr=1e30", "optimizer.warmup=0", "optimizer.schedule=cosine"), tmp_path)
    assert stopped.value.code == 1
    output = capsys.readouterr()
    (line,) = [line for line in output.err.splitlines() if "diverged" in line]
    assert line.startswith(
        "DivergedError: the training diverged: test/loss is nan; take an optimizer.lr below 1e+30, or"
    )
    assert "quickstart on digits: diverged" in output.out
    facts = json.loads((tmp_path / "result.json").read_text(), parse_constant=_no_constant)
    assert facts["diverged"] == "test/loss is nan"
    assert facts["metrics"]["test/loss"] is None
    assert math.isnan(Run.load(tmp_path).facts["metrics"]["test/loss"])


@pytest.mark.usefixtures("clean_process")
@pytest.mark.parametrize("test", ["true", "false"])
def test_a_run_without_a_step_says_only_what_there_is(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], test: str
) -> None:
    train(tiny("model.width=8", "trainer.max_epochs=0", f"test={test}"), tmp_path / "run")
    said = capsys.readouterr().out.partition("done")[2]
    assert ("test accuracy" in said) == (test == "true")
    assert "0 steps" in said
    for word in ("validation", "nan", "checkpoint"):
        assert word not in said
    files = [line.split()[-1] for line in said.splitlines() if "/" in line]
    assert files
    assert all(Path(file).is_file() for file in files)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["diverged"] is None


def test_numbers_that_json_does_not_know_are_null() -> None:
    assert strict({"a": [1.0, math.nan], "b": {"c": -math.inf, "d": "nan"}, "e": 3}) == {
        "a": [1.0, None],
        "b": {"c": None, "d": "nan"},
        "e": 3,
    }


def test_a_comparison_names_a_cell_that_diverged_and_runs_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell("ddp", 0, (), {}, tmp_path / "ddp-seed0")

    class Diverging:
        """A run that has diverged at once."""

        def start(self, cell: Cell, log: Path) -> Diverging:
            log.write_text("DivergedError: the training diverged: train/loss is nan\n")
            (cell.folder / "result.json").write_text(json.dumps({"diverged": "train/loss is nan"}))
            return self

        def poll(self) -> int:
            return 1

        def end(self) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(runner, "Starter", Diverging)
    output = io.StringIO()
    (failure,) = run_all((cell,), Console(file=output, width=160), fresh=False)
    assert failure.reason == "diverged, train/loss is nan"
    assert "the training diverged" in failure.tail
    assert "ddp, seed 0  diverged" in output.getvalue()
    assert not cell.is_finished()
