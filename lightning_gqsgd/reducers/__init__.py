"""Reducers: schedules of collectives that replace every rank's gradient by the mean of all ranks.

Each reducer is one file with one class, and has one line in `REDUCERS`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_gqsgd.reducers.base import Exchange, Reducer, Setting, StepKeys, Steps, reduced, run_virtual
from lightning_gqsgd.reducers.bf16 import Bf16
from lightning_gqsgd.reducers.gather import Gather
from lightning_gqsgd.reducers.hierarchical import Hierarchical
from lightning_gqsgd.reducers.lossless import Lossless
from lightning_gqsgd.reducers.memory import MemoryStore, kinds
from lightning_gqsgd.reducers.native import Native
from lightning_gqsgd.reducers.sum import Sum
from lightning_gqsgd.reducers.tree import Tree
from lightning_gqsgd.reducers.two_shot import TwoShot, uncompressed

REDUCERS: dict[str, type[Reducer]] = {
    "native": Native,
    "bf16": Bf16,
    "lossless": Lossless,
    "sum": Sum,
    "two_shot": TwoShot,
    "gather": Gather,
    "tree": Tree,
    "hierarchical": Hierarchical,
}

__all__ = [
    "REDUCERS",
    "Exchange",
    "Reducer",
    "Setting",
    "StepKeys",
    "Steps",
    "new_store",
    "reduced",
    "run_virtual",
    "setting_for",
]


def setting_for(setting: Setting, *, compressed: bool) -> Setting:
    """Returns the setting to plan with. If ``compressed`` is false, all parameters are sent uncompressed, and this may
    need another setting than the given one (see `two_shot.uncompressed`)."""
    stays = compressed or setting.reducer.stays_when_uncompressed
    return setting if stays else uncompressed(setting)


def new_store(setting: Setting, sizes: Mapping[int, int], device: torch.device) -> MemoryStore:
    """Returns the empty memory of one rank; see `memory.MemoryStore`."""
    owners = setting.ranks if setting.reducer.owns_shards else 1
    kept = kinds(setting.up, setting.down)
    return MemoryStore(kept, setting.block_size, owners, sizes, setting.dtype, device)
