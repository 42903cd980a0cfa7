"""Schedules of collectives that turn every rank's gradient into the mean of all."""

from __future__ import annotations

from dataclasses import replace

from lightning_gqsgd.codecs import LinearCodec, codec_of
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.memory import resolve_memory
from lightning_gqsgd.reducers.base import Exchange, Reducer, Setting, StepKeys, Steps, run_virtual
from lightning_gqsgd.reducers.gather import Gather
from lightning_gqsgd.reducers.native import Native
from lightning_gqsgd.reducers.sum import Sum
from lightning_gqsgd.reducers.tree import Tree
from lightning_gqsgd.reducers.two_shot import TwoShot

REDUCERS: dict[str, type[Reducer]] = {
    "native": Native,
    "sum": Sum,
    "two_shot": TwoShot,
    "gather": Gather,
    "tree": Tree,
}

__all__ = [
    "REDUCERS",
    "Exchange",
    "Reducer",
    "Setting",
    "StepKeys",
    "Steps",
    "choose_reducer",
    "resolve",
    "run_virtual",
    "stages",
]


def choose_reducer(config: GQSGDConfig, ranks: int) -> str:
    """The reducer for ``ranks``: the configured one, or for "auto" the one with the least predicted error on the same
    wire.

    Raises:
        ConfigError: the configured reducer (or the only one with the configured scales) cannot sum so many ranks.
    """
    name = _automatic(config, ranks) if config.reducer == "auto" else config.reducer
    if name in ("sum", "tree"):
        codec_of(config).quantiser(config.block_size, summed=ranks)
    return name


def resolve(config: GQSGDConfig, ranks: int) -> GQSGDConfig:
    """The configuration with the reducer chosen, all numbers of its memories given, and no demand on scales beyond what
    that reducer has anyway.

    Raises:
        ConfigError: see `choose_reducer` and `memory.resolve_memory`.

    Warns:
        StabilityWarning: see `memory.resolve_memory`.
    """
    reducer = choose_reducer(config, ranks)
    shared = reducer == "gather" and config.scale == "global"
    return resolve_memory(replace(config, reducer=reducer, scale="global" if shared else "auto"))


def stages(config: GQSGDConfig, ranks: int) -> int:
    """How many exchanges a piece takes at most; at least two, for what travels uncompressed."""
    return max(2, REDUCERS[config.reducer].stages(config, ranks))


def _automatic(config: GQSGDConfig, ranks: int) -> str:
    codec = codec_of(config)
    if config.down is not None:
        return "two_shot"
    if config.scale == "global":
        return "sum" if isinstance(codec, LinearCodec) else "tree" if not config.mantissa else "gather"
    # At two ranks a gather moves as many bytes as two shots and rounds once less; beyond, it moves more. A codec that
    # is biased would need a memory on the way back.
    if not isinstance(codec, LinearCodec) or config.biased:
        return "gather" if ranks <= 2 or config.biased else "two_shot"
    names = ["two_shot"] + (["gather"] if ranks <= 2 else [])
    if config.scale == "auto" and _fits_sum(codec, ranks):
        names.append("sum")
    return min(names, key=lambda name: codec.mean_error(name, ranks))


def _fits_sum(codec: LinearCodec, ranks: int) -> bool:
    try:
        codec.levels(summed=ranks)
    except ConfigError:
        return False
    return True
