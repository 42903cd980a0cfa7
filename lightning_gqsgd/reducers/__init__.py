"""Schedules of collectives that turn every rank's gradient into the mean of all.

A reducer is one file with one class, and one line in `choice.FLAT` (or here, if it has several levels).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lightning_gqsgd.codecs import codec_of
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.memory import MemoryStore, resolve_memory
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
from lightning_gqsgd.reducers.hierarchical import Hierarchical, between_nodes, level_or_levels

if TYPE_CHECKING:
    from lightning_gqsgd.config import GQSGDConfig

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
    "check_reducer",
    "choose_reducer",
    "new_store",
    "reduced",
    "resolve",
    "resolve_each",
    "run_virtual",
    "setting_for",
    "stages",
]


def check_reducer(config: GQSGDConfig) -> None:
    """Check what a configuration asks of its reducer, before the number of ranks is known.

    Raises:
        ConfigError: the reducer does not go with the codec, or with the scales, memories or coder that are asked for.
    """
    codec, name = codec_of(config), config.reducer
    if config.scale == "global" and not codec.leaves_room_for_sums:
        raise ConfigError(
            f"bits={codec.bits} leaves no room to sum the codes of two ranks; take bits=2 or reducer='two_shot'"
        )
    if config.coder == "elias" and (name == "auto" or "elias" not in REDUCERS[name].coders or not codec.has_odd_levels):
        raise ConfigError("coder='elias' is for codec='linear' with dither='stochastic' and reducer='gather'")
    if config.node_size and name != "hierarchical":
        raise ConfigError(f"node_size={config.node_size} is for reducer='hierarchical', not {name!r}; leave it out")
    if name == "auto":
        return
    reducer = REDUCERS[name]
    reducer.check(config, codec)
    if reducer.scales and config.scale not in ("auto", *reducer.scales):
        others = [other for other, kind in FLAT.items() if config.scale in kind.scales]
        raise ConfigError(
            f"scale={config.scale!r} does not fit reducer={name!r}, which needs {reducer.scales[0]} scales; "
            f"take scale='auto' or one of the reducers {', '.join(others)}"
        )
    if config.down is not None and "memory_down" not in reducer.memories:
        raise ConfigError(f"memory_down needs a way back that is encoded: reducer='two_shot', not {name!r}")
    if config.up is not None and "memory" not in reducer.memories:
        fitting = ", ".join(other for other, kind in REDUCERS.items() if "memory" in kind.memories)
        raise ConfigError(f"memory goes with the reducers {fitting}, not {name!r}")


def resolve(config: GQSGDConfig, ranks: int) -> GQSGDConfig:
    """The configuration with the reducer chosen and all numbers of its memories given.

    A field ``scale`` that only repeats what the reducer always has becomes "auto".

    Raises:
        ConfigError: bits are to be chosen while training, or given by name (see `resolve_each`); see also
            `choose_reducer`, `hierarchical.level_or_levels` and `memory.resolve_memory`.

    Warns:
        StabilityWarning: see `memory.resolve_memory`.
    """
    if config.chooses_bits:
        allowed = ", ".join(map(str, config.allow))
        how = (
            "auto=True chooses bits by the length of the steps"
            if config.auto
            else 'bits="auto" chooses bits by the noise of the gradients'
        )
        raise ConfigError(f"{how} of a DDP training; here, give one of bits={allowed}")
    if config.bits_by_name is not None:
        raise ConfigError(
            f"bits={config.bits!r} are for the parameters of DistributedDataParallel and FSDP2, which have names; "
            "here, give bits as a number"
        )
    config = level_or_levels(config, ranks)
    if config.reducer == "hierarchical":
        return config
    reducer = choose_reducer(config, ranks)
    kept = config.scale if config.scale in REDUCERS[reducer].scales[1:] else "auto"
    config = replace(config, reducer=reducer, scale=kept)
    if config.up is not None and config.up.shared and config.memory_down == "auto":
        # The way back has the same reference, where there is a way back that is encoded.
        config = replace(config, memory_down=config.up) if "memory_down" in REDUCERS[reducer].memories else config
    return resolve_memory(config)


def resolve_each(config: GQSGDConfig, ranks: int) -> dict[int, GQSGDConfig]:
    """`resolve` of each configuration that parameters have, by their bits; the first is that of the first pattern."""
    return {bits: resolve(one_width, ranks) for bits, one_width in config.by_bits().items()}


def stages(config: GQSGDConfig, ranks: int) -> list[tuple[Scope, ...]]:
    """Which ranks exchange in each stage of a piece; the configuration has its reducer chosen."""
    return REDUCERS[config.reducer].scopes(config, ranks)


def setting_for(setting: Setting, *, compressed: bool) -> Setting:
    """The setting to plan with: the given one, or that for parameters all of which travel uncompressed."""
    stays = compressed or REDUCERS[setting.config.reducer].stays_when_uncompressed
    return setting if stays else uncompressed(setting)


def new_store(
    config: GQSGDConfig, ranks: int, sizes: Mapping[int, int], dtype: torch.dtype, device: torch.device
) -> MemoryStore:
    """The empty memory of one rank, for a configuration with its reducer chosen; see `memory.MemoryStore`."""
    owners = ranks if REDUCERS[config.reducer].owns_shards else 1
    return MemoryStore(config, owners, sizes, dtype, device)
