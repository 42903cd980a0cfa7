"""Schedules of collectives that turn every rank's gradient into the mean of all."""

from __future__ import annotations

from dataclasses import replace

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.memory import resolve_memory
from lightning_gqsgd.reducers.base import ALL, Exchange, Reducer, Scope, Setting, StepKeys, Steps, run_virtual
from lightning_gqsgd.reducers.choice import FLAT, choose_reducer
from lightning_gqsgd.reducers.hierarchical import Hierarchical, between_nodes, level_or_levels, scopes

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
    "resolve",
    "run_virtual",
    "stages",
]


def resolve(config: GQSGDConfig, ranks: int) -> GQSGDConfig:
    """The configuration with the reducer chosen, all numbers of its memories given, and no demand on scales beyond what
    that reducer has anyway.

    Raises:
        ConfigError: see `choose_reducer`, `hierarchical.level_or_levels` and `memory.resolve_memory`.

    Warns:
        StabilityWarning: see `memory.resolve_memory`.
    """
    config = level_or_levels(config, ranks)
    if config.reducer == "hierarchical":
        return config
    reducer = choose_reducer(config, ranks)
    shared = reducer == "gather" and config.scale == "global"
    return resolve_memory(replace(config, reducer=reducer, scale="global" if shared else "auto"))


def stages(config: GQSGDConfig, ranks: int) -> list[tuple[Scope, ...]]:
    """Between whom the exchanges of a piece are, stage by stage; at least two stages, for what travels uncompressed."""
    count = max(2, REDUCERS[config.reducer].stages(config, ranks))
    return scopes(config, count) if config.reducer == "hierarchical" else [(ALL,)] * count
