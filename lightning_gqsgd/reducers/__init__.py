"""Schedules of collectives that turn every rank's gradient into the mean of all.

A reducer is one file with one class, and one line in `choice.FLAT` (or here, if it has several levels).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from lightning_gqsgd.reducers.base import (
    Exchange,
    Reducer,
    Scope,
    Setting,
    StepKeys,
    Steps,
    reduced,
    run_virtual,
    uncompressed,
)
from lightning_gqsgd.reducers.choice import FLAT, choose_reducer
from lightning_gqsgd.reducers.hierarchical import Hierarchical, between_nodes
from lightning_gqsgd.reducers.memory import MemoryStore, kinds

if TYPE_CHECKING:
    from lightning_gqsgd.spec.fields import Fields

REDUCERS: dict[str, type[Reducer]] = {**FLAT, "hierarchical": Hierarchical}

__all__ = [
    "REDUCERS",
    "Exchange",
    "Reducer",
    "Scope",
    "Setting",
    "StepKeys",
    "Steps",
    "between_nodes",
    "choose_reducer",
    "new_store",
    "reduced",
    "run_virtual",
    "setting_for",
    "stages",
]


def stages(config: Fields, ranks: int) -> list[tuple[Scope, ...]]:
    """Returns which ranks exchange in each stage of a piece; the configuration has its reducer chosen."""
    return REDUCERS[config.reducer].scopes(config, ranks)


def setting_for(setting: Setting, *, compressed: bool) -> Setting:
    """Returns the setting to plan with: the given one, or that for parameters all of which travel uncompressed."""
    stays = compressed or REDUCERS[setting.config.reducer].stays_when_uncompressed
    return setting if stays else uncompressed(setting)


def new_store(
    config: Fields, ranks: int, sizes: Mapping[int, int], dtype: torch.dtype, device: torch.device
) -> MemoryStore:
    """Returns the empty memory of one rank, for a configuration with its reducer chosen; see `memory.MemoryStore`."""
    owners = ranks if REDUCERS[config.reducer].owns_shards else 1
    return MemoryStore(kinds(config), config.block_size, owners, sizes, dtype, device)
