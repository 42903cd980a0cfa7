"""Comparisons whose runs are jobs of a cluster. submitit's executor for one machine stands for SLURM."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from recipes import compare
from recipes.comparison import submitted
from recipes.comparison.plan import CELL_FILE, Cell, make_plan
from recipes.comparison.runner import LOG
from recipes.comparison.submitted import JOB_FILE, is_submitted, submit_all
from recipes.files import RESULT_FILE
from recipes.launch import slurm
from tests.recipes.conftest import TINY

PROFILE = ("hardware=slurm", "hardware.accelerator=cpu", "hardware.gpus_per_node=null", "hardware.devices=2")
FACTS = {"metric": "acc", "metrics": {"test/acc": 0.5}, "train_time": 1.0, "mb_sent": 2.0}


class _Job:
    """A job that has ended, or not, as the test says."""

    def __init__(self, folder: Any, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        self.job_id, self.state = job_id, "FAILED"

    def done(self, force_check: bool = False) -> bool:
        return self.job_id not in _Executor.running

    def cancel(self, check: bool = True) -> None:
        assert not check
        _Executor.cancelled.append(self.job_id)


class _Executor:
    """Takes jobs, and does with them what `works` does."""

    folder = None
    job_class = _Job
    running: set[str] = set()
    cancelled: list[str] = []
    submitted: list[list[str]] = []
    works: Any = None

    def submit(self, function: Any, words: list[str], log: str) -> _Job:
        assert function is submitted.run_rank
        self.submitted.append(words)
        type(self).works(Path(log).parent)
        return _Job(None, str(len(self.submitted)))


def _succeed(folder: Path) -> None:
    (folder / RESULT_FILE).write_text(json.dumps(FACTS))


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Cell, ...]:
    """Two cells, whose jobs go to `_Executor`."""
    monkeypatch.setattr(submitted, "_executor", lambda cell, cluster: _Executor())
    monkeypatch.setattr(submitted, "LATE_S", 0)
    monkeypatch.setattr(submitted, "LOOK_S", 0)
    monkeypatch.setattr(_Executor, "submitted", [])
    monkeypatch.setattr(_Executor, "cancelled", [])
    monkeypatch.setattr(_Executor, "works", _succeed)
    return make_plan([*TINY, *PROFILE, f"output={tmp_path}"]).cells


def _submit(cells: tuple[Cell, ...], fresh: bool = False) -> tuple[list[Any], str]:
    said = io.StringIO()
    return submit_all(cells, Console(file=said, width=200), fresh, cluster="local"), said.getvalue()


def test_all_cells_are_submitted_before_any_is_waited_for(cells: tuple[Cell, ...]) -> None:
    assert all(map(is_submitted, cells))
    failures, said = _submit(cells)
    assert not failures
    assert "gqsgd, seed 0  job 2 submitted\nwaiting for 2 jobs" in said
    assert "ddp, seed 0  accuracy 50.00 %" in said
    assert ["hardware=slurm" in words for words in _Executor.submitted] == [True, True]
    assert len([word for words in _Executor.submitted for word in words if word.startswith("hydra.run.dir=")]) == 2
    assert _submit(cells)[1].count("finished before") == 2
    assert len(_Executor.submitted) == 2
    _submit(cells, fresh=True)
    assert len(_Executor.submitted) == 4


def test_a_job_under_way_is_waited_for_and_not_submitted_again(
    cells: tuple[Cell, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell, _) = cells
    cell.folder.mkdir(parents=True)
    (cell.folder / CELL_FILE).write_text(json.dumps(cell.config))
    (cell.folder / JOB_FILE).write_text(json.dumps({"id": "4711", "tasks": 2}))
    monkeypatch.setattr(_Executor, "running", {"4711"})
    monkeypatch.setattr(submitted.time, "sleep", lambda seconds: _succeed(cell.folder))
    failures, said = _submit((cell,))
    assert not failures
    assert "job 4711 is under way" in said
    assert not _Executor.submitted
    assert not _Executor.cancelled


@pytest.mark.parametrize("fresh", [True, False])
def test_a_job_under_way_is_cancelled_before_another_takes_its_folder(
    cells: tuple[Cell, ...], monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    (cell, _) = cells
    cell.folder.mkdir(parents=True)
    (cell.folder / CELL_FILE).write_text(json.dumps(cell.config if fresh else {**cell.config, "seed": 7}))
    (cell.folder / JOB_FILE).write_text(json.dumps({"id": "4711", "tasks": 2}))
    monkeypatch.setattr(_Executor, "running", {"4711"})
    failures, said = _submit((cell,), fresh)
    assert not failures
    assert _Executor.cancelled == ["4711"]
    assert "job 1 submitted" in said


def test_a_cell_whose_job_was_ended_goes_on_from_its_checkpoint(
    cells: tuple[Cell, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(folder: Path) -> None:
        (folder / "checkpoints").mkdir(exist_ok=True)
        (folder / "checkpoints" / "last.ckpt").touch()
        (folder / LOG).write_text("epoch 1/2\n")

    (cell, _) = cells
    monkeypatch.setattr(_Executor, "works", stop)
    (failure,), said = _submit((cell,))
    assert failure.reason == "job 1: FAILED"
    assert failure.tail == "epoch 1/2"
    monkeypatch.setattr(_Executor, "works", _succeed)
    failures, said = _submit((cell,))
    assert not failures
    assert "goes on from the last checkpoint" in said
    assert _Executor.submitted[1][-1] == f"ckpt_path='{cell.folder}/checkpoints/last.ckpt'"
    assert len(_Executor.submitted[0]) + 1 == len(_Executor.submitted[1])


def test_without_a_cluster_nothing_is_submitted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(slurm, "check_installed", lambda *words: None)
    with pytest.raises(SystemExit) as stopped:
        compare.main([*TINY, *PROFILE, f"output={tmp_path}"])
    assert stopped.value.code == 2
    assert "sbatch and srun not found on PATH" in capsys.readouterr().err


@pytest.mark.slow
def test_jobs_train_on_all_of_their_tasks(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    words = [*TINY, *PROFILE, "strategy=gqsgd", "trainer.max_epochs=1", "hardware.cpus_per_task=1", "test=false"]
    cells = make_plan([*words, f"output={tmp_path}"]).cells
    failures, said = _submit(cells)
    assert not failures, (said, failures)
    facts = json.loads((cells[0].folder / RESULT_FILE).read_text())
    assert (facts["processes"], facts["hardware"]["profile"]) == (2, "slurm")
    assert "epoch 1/1" in (cells[0].folder / LOG).read_text()
    assert "finished before" in _submit(cells)[1]
