"""What rank 0 alone does is done once, whoever has started the processes; counted from what has been written."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.comparison.plan import make_plan
from recipes.comparison.processes import Starter, can_fork
from recipes.files import METRICS_FILE, RESULT_FILE, WANDB_ID_FILE
from recipes.launch.processes import folder_argument, global_rank
from recipes.measuring.metrics import ACCURACY
from tests.recipes.conftest import ROOT, TINY, clean_environment, run_ranks
from tests.recipes.test_hardware import needs_root
from tests.recipes.wandb_files import WandbFile

SMALL = (*TINY, "data.batch_size=16", "strategy=gqsgd", "logger=wandb", "threads=1")
FURTHER = ("trainer.max_epochs=3", "resume=true")


def _wandb_runs(folder: Path) -> list[WandbFile]:
    """Every W&B run that has been written below a folder, the oldest first. A run that goes on has links to it."""
    files = {file.resolve() for file in folder.glob("**/wandb/offline-run-*/run-*.wandb")}
    return [WandbFile(file) for file in sorted(files, key=lambda file: file.stat().st_mtime)]


def _epochs(run: WandbFile) -> list[float]:
    return [row["epoch"] for row in run.rows if ACCURACY.val in row]


def _check_two_trainings(root: Path, first: Path, second: Path) -> None:
    """One training of two epochs, and the same one with a third epoch, have written one W&B run each, under one id."""
    runs = _wandb_runs(root)
    assert [_epochs(run) for run in runs] == [[0, 1], [2]]
    ids = {run.run.run_id for run in runs}
    assert ids == {(folder / WANDB_ID_FILE).read_text().strip() for folder in (first, second)}
    assert len(ids) == 1
    for run, steps in zip(runs, (6, 3), strict=True):
        summed_up = {name.removeprefix("gqsgd/summary/"): value for name, value in run.summary.items()}
        assert summed_up["steps"] == steps
        assert summed_up["compression_ratio"] == pytest.approx(summed_up["fp32_bytes"] / summed_up["bytes_sent"])


@pytest.mark.slow
def test_forked_processes_make_one_wandb_run_and_a_resume_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    for name, value in {"NETRC": str(tmp_path / "none"), "WANDB_CACHE_DIR": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    (cell,) = make_plan([*SMALL, "trainer.devices=2", f"output={tmp_path / 'outputs'}"]).cells
    assert can_fork(cell)
    cell.folder.mkdir(parents=True)
    with closing(Starter()) as starter:
        for number, overrides in enumerate(((), FURTHER)):
            log = tmp_path / f"{number}.log"
            running = starter.start(replace(cell, overrides=(*cell.overrides, *overrides)), log)
            while running.poll() is None:
                time.sleep(0.1)
            assert running.poll() == 0, log.read_text()[-3000:]
            assert len(_wandb_runs(tmp_path)) == number + 1
    _check_two_trainings(tmp_path, cell.folder, cell.folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "overrides"),
    [
        pytest.param((), ("trainer.devices=2",), id="processes that Lightning starts"),
        pytest.param(
            ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"), ("trainer.devices=2",), id="torchrun"
        ),
        pytest.param((), ("hardware=netlab", "hardware.rate=none"), id="netlab", marks=needs_root),
    ],
)
def test_one_training_is_one_wandb_run_under_every_launcher(
    tmp_path: Path, command: Sequence[str], overrides: Sequence[str]
) -> None:
    folders = []
    for number, more in enumerate(((), FURTHER)):
        folders.append(tmp_path / "outputs" / str(number))
        # A resumed run looks for checkpoints in all folders of its `run_root`.
        own = (*SMALL, *overrides, *more, folder_argument(folders[-1]), "run_root=outputs")
        finished = subprocess.run(
            [sys.executable, *command, str(ROOT / "recipes" / "run.py"), *own],
            cwd=tmp_path,
            env={**clean_environment(), "NETRC": str(tmp_path / "none"), "WANDB_CACHE_DIR": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-3000:]
    _check_two_trainings(tmp_path, *folders)


#: A worker of Ray: it has imported everything before it learns which rank it is.
WORKER = f"""
import os, sys
from pathlib import Path
place = {{name: os.environ.pop(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}}
sys.path.insert(0, {str(ROOT)!r})
from recipes.configuration import compose_configuration
from recipes.data.digits import DigitsData
from recipes.training.train import train
os.environ.update(place)
prepare = DigitsData.prepare_data
def prepare_data(self):
    Path("prepared-by-" + place["RANK"]).touch()
    prepare(self)
DigitsData.prepare_data = prepare_data
train(compose_configuration(sys.argv[2:]), Path(sys.argv[1]) / place["RANK"])
"""


@pytest.mark.slow
def test_workers_that_learn_their_rank_after_their_imports_do_once_what_rank_zero_does(tmp_path: Path) -> None:
    ranks = [{"LOCAL_RANK": str(rank)} for rank in range(2)]
    arguments = ["-c", WORKER, str(tmp_path), *SMALL, "trainer.devices=2", "trainer.max_epochs=1", "test=false"]
    run_ranks(arguments, ranks, cwd=tmp_path, timeout=250, NETRC=str(tmp_path / "none"))
    assert [path.name for path in tmp_path.glob("prepared-by-*")] == ["prepared-by-0"]
    assert len(_wandb_runs(tmp_path)) == 1
    for name in (METRICS_FILE, RESULT_FILE, WANDB_ID_FILE, "hparams.yaml", "checkpoints/last.ckpt"):
        assert [path.relative_to(tmp_path).parts[0] for path in tmp_path.glob(f"*/{name}")] == ["0"], name


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        pytest.param({}, 0, id="started by hand"),
        pytest.param({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, 5, id="torchrun"),
        pytest.param({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "SLURM_PROCID": "1"}, 0, id="inside of SLURM"),
        pytest.param({"RANK": "4", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "SLURM_PROCID": "0"}, 4, id="the other node"),
        pytest.param({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3", "SLURM_LOCALID": "3"}, 3, id="srun"),
        pytest.param({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, 0, id="a task of its own"),
        pytest.param({"LOCAL_RANK": "3", "NODE_RANK": "0", "WORLD_SIZE": "8"}, 3, id="Lightning"),
        pytest.param({"NODE_RANK": "1"}, 4, id="started by hand on the second node"),
        pytest.param({"LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "8"}, 5, id="Lightning, second node"),
        pytest.param({"LOCAL_RANK": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, 1, id="Lightning in an allocation"),
    ],
)
def test_the_rank_follows_from_the_environment(environment: dict[str, str], rank: int) -> None:
    assert global_rank(environment, devices=4) == rank
    assert (global_rank(environment) == 0) == (rank == 0)
