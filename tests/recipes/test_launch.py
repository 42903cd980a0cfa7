from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

from recipes.errors import RecipeError
from recipes.launch.environment import set_threads
from recipes.launch.processes import SRUN_TASKS, check_launch, external_rank, hydra_arguments, local_processes, script
from recipes.launch.ranks import cluster_environment, meeting_of_ranks
from tests.ports import free_port
from tests.recipes.conftest import ROOT, TINY, run_script

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
SCRIPT_OF_A_JOB = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
LIGHTNINGS_CHILD = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, None),
        (LIGHTNINGS_CHILD, None),
        (TORCHRUN, 1),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "3", SRUN_TASKS: "4"}, 3),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0", SRUN_TASKS: "1"}, None),
        (SCRIPT_OF_A_JOB, None),
    ],
)
def test_external_rank(environment: dict[str, str], rank: int | None) -> None:
    assert external_rank(environment) == rank


def test_only_rank_zero_of_an_external_launch_gets_a_directory() -> None:
    assert hydra_arguments(["+exp=quickstart"], {**TORCHRUN, "RANK": "0"}) == []
    assert hydra_arguments(["+exp=quickstart"], LIGHTNINGS_CHILD) == []
    quiet = ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    assert hydra_arguments(["+exp=quickstart"], TORCHRUN) == [*quiet, "hydra.run.dir=."]
    assert hydra_arguments(["hydra.run.dir=/there"], TORCHRUN) == quiet


def test_lightning_is_told_of_launchers_that_it_does_not_know() -> None:
    environment = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_RANK"}
    (plugin,) = cluster_environment(environment, 2)
    assert isinstance(plugin, TorchElasticEnvironment)
    assert environment["LOCAL_RANK"] == "0"
    assert cluster_environment({}, 2) == cluster_environment(dict(LIGHTNINGS_CHILD), 2) == []


def test_lightning_starts_the_processes_of_a_run_in_the_script_of_a_job() -> None:
    (plugin,) = cluster_environment(dict(SCRIPT_OF_A_JOB), 2)
    assert isinstance(plugin, LightningEnvironment)


@pytest.mark.usefixtures("clean_process")
@pytest.mark.parametrize("job", ["train.sh", "interactive"])
def test_tasks_of_srun_are_lightnings_processes_whatever_the_name_of_their_job(job: str) -> None:
    task = {**SCRIPT_OF_A_JOB, SRUN_TASKS: "2", "SLURM_JOB_NAME": job}
    os.environ.update(task)
    (plugin,) = cluster_environment(os.environ, 2)  # Lightning's class reads the environment itself
    assert isinstance(plugin, SLURMEnvironment)
    assert plugin.world_size() == 2


@pytest.mark.parametrize("per_node", ["4", "4(x2)", "4,4"])
def test_srun_has_started_as_many_tasks_on_each_node_as_the_run_asks_for(per_node: str) -> None:
    task = {"SLURM_PROCID": "0", SRUN_TASKS: "8", "SLURM_STEP_TASKS_PER_NODE": per_node}
    check_launch(2, 4, task)
    with pytest.raises(RecipeError, match=r"SLURM_STEP_NUM_TASKS=8 processes, .* hardware\.devices=3 is 6"):
        check_launch(2, 3, task)
    with pytest.raises(RecipeError, match=r"SLURM_STEP_TASKS_PER_NODE=5,3 processes per node, hardware\.devices=4"):
        check_launch(2, 4, {**task, "SLURM_STEP_TASKS_PER_NODE": "5,3"})


def test_torchrun_is_left_to_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert cluster_environment(dict(TORCHRUN), 2) == []


@pytest.mark.usefixtures("clean_process")
def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    environment: dict[str, str] = {}
    assert set_threads(None, 2, 2, environment) == torch.get_num_threads() == 4
    assert environment == {"OMP_NUM_THREADS": "4"}
    assert set_threads(None, 16, 16, {}) == 1
    assert set_threads(None, 2, 2, {"LOCAL_WORLD_SIZE": "8"}) == 1
    assert set_threads(None, 2, 2, {"OMP_NUM_THREADS": "3"}) == 3
    assert set_threads(5, 2, 2, {"OMP_NUM_THREADS": "3"}) == 5
    task = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_CPUS_PER_TASK": "8"}
    assert set_threads(None, 4, 2, dict(task)) == 8
    assert set_threads(None, 2, 2, dict(task)) == 4  # these processes are not srun's


def test_a_printed_command_works_in_the_folder_where_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (ROOT, tmp_path):
        monkeypatch.chdir(folder)
        assert Path(script("compare.py")).is_file()
    monkeypatch.chdir(ROOT)
    assert script("compare.py") == "recipes/compare.py"


def test_local_processes() -> None:
    assert local_processes("cpu", 2) == local_processes("cpu", "2") == 2
    assert local_processes("cpu", "auto") == 1
    assert local_processes("gpu", [1, 3]) == 2


@pytest.mark.parametrize("kind", [dist.DistNetworkError, dist.DistStoreError])
def test_ranks_that_do_not_meet_before_the_first_step_are_told_where_to_look(kind: type[Exception]) -> None:
    place = {**TORCHRUN, "RANK": "0", "MASTER_ADDR": "here"}
    within, said = timedelta(0), r"^rank 0 has not met .* MASTER_ADDR=here, MASTER_PORT=1 \(1/2 clients\); start all"
    with pytest.raises(RecipeError, match=said), meeting_of_ranks(place, 2, within, applies=lambda: True):
        raise kind("1/2 clients\nand a stack")
    with pytest.raises(kind), meeting_of_ranks(place, 2, within, applies=lambda: False):
        raise kind("in a later step")


@pytest.mark.slow
def test_a_rank_that_reaches_nobody_ends_with_one_line(tmp_path: Path) -> None:
    task = {**TORCHRUN, "LOCAL_RANK": "0", "MASTER_PORT": str(free_port())}
    finished = run_script("run.py", *TINY, "+strategy.timeout=1s", cwd=tmp_path, environment=task)
    assert finished.returncode == 2
    assert re.fullmatch(r"RecipeError: rank 1 has not met .* \(Connection refused\); start all .*\n", finished.stderr)
