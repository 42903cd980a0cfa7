"""How this process was started: by hand, by Lightning, or by a launcher outside (torchrun, netlab, SLURM)."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.errors import RecipeError

#: The folder above `recipes`.
ROOT = Path(__file__).resolve().parents[2]


#: Seconds that a run has to end after it was asked to; netlab gives its hosts 5 s, and takes the lab down then.
END_S = 20
#: Number of processes that srun has started. The script of a job has the variables of a task, too, and SLURM_NTASKS of
#: the whole allocation, although no other process is started with it.
SRUN_TASKS = "SLURM_STEP_NUM_TASKS"
#: Where launchers say how many processes they have started on this node, or on each, as ``8(x2),4``.
_PER_NODE = ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE")


def external_rank(environment: Mapping[str, str]) -> int | None:
    """Global rank of this process if a launcher outside has started it, else None.

    Processes that Lightning starts have no RANK.
    """
    if "WORLD_SIZE" in environment and "RANK" in environment:
        return int(environment["RANK"])
    if int(environment.get(SRUN_TASKS, "1")) > 1:
        return int(environment["SLURM_PROCID"])
    return None


def global_rank(environment: Mapping[str, str], devices: int = 1) -> int:
    """Global rank of this process, whoever has started it; 0 for a process that is alone, or that will start others.

    The environment is right from the first moment of a process. Lightning's ``rank_zero_only.rank`` is not: it has the
    environment of the moment in which Lightning was imported, until there is a Trainer.

    Args:
        environment: the environment variables of this process.
        devices: number of processes on each node. Only processes that Lightning starts on several nodes need it, and
            without it, rank 0 is right all the same.
    """
    if environment.get("RANK"):
        return int(environment["RANK"])
    # Lightning's own processes come before SLURM's: an allocation leaves its variables in every process below it.
    node, local = (environment.get(name) or "0" for name in ("NODE_RANK", "LOCAL_RANK"))
    if int(node) or int(local):
        return int(node) * devices + int(local)
    return external_rank(environment) or 0


def check_launch(nodes: int, devices: int, environment: Mapping[str, str]) -> None:
    """Check that an outside launcher, if there is one, has started as many processes as the run asks for."""
    if external_rank(environment) is None:
        return
    by_srun = not {"RANK", "WORLD_SIZE"} <= {*environment}
    size = SRUN_TASKS if by_srun else "WORLD_SIZE"
    if int(environment[size]) != nodes * devices:
        raise RecipeError(
            f"the launcher has started {size}={environment[size]} processes, hardware.nodes={nodes} times "
            f"hardware.devices={devices} is {nodes * devices}; change either until they agree, or unset {size} if no "
            "launcher has started this process"
        )
    local = environment.get(_PER_NODE[by_srun], str(devices))
    if {*re.findall(r"(?<![x\d])\d+", local)} != {str(devices)}:
        raise RecipeError(
            f"the launcher has started {_PER_NODE[by_srun]}={local} processes per node, hardware.devices={devices}; "
            "change either until they agree"
        )


def torchrun_needed(name: str, nodes: int, devices: int, accelerator: str, command: Sequence[str]) -> RecipeError:
    """The error for a run on several nodes that no launcher has started; its message is the way to start the run."""
    interface = "GLOO_SOCKET_IFNAME" if accelerator == "cpu" else "NCCL_SOCKET_IFNAME"
    torchrun = f"torchrun --nnodes={nodes} --nproc_per_node={devices} --rdzv-backend=c10d"
    endpoint = f"--rdzv-endpoint={socket.gethostname()}:29500"
    return RecipeError(
        f"hardware={name} with {nodes} nodes runs under a launcher, and none has started this process (there is no "
        f"RANK). Type the same line on each of the {nodes} nodes:\n"
        f"  {interface}=INTERFACE {torchrun} {endpoint} {shlex.join(command)}\n"
        f"INTERFACE is the network interface that reaches the other nodes (ip -br address); {socket.gethostname()}, "
        "this machine, is one of them. In an allocation of SLURM, put srun before the command instead. Other "
        "launchers: set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."
    )


def hydra_arguments(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The arguments to be added to a command line, so that one run has one folder.

    Every process of an outside launcher composes its own configuration, with its own time in ``hydra.run.dir``. Rank 0
    alone writes, so the other ranks get no folder and no log file. A ``hydra.run.dir`` in the arguments stays as it is.
    """
    by_lightning = external_rank(environment) is None and "LOCAL_RANK" in environment
    if by_lightning or not global_rank(environment):
        return []  # Lightning gives the processes that it starts such arguments itself
    named = any(argument.lstrip("+").startswith("hydra.run.dir=") for argument in arguments)
    return [
        "hydra.output_subdir=null",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
        *([] if named else ["hydra.run.dir=."]),
    ]


def script(name: str) -> str:
    """Returns a script of recipes/ as a command names it that is typed in the current folder."""
    return f"recipes/{name}" if Path.cwd() == ROOT else str(ROOT / "recipes" / name)


def run_command(arguments: Sequence[str]) -> list[str]:
    """The command that starts `run.py` with these arguments."""
    return [sys.executable, str(ROOT / "recipes" / "run.py"), *arguments]


def end_session(process: subprocess.Popen[Any]) -> None:
    """End a run that has a session of its own, with all of its processes: with SIGTERM, and after `END_S` seconds with
    SIGKILL. After a normal end, nothing is left."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=END_S)
    except BaseException as error:  # an interrupt must not leave the run alone either
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


def folder_argument(folder: Path) -> str:
    """Hydra's override that makes ``folder`` the folder of a run, whatever characters its name has."""
    quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return f"hydra.run.dir='{quoted}'"


def local_processes(accelerator: str, devices: int | str | Sequence[int]) -> int:
    """Number of processes that ``trainer.devices`` asks for on this machine.

    Args:
        accelerator: ``trainer.accelerator``.
        devices: ``trainer.devices``: a number, a list of devices, or ``"auto"`` (also -1) for all GPUs.
    """
    if not isinstance(devices, int | str):
        return len(devices)
    if str(devices).isdecimal():
        return max(1, int(devices))
    return max(1, gpus()) if accelerator in ("gpu", "cuda", "auto") else 1


def gpus() -> int:
    """Number of GPUs that torch finds on this machine."""
    import torch  # here, not above: torch takes seconds to import, and most command lines are checked without it

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
