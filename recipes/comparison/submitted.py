"""Cells of a comparison as jobs of a cluster: all are submitted, then waited for. Needs the extra `slurm`.

A job goes on without the process that has submitted it. The same comparison, started again, finds it by the file that
is left in the cell's folder, and waits for it. A cell whose job ended before its training did goes on from its last
checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from lightning_gqsgd.errors import counted
from recipes.comparison.plan import CELL_FILE, Cell
from recipes.comparison.processes import arguments_of
from recipes.comparison.runner import LOG, Failure, failure_of, name_of, outcome_of
from recipes.files import read_json
from recipes.launch.hardware import SLURM
from recipes.launch.processes import run_command
from recipes.launch.slurm import prepare_submission
from recipes.training.checkpoints import CHECKPOINTS, LAST

JOB_FILE = "job.json"
#: Folder of submitit's scripts and logs, in that of the comparison.
JOBS = "jobs"
#: Seconds between two looks at the jobs, and between two lines on them.
LOOK_S, LINE_S = 2.0, 60.0
#: Seconds in which the files of a job that has ended reach this machine.
LATE_S = 30.0
#: Ports for ranks that submitit starts on this machine.
_PORTS = range(20_000, 40_000)


def is_submitted(cell: Cell) -> bool:
    """Whether a cell is run as a job of a cluster."""
    return bool(cell.config["hardware"]["name"] == SLURM)


def submit_all(cells: tuple[Cell, ...], console: Console, fresh: bool, cluster: str = "slurm") -> list[Failure]:
    """Submit cells as jobs, finished ones again only if ``fresh``, and wait for all of them; returns the failures.

    Args:
        cells, console, fresh: see `runner.run_all`.
        cluster: submitit's name of the cluster: ``"slurm"``, or ``"local"`` for processes of this machine.

    Raises:
        RecipeError: jobs cannot be submitted from here.
    """
    if cluster == "slurm":
        prepare_submission(os.environ)
    jobs: list[tuple[Cell, Any]] = []
    for cell in cells:
        if not fresh and cell.is_finished():
            _say(cell, "finished before", console)
            continue
        job, what = _job_of(cell, fresh, cluster)
        jobs.append((cell, job))
        _say(cell, f"job {job.job_id} {what}", console)
    if jobs:
        waiting = counted(len(jobs), "job")
        console.print(f"waiting for {waiting}; jobs go on without this process, and the same command finds them")
    return _waited_for(jobs, console)


def _job_of(cell: Cell, fresh: bool, cluster: str) -> tuple[Any, str]:
    """The job of a cell, and how it was come by."""
    executor = _executor(cell, cluster)
    known, same = cell.folder / JOB_FILE, read_json(cell.folder / CELL_FILE) == cell.config
    there = read_json(known)
    if there is not None:
        job = executor.job_class(executor.folder, there["id"], tasks=list(range(there["tasks"])))
        if not job.done(force_check=True):
            if same and not fresh:
                return job, "is under way"
            # The result of the earlier job would be taken for that of the next one, which has the same folder.
            job.cancel(check=False)
    checkpoint = cell.folder / CHECKPOINTS / LAST
    goes_on = same and not fresh and checkpoint.is_file()
    if (cell.folder / CELL_FILE).exists() and not goes_on:
        shutil.rmtree(cell.folder)
    cell.folder.mkdir(parents=True, exist_ok=True)
    (cell.folder / CELL_FILE).write_text(json.dumps(cell.config, indent=2) + "\n")
    words = [*arguments_of(cell), *([f"ckpt_path='{checkpoint}'"] if goes_on else [])]
    job = executor.submit(run_rank, words, str(cell.folder / LOG))
    known.write_text(json.dumps({"id": job.job_id, "tasks": _tasks(cell.config)}) + "\n")
    return job, "goes on from the last checkpoint" if goes_on else "submitted"


def _waited_for(jobs: Sequence[tuple[Cell, Any]], console: Console) -> list[Failure]:
    waiting = list(jobs)
    ended: dict[str, float] = {}
    failures: list[Failure] = []
    said = time.monotonic()
    while waiting:
        left = []
        for cell, job in waiting:
            if cell.is_finished():
                _say(cell, outcome_of(cell), console)
            elif job.done() and time.monotonic() >= ended.setdefault(job.job_id, time.monotonic()) + _late_s(job):
                failures.append(failure_of(cell, f"job {job.job_id}: {job.state}"))
                _say(cell, Text(failures[-1].outcome, "red"), console)
            else:
                left.append((cell, job))
        waiting = left
        if waiting and time.monotonic() > said + LINE_S:
            said = time.monotonic()
            states = [str(job.state) for _, job in waiting]
            console.print(", ".join(f"{states.count(state)} {state.lower()}" for state in dict.fromkeys(states)))
        time.sleep(LOOK_S if waiting else 0)
    return failures


def _late_s(job: Any) -> float:
    """Seconds in which the files of a job may be late: none on the machine that has written them."""
    return 0.0 if type(job).__name__ == "LocalJob" else LATE_S


def _tasks(config: Mapping[str, Any]) -> int:
    return int(config["trainer"]["num_nodes"]) * int(config["trainer"]["devices"])


def _executor(cell: Cell, cluster: str) -> Any:
    """What submits a cell: the settings of conf/hydra/launcher/slurm.yaml."""
    import submitit  # of the extra `slurm`

    hardware, trainer = cell.config["hardware"], cell.config["trainer"]
    executor = submitit.AutoExecutor(folder=cell.folder.parents[1] / JOBS / "%j", cluster=cluster)
    executor.update_parameters(
        name=cell.config["title"],
        nodes=trainer["num_nodes"],
        tasks_per_node=trainer["devices"],
        cpus_per_task=hardware["cpus_per_task"],
        timeout_min=hardware["time_min"],
        **{key: hardware[key] for key in ("gpus_per_node", "mem_gb") if hardware[key] is not None},
        slurm_stderr_to_stdout=True,
        slurm_setup=hardware["setup"],
        slurm_additional_parameters=hardware["sbatch"],
        **{
            f"slurm_{key}": hardware[key]
            for key in ("partition", "account", "qos", "constraint")
            if hardware[key] is not None
        },
    )
    inner = executor._executor
    if hasattr(inner, "max_num_timeout"):
        inner.max_num_timeout = 0  # a job that reaches its limit is not submitted again, each time from the start
    return inner


def run_rank(arguments: list[str], log: str) -> None:
    """Run `run.py` as one task of a job; called in the job.

    Args:
        arguments: the command line, without the name of the script.
        log: file that gets the output of rank 0; that of other ranks is in submitit's logs.

    Raises:
        RuntimeError: the training has failed.
    """
    import submitit

    place = submitit.JobEnvironment()
    environment = {**os.environ}
    if place.cluster == "local":  # which leaves no variables of SLURM
        port = _PORTS[hash_of(place.job_id) % len(_PORTS)]
        environment |= {"RANK": str(place.global_rank), "WORLD_SIZE": str(place.num_tasks)}
        environment |= {"LOCAL_RANK": str(place.local_rank), "LOCAL_WORLD_SIZE": str(place.num_tasks)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    output = open(log, "ab") if place.global_rank == 0 else None  # noqa: SIM115  (closed with this process)
    code = subprocess.run(run_command(arguments), env=environment, stdout=output, stderr=output, check=False).returncode
    if code:
        raise RuntimeError(f"exit code {code}; the output is in {log}")


def hash_of(job: str) -> int:
    """A number of a job that is the same in all of its tasks."""
    return sum(place * ord(letter) for place, letter in enumerate(job, start=1))


def _say(cell: Cell, text: str | Text, console: Console) -> None:
    console.print(f"{name_of(cell)} ", text)
