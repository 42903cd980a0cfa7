"""How this process was started: by hand, by Lightning, or by a launcher outside (torchrun, netlab, SLURM)."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

import torch

from recipes.tasks.errors import RecipeError


class LaunchError(RecipeError):
    """The processes that are there are not those that the run asks for; the message names the remedy."""


def external_rank(environment: Mapping[str, str]) -> int | None:
    """Global rank if a launcher outside has started this process (Lightning's own children have no RANK), else None."""
    if "WORLD_SIZE" in environment and "RANK" in environment:
        return int(environment["RANK"])
    if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment:
        return int(environment["SLURM_PROCID"])
    return None


def check_launch(nodes: int, devices: int, environment: Mapping[str, str]) -> None:
    """Whether an outside launcher, if there is one, has started ``nodes`` x ``devices`` processes.

    Raises:
        LaunchError: another number, on all nodes together or on this one.
    """
    if external_rank(environment) is None:
        return
    size = "WORLD_SIZE" if "RANK" in environment and "WORLD_SIZE" in environment else "SLURM_NTASKS"
    if int(environment[size]) != nodes * devices:
        raise LaunchError(
            f"the launcher has started {size}={environment[size]} processes, hardware.nodes={nodes} times "
            f"hardware.devices={devices} is {nodes * devices}; let one of them follow the other"
        )
    local = environment.get("LOCAL_WORLD_SIZE", str(devices))
    if int(local) != devices:
        raise LaunchError(
            f"the launcher has started LOCAL_WORLD_SIZE={local} processes on this node, hardware.devices={devices}; "
            "let one of them follow the other"
        )


def torchrun_needed(name: str, nodes: int, devices: int, accelerator: str, command: Sequence[str]) -> LaunchError:
    """The error for a run on several nodes that no launcher has started: it says how to start it.

    Args:
        name: of the hardware profile.
        nodes, devices, accelerator: of the run; devices per node.
        command: script and arguments, as they were typed.
    """
    interface = "GLOO_SOCKET_IFNAME" if accelerator == "cpu" else "NCCL_SOCKET_IFNAME"
    torchrun = f"torchrun --nnodes={nodes} --nproc_per_node={devices} --rdzv-backend=c10d"
    endpoint = f"--rdzv-endpoint={socket.gethostname()}:29500"
    return LaunchError(
        f"hardware={name} with {nodes} nodes runs under a launcher, and none has started this process (there is no "
        f"RANK). The same line on each of the {nodes} nodes:\n"
        f"  {interface}=INTERFACE {torchrun} {endpoint} {shlex.join(command)}\n"
        f"INTERFACE is the network interface that reaches the other nodes (ip -br address); {socket.gethostname()}, "
        "this machine, is one of them. Other launchers: set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."
    )


def hydra_arguments(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """What to add to the command line so that one run has one directory.

    Every process of an external launch composes its own configuration, with its own time in ``hydra.run.dir``. Only
    rank 0 writes, so the others get no directory and no log file; an explicit ``hydra.run.dir`` is left as it is.
    """
    if not external_rank(environment):
        return []
    named = any(argument.lstrip("+").startswith("hydra.run.dir=") for argument in arguments)
    return ["hydra.output_subdir=null", "hydra/job_logging=none", *([] if named else ["hydra.run.dir=."])]


def folder_argument(folder: Path) -> str:
    """Hydra's override that makes ``folder`` the folder of a run, whatever signs its name has."""
    quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return f"hydra.run.dir='{quoted}'"


def set_threads(threads: int | None, local_processes: int, environment: MutableMapping[str, str]) -> int:
    """Limit the compute threads of this process and of those that it starts; returns the number.

    Args:
        threads: the number, or None: OMP_NUM_THREADS if a launcher has set it, else cores / local_processes.
        local_processes: processes on this machine; LOCAL_WORLD_SIZE of a launcher goes before it.
    """
    if threads is None and environment.get("OMP_NUM_THREADS", "").isdecimal():
        threads = int(environment["OMP_NUM_THREADS"])
    if threads is None:
        threads = max(1, cores() // max(1, int(environment.get("LOCAL_WORLD_SIZE", local_processes))))
    environment["OMP_NUM_THREADS"] = str(threads)  # Lightning sets its own number where it finds none
    torch.set_num_threads(threads)
    return threads


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_processes(accelerator: str, devices: int | str | Sequence[int]) -> int:
    """Number of processes that ``trainer.devices`` asks for on this machine."""
    if not isinstance(devices, int | str):
        return len(devices)
    if str(devices).isdecimal():
        return max(1, int(devices))
    return torch.cuda.device_count() if accelerator in ("gpu", "cuda", "auto") and torch.cuda.is_available() else 1
