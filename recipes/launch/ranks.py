"""The ranks of a launch as Lightning sees them."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.utilities import rank_zero_only

from recipes.launch.processes import external_rank, global_rank


def tell_lightning_the_rank(environment: Mapping[str, str], devices: int) -> None:
    """Set the rank that everything asks that is done on rank 0 alone: `is_rank_zero`, and Lightning's `rank_zero_only`.

    Lightning reads the rank when it is imported, and again when a Trainer is made. A process that was forked after the
    import, or that was given its place after the import, as Ray's workers are, would take itself for rank 0 in between.
    Data are prepared and dashboards are told of the run in between.

    Args:
        environment: the environment variables of this process.
        devices: number of processes on each node.
    """
    rank_zero_only.rank = global_rank(environment, devices)  # type: ignore[attr-defined]


def is_rank_zero() -> bool:
    """Whether this process is the one that speaks and writes; there need not be a Trainer yet."""
    return bool(rank_zero_only.rank == 0)  # type: ignore[attr-defined]


def cluster_environment(environment: MutableMapping[str, str]) -> list[Any]:
    """Plugins for the Trainer of a process that was started with RANK, WORLD_SIZE and MASTER_ADDR, but not by torchrun.

    Lightning recognises torchrun and SLURM by itself. Under any other launcher it would start processes of its own.

    Args:
        environment: the environment variables of this process; LOCAL_RANK is set to 0 if the launcher has not set it.
    """
    if external_rank(environment) is None or "RANK" not in environment or TorchElasticEnvironment.detect():
        return []
    environment.setdefault("LOCAL_RANK", "0")
    return [TorchElasticEnvironment()]
