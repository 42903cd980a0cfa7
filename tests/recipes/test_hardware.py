"""Hardware profiles: their values, what is refused, and runs with them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hydra.core.singleton import Singleton
from omegaconf import DictConfig, OmegaConf

from netlab.lab import NetLabError
from recipes.configuration import compose_configuration
from recipes.errors import RecipeError
from recipes.launch import command_line, slurm
from recipes.launch.environment import profile_environment
from recipes.launch.hardware import described, hardware_facts
from recipes.launch.processes import SRUN_TASKS
from recipes.launch.slurm import prepare_submission
from tests.errors import error_text
from tests.marks import needs_root
from tests.recipes import fake_slurm
from tests.recipes.conftest import ROOT, TINY, run_script

Compose = Callable[..., DictConfig]

GPU_PROFILES = ("nvlink", "pcie", "multi_node", "slurm")
SMALL = (*TINY, "data.batch_size=16")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """The checks that `run.py` makes of a command line before anything else, on a machine without GPUs."""
    state = Singleton.get_state()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "SLURM_JOB_ID", SRUN_TASKS):
        monkeypatch.delenv(name, raising=False)

    def make(*overrides: str, mode: str = "RUN") -> None:
        monkeypatch.setattr(sys, "argv", ["recipes/run.py", *overrides])
        cfg = compose_configuration([*overrides, f"hydra.mode={mode}"], with_hydra=True)
        command_line.check(cfg, cfg.hydra)

    yield make
    Singleton.set_state(state)


# --- profiles ---------------------------------------------------------------------------------------------------------


def test_the_trainer_follows_the_profile_and_can_be_overridden(composed: Compose) -> None:
    cpu = composed().trainer
    assert (cpu.accelerator, cpu.devices, cpu.num_nodes) == ("cpu", 2, 1)
    lab = composed("hardware=netlab", "hardware.nodes=4", "trainer.devices=2").trainer
    assert (lab.accelerator, lab.devices, lab.num_nodes) == ("cpu", 2, 4)
    assert [composed(f"hardware={name}").trainer.accelerator for name in GPU_PROFILES] == ["gpu"] * 4


def test_every_profile_says_the_same_things(composed: Compose) -> None:
    for file in (ROOT / "conf" / "hardware").glob("*.yaml"):
        profile = OmegaConf.to_container(composed(f"hardware={file.stem}"), resolve=True)["hardware"]
        assert profile["name"] == file.stem
        assert {"accelerator", "devices", "nodes", "link", "env"} < set(profile)
        assert described(profile).startswith(f"{file.stem} (")


def test_facts_of_a_result() -> None:
    profile = {"name": "netlab", "rate": "1gbit", "link": "a link", "env": {"A": 1, "B": None}}
    assert hardware_facts(profile, 4, 1, "x86_64") == {
        "profile": "netlab",
        "rate": "1gbit",
        "nodes": 4,
        "devices": 1,
        "device": "x86_64",
        "link": "a link",
        "env": {"A": "1"},
    }
    assert "rate" not in hardware_facts({"name": "cpu", "link": "", "env": {}}, 1, 2, "")
    assert described(profile) == "netlab (a link), A=1"


# --- environment ------------------------------------------------------------------------------------------------------


def test_environment_is_set_and_taken_back() -> None:
    environment = {"KEPT": "x", "EQUAL": "1"}
    with profile_environment({"NEW": 0, "EQUAL": 1, "KEPT": None}, environment):
        assert environment == {"KEPT": "x", "EQUAL": "1", "NEW": "0"}
    assert environment == {"KEPT": "x", "EQUAL": "1"}


def test_a_conflict_is_refused_before_anything_is_set() -> None:
    environment = {"NCCL_P2P_DISABLE": "0"}
    message = (
        "NCCL_P2P_DISABLE=0 is set in the environment, the hardware profile sets NCCL_P2P_DISABLE=1; "
        r"unset NCCL_P2P_DISABLE, or take hardware\.env\.NCCL_P2P_DISABLE=0"
    )
    wanted = {"NEW": "1", "NCCL_P2P_DISABLE": "1"}
    with pytest.raises(RecipeError, match=message), profile_environment(wanted, environment):
        pytest.fail("the conflict was overlooked")
    assert environment == {"NCCL_P2P_DISABLE": "0"}


@pytest.mark.slow
def test_processes_inherit_the_environment_from_their_start(tmp_path: Path) -> None:
    # Runs in every interpreter before anything else: rank 1 must find the variable there already.
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, pathlib\n"
        f"pathlib.Path({str(tmp_path)!r}, 'rank' + os.environ.get('LOCAL_RANK', '0')).write_text(\n"
        "    os.environ.get('GQSGD_FROM_PROFILE', 'unset'))\n"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    arguments = (
        "run.py",
        *SMALL,
        "test=false",
        "+hardware.env.GQSGD_FROM_PROFILE=yes",
        f"hydra.run.dir={tmp_path}/run",
    )
    finished = run_script(*arguments, cwd=tmp_path, environment={"PYTHONPATH": path})
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert (tmp_path / "rank0").read_text() == "unset"
    assert (tmp_path / "rank1").read_text() == "yes"
    assert "cpu (loopback of one machine), GQSGD_FROM_PROFILE=yes" in finished.stdout
    recorded = json.loads((tmp_path / "run" / "result.json").read_text())["hardware"]
    assert recorded["env"] == {"GQSGD_FROM_PROFILE": "yes"}
    assert (recorded["profile"], recorded["nodes"], recorded["devices"]) == ("cpu", 1, 2)


def test_a_conflict_ends_a_run(refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GQSGD_FROM_PROFILE", "no")
    line = refusal(*SMALL, "+hardware.env.GQSGD_FROM_PROFILE=yes")
    assert line.startswith("RecipeError: GQSGD_FROM_PROFILE=no is set in the environment")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hardware=netlab", "hardware.nodes=1"], "hardware.nodes=1 must be at least 2"),
        (["hardware=netlab", "hardware.devices=auto"], "hardware.devices='auto' is none"),
        (["hardware=netlab", "hardware.accelerator=gpu"], "hardware.accelerator=cpu, not gpu"),
        (["hardware=slurm", "hardware.devices=auto"], "hardware=slurm has to know the number of processes per node"),
        (["trainer.accelerator=gpu"], "^trainer.accelerator=gpu needs a GPU, .*; take trainer.accelerator=cpu$"),
        (["hardware.accelerator=cuda"], "^hardware.accelerator=cuda needs a GPU, .*; take hardware.accelerator=cpu$"),
        (["hardware=nvlink"], "^hardware=nvlink needs a GPU, .*; take hardware=cpu$"),
        (["hardware=slurm"], r"submits a job with -m: python recipes/run\.py -m hardware=slurm; .*put srun before"),
    ],
)
def test_profiles_that_cannot_be(check: Callable[..., None], overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check(*overrides)


def test_rates_are_those_of_netlab(check: Callable[..., None]) -> None:
    with pytest.raises(NetLabError, match="write e.g. 100mbit, 1gbit"):
        check("hardware=netlab", "hardware.rate=fast")


@pytest.mark.parametrize("profile", GPU_PROFILES)
def test_gpus_that_are_not_there(check: Callable[..., None], profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    one = "trainer.devices=1"
    with pytest.raises(RecipeError, match=f"hardware={profile} needs a GPU, .* take hardware=cpu"):
        check(f"hardware={profile}", one)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv(SRUN_TASKS, "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    with pytest.raises(RecipeError, match=f"hardware={profile} asks for 4 GPUs .* finds 2; take hardware.devices=2"):
        check(f"hardware={profile}", "hardware.devices=4")


def test_lists_of_gpus_are_taken(check: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for devices in ("[0,1]", "-1", "auto", "2"):
        check("hardware=pcie", f"trainer.devices={devices}")


def test_several_nodes_by_hand_are_told_how_to_start(check: Callable[..., None]) -> None:
    overrides = [
        "+exp=quickstart",
        "hardware=multi_node",
        "hardware.accelerator=cpu",
        "hardware.devices=3",
        "title='a b'",
    ]
    lines = error_text(RecipeError, check, *overrides).splitlines()
    assert re.fullmatch(
        r"  GLOO_SOCKET_IFNAME=INTERFACE torchrun --nnodes=2 --nproc_per_node=3 --rdzv-backend=c10d "
        r"--rdzv-endpoint=\S+:29500 recipes/run\.py \+exp=quickstart hardware=multi_node hardware\.accelerator=cpu "
        r"""hardware\.devices=3 'title='"'"'a b'"'"''""",
        lines[1],
    )
    with pytest.raises(RecipeError, match="hardware=cpu with 2 nodes runs under a launcher"):
        check("trainer.num_nodes=2")


def test_the_launchers_processes_have_to_be_those_of_the_profile(
    check: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    profile = ("hardware=multi_node", "hardware.accelerator=cpu")
    check(*profile, "hardware.devices=2")
    with pytest.raises(RecipeError, match=r"WORLD_SIZE=4 .*\.devices=1 is 2; .* unset WORLD_SIZE if"):
        check(*profile, "hardware.devices=1")
    with pytest.raises(RecipeError, match=r"LOCAL_WORLD_SIZE=2 processes per node, hardware\.devices=1"):
        check(*profile, "hardware.devices=1", "hardware.nodes=4")


def test_of_sweeps_below_a_launcher_only_slurms_are_let_through(
    check: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a launcher, each job of a sweep starts processes of its own.
    check(mode="MULTIRUN")
    check("trainer.devices=1", mode="MULTIRUN")
    # Inside the job.
    for name, value in {"SLURM_JOB_ID": "1", SRUN_TASKS: "4", "SLURM_PROCID": "3"}.items():
        monkeypatch.setenv(name, value)
    check("hardware=slurm", "hardware.accelerator=cpu", mode="MULTIRUN")
    with pytest.raises(RecipeError, match="recipes/compare.py"):
        check("hardware=slurm", "hardware.accelerator=cpu", "hydra/launcher=basic", mode="MULTIRUN")
    with pytest.raises(RecipeError, match="recipes/compare.py"):
        check("hardware=cpu", "hardware.devices=4", mode="MULTIRUN")


# --- the script of a job ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_in_the_script_of_a_job_starts_its_processes_itself(tmp_path: Path) -> None:
    # What sbatch -n 8 gives to the one process of its script: the variables of a task, of which there are no others.
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "job", "SLURM_NNODES": "1", "SLURM_NODELIST": "localhost"}
    job |= {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    finished = run_script("run.py", *SMALL, "test=false", "hydra.run.dir=run", cwd=tmp_path, environment=job)
    assert finished.returncode == 0, finished.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["processes"] == 2


# --- netlab -----------------------------------------------------------------------------------------------------------


@needs_root
@pytest.mark.slow
def test_netlab_starts_itself_on_its_hosts(tmp_path: Path) -> None:
    arguments = ("run.py", *SMALL, "test=false", "hardware=netlab", "hardware.rate=100mbit", "strategy=gqsgd")
    finished = run_script(*arguments, cwd=tmp_path, timeout=250)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = finished.stdout.splitlines()
    assert len([line for line in lines if line.startswith("epoch 1/2, ")]) == 1  # what compare.py looks for
    assert not [line for line in lines if line.startswith("[host")]
    (folder,) = (tmp_path / "outputs" / "quickstart" / "gqsgd-seed0").iterdir()
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    facts = json.loads((folder / "result.json").read_text())
    assert facts["processes"] == 2
    expected = {"profile": "netlab", "rate": "100mbit", "nodes": 2, "devices": 1}
    assert {name: facts["hardware"][name] for name in expected} == expected
    assert (folder / ".hydra" / "config.yaml").is_file()
    assert (
        f"netlab-{os.getpid()}"
        not in subprocess.run(
            ["ip", "netns", "list"],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )


# --- slurm ------------------------------------------------------------------------------------------------------------


def test_without_the_extra_or_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(slurm, "PLUGIN", "hydra_plugins.not_installed")
    with pytest.raises(RecipeError, match=r"uv sync --extra slurm, or pip install hydra-submitit-launcher"):
        prepare_submission(environment)
    monkeypatch.setattr(slurm, "PLUGIN", "no_such_parent.not_installed")
    with pytest.raises(RecipeError, match="uv sync --extra slurm"):
        prepare_submission(environment)
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RecipeError, match="sbatch and srun not found on PATH"):
        prepare_submission(environment)
    assert environment == {}


@pytest.mark.slow
def test_a_job_is_submitted_whose_tasks_are_the_ranks(tmp_path: Path) -> None:
    profile = ("hardware=slurm", "hardware.accelerator=cpu", "hardware.gpus_per_node=null", "hardware.devices=2")
    asked = (
        "hardware.partition=short",
        "hardware.time_min=7",
        "hardware.cpus_per_task=1",
        "+hardware.sbatch.begin=now",
    )
    # A preset has no file: the job has to know what this process has registered.
    arguments = ("run.py", "-m", *SMALL, "strategy=gqsgd", "logger=wandb", "test=false", *profile, *asked)
    environment = {**fake_slurm.install(tmp_path), "NETRC": str(tmp_path / "none")}
    finished = run_script(*arguments, cwd=tmp_path, environment=environment)
    assert finished.returncode == 0, finished.stderr[-3000:]
    lines = (tmp_path / "script.sh").read_text().splitlines()
    options = dict(line.removeprefix("#SBATCH --").split("=", 1) for line in lines if line.startswith("#SBATCH"))
    assert {"gpus-per-node", "array"}.isdisjoint(options)
    expected = {"nodes": "1", "ntasks-per-node": "2", "cpus-per-task": "1", "partition": "short", "time": "7"}
    assert {name: options[name] for name in expected} == expected
    assert (options["begin"], options["job-name"]) == ("now", "quickstart")
    assert lines.index("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK") < len(lines) - 2
    (sweep,) = (tmp_path / "outputs" / "multirun").iterdir()
    facts = json.loads((sweep / "0-gqsgd-seed0" / "result.json").read_text())
    assert (facts["processes"], facts["steps"], facts["threads"]) == (2, 6, 1)
    assert facts["hardware"]["profile"] == "slurm"
    assert facts["hardware"]["env"] == {"OMP_NUM_THREADS": "1"}
    assert len([*sweep.glob("**/wandb/offline-run-*")]) == 1  # as in tests/recipes/test_rank_zero.py
    logs = [(sweep / ".submitit" / fake_slurm.JOB_ID / f"4711_{rank}_log.out").read_text() for rank in range(2)]
    assert ["epoch 1/2" in log for log in logs] == [True, False]  # two ranks of one run, not two runs


def test_gpus_are_asked_for() -> None:
    cfg = compose_configuration(["hardware=slurm", "trainer.devices=8", "hardware.nodes=2"], with_hydra=True)
    launcher = cfg.hydra.launcher
    expected = {"nodes": 2, "tasks_per_node": 8, "gpus_per_node": 8, "timeout_min": 60, "max_num_timeout": 0}
    assert {name: launcher[name] for name in expected} == expected
