"""How this process was started: by hand, by Lightning, or by a launcher outside (torchrun, netlab, SLURM)."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.utilities import rank_zero_only


def is_rank_zero() -> bool:
    """Whether this is the process that speaks and writes; right before there is a Trainer, too."""
    return getattr(rank_zero_only, "rank", 0) == 0


def external_rank(environment: Mapping[str, str]) -> int | None:
    """Global rank if a launcher outside has started this process (Lightning's own children have no RANK), else None."""
    if "WORLD_SIZE" in environment and "RANK" in environment:
        return int(environment["RANK"])
    if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment:
        return int(environment["SLURM_PROCID"])
    return None


def hydra_arguments(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """What to add to the command line so that one run has one directory.

    Every process of an external launch composes its own configuration, with its own time in ``hydra.run.dir``. Only
    rank 0 writes, so the others get no directory and no log file; an explicit ``hydra.run.dir`` is left as it is.
    """
    if not external_rank(environment):
        return []
    named = any(argument.lstrip("+").startswith("hydra.run.dir=") for argument in arguments)
    return ["hydra.output_subdir=null", "hydra/job_logging=none", *([] if named else ["hydra.run.dir=."])]


def cluster_environment(environment: MutableMapping[str, str]) -> list[Any]:
    """Plugins for a Trainer whose processes were started with RANK, WORLD_SIZE and MASTER_ADDR but not by torchrun.

    Lightning recognises torchrun and SLURM by itself; anything else it would take for a request to start processes.
    """
    if external_rank(environment) is None or "RANK" not in environment or TorchElasticEnvironment.detect():
        return []
    environment.setdefault("LOCAL_RANK", "0")
    return [TorchElasticEnvironment()]


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


def local_processes(accelerator: str, devices: int | str) -> int:
    """Number of processes that ``trainer.devices`` asks for on this machine."""
    if isinstance(devices, int) or str(devices).isdecimal():
        return max(1, int(devices))
    return torch.cuda.device_count() if accelerator in ("gpu", "cuda", "auto") and torch.cuda.is_available() else 1
