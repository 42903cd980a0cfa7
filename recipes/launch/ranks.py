"""The ranks of a launch as Lightning sees them."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.utilities import rank_zero_only

from recipes.launch.processes import external_rank


def is_rank_zero() -> bool:
    """Whether this process is the one that speaks and writes; the answer is right before there is a Trainer, too."""
    return getattr(rank_zero_only, "rank", 0) == 0


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
