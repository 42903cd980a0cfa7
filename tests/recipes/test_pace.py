"""Progress and the time that is left; clocks are made up."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from recipes.comparison import runner
from recipes.comparison.runner import _share
from recipes.measuring import names
from recipes.measuring.metrics import ACCURACY, PERPLEXITY
from recipes.pace import LINE_EVERY_S, ComparisonPace, RunPace, duration
from recipes.training.progress import PlainProgress


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (7.4, "0:07"), (750, "12:30"), (7500, "2:05:00")])
def test_durations_are_written_as_on_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_run_says_its_share_and_the_time_left() -> None:
    clock = _Clock()
    pace = RunPace(400, clock=clock)
    assert pace.text(0) == "step 0/400 (0 %)"
    clock.now += 10
    assert pace.text(100) == "step 100/400 (25 %), 0:30 left"
    assert RunPace(math.inf, clock=clock).text(7) == "step 7"


def test_a_resumed_run_judges_the_time_left_by_its_own_steps() -> None:
    clock = _Clock()
    pace = RunPace(400, first=300, clock=clock)
    clock.now += 10
    assert pace.text(350) == "step 350/400 (88 %), 0:10 left"


def test_a_comparison_judges_trainings_and_probes_apart() -> None:
    clock = _Clock()
    pace = ComparisonPace(["training", "training", "training", "probe", "probe"], clock)
    pace.finish(0)  # finished before
    assert pace.seconds_left(0) is None
    pace.start(1)
    clock.now += 7  # imports
    assert pace.seconds_left(0) is None
    clock.now += 3
    assert pace.seconds_left(0.25) is None  # the first steps
    clock.now += 10
    # Half of the training took 10 s for a quarter. Nothing is known of probes yet, but that they start, too.
    assert pace.seconds_left(0.5) == pytest.approx(20 + 40 + 2 * 10)
    clock.now += 20
    pace.finish(1)
    pace.start(2)
    assert pace.seconds_left(0) == pytest.approx(40 + 2 * 10)
    clock.now += 40
    pace.finish(2)
    pace.start(3)
    clock.now += 5
    pace.finish(3)
    assert pace.seconds_left(0) == pytest.approx(5)
    pace.start(4)
    clock.now += 2
    assert pace.seconds_left(0.5) == pytest.approx(3)


def test_the_share_is_read_from_a_line_of_progress() -> None:
    assert _share(f"epoch 1/2, {RunPace(400).text(100)}") == 0.25
    assert _share("starting") == 0


def test_lines_come_after_validations_and_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = _Clock()
    metrics = {names.TRAIN_TIME: torch.tensor(1.25), ACCURACY.val: torch.tensor(0.5)}
    trainer: Any = SimpleNamespace(
        estimated_stepping_batches=40, global_step=0, current_epoch=0, max_epochs=2, callback_metrics=metrics
    )
    progress = PlainProgress(ACCURACY, clock)
    module: Any = None
    progress.on_train_start(trainer, module)
    trainer.global_step = 10
    clock.now += LINE_EVERY_S - 1
    progress.on_train_batch_end(trainer, module, None, None, 0)
    assert capsys.readouterr().out == ""
    clock.now += 1
    progress.on_train_batch_end(trainer, module, None, None, 0)
    assert capsys.readouterr().out.startswith("step 10/40 (25 %), 1:30 left, epoch 1/2, 1.2 s of training")
    progress.on_train_batch_end(trainer, module, None, None, 0)
    assert capsys.readouterr().out == ""
    progress.on_validation_end(trainer, module)
    line = capsys.readouterr().out
    assert line.startswith("epoch 1/2, step 10/40 (25 %), 1:30 left, ")
    assert "accuracy 50.00 %" in line


def test_a_slow_start_is_said_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(runner, "LINE_EVERY_S", 0)
    with runner._plain(["ddp, seed 0"], Console(width=160)) as line:
        for text in ("starting", "starting", "step 1/40 (2 %)"):
            line(0, text, False, None)
    assert [each.split()[4] for each in capsys.readouterr().out.splitlines()] == ["starting", "step"]


def test_percentages_are_written_in_one_way() -> None:
    assert ACCURACY.shown(0.9778) == "97.78 %"
    assert ACCURACY.shown(0.9, 1) == "90.0 %"
    assert PERPLEXITY.shown(147.4) == "147.40"
