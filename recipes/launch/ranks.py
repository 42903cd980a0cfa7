"""The ranks of a launch as Lightning sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.utilities import rank_zero_only

from lightning_gqsgd.errors import first_line
from lightning_gqsgd.wire.store import wait_for_store
from recipes.errors import RecipeError
from recipes.launch.processes import external_rank, global_rank


def tell_lightning_the_rank(environment: Mapping[str, str], devices: int) -> None:
    """Set the rank that everything asks that is done on rank 0 alone: `is_rank_zero`, and Lightning's `rank_zero_only`.

    Lightning reads the rank when it is imported, and again when a Trainer is made. A process that was forked after the
    import, or that was given its place after the import, as Ray's workers are, would take itself for rank 0 in between.
    Data are prepared and dashboards are told of the run in between.
    """
    rank_zero_only.rank = global_rank(environment, devices)  # type: ignore[attr-defined]


def is_rank_zero() -> bool:
    """Whether this process is the one that speaks and writes; there need not be a Trainer yet."""
    return bool(rank_zero_only.rank == 0)  # type: ignore[attr-defined]


def cluster_environment(environment: MutableMapping[str, str], devices: int) -> list[Any]:
    """Plugins for the Trainer of a process whose launcher Lightning may not recognise.

    Lightning recognises torchrun by itself. Under any other launcher, which sets RANK, WORLD_SIZE and MASTER_ADDR, it
    would start processes of its own, and so it would under srun in a job named ``interactive``. In an allocation of
    SLURM without srun it would start none: it takes every process that has SLURM_NTASKS for one of srun's.

    Args:
        environment: the environment variables of this process. LOCAL_RANK is set to 0 if the launcher has not set it,
            and SLURM_NTASKS_PER_NODE, without which Lightning refuses srun's processes, to `devices`.
        devices: number of processes on each node, which `processes.check_launch` has compared with the launcher's.
    """
    if external_rank(environment) is None:
        return [LightningEnvironment()] if "SLURM_NTASKS" in environment else []
    if "RANK" not in environment:
        environment.setdefault("SLURM_NTASKS_PER_NODE", str(devices))
        return [SLURMEnvironment()]
    if TorchElasticEnvironment.detect():
        return []
    environment.setdefault("LOCAL_RANK", "0")
    return [TorchElasticEnvironment()]


@contextmanager
def meeting_of_ranks(
    environment: Mapping[str, str], devices: int, within: timedelta, *, applies: Callable[[], bool]
) -> Iterator[None]:
    """A context in which ranks of an outside launcher that do not meet within a time end a run with one `RecipeError`.

    An error of torch's stays as it is if ``applies`` returns False after it.
    """
    address, port = (environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    rank = global_rank(environment, devices)
    try:
        if external_rank(environment) and address and port.isdecimal():
            wait_for_store(address, int(port), within.total_seconds())
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if not applies():
            raise
        raise RecipeError(
            f"rank {rank} has not met the others at MASTER_ADDR={address}, MASTER_PORT={port} ({first_line(error)}); "
            "start all ranks, with an address and a port of rank 0's machine that all machines reach; `gqsgd doctor "
            "--nodes` under the same launcher looks for the reason",
            of_one_process=True,  # the others may have met
        ) from error
