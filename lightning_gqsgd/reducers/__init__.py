"""Schedules of collectives that turn every rank's gradient into the mean of all."""

from __future__ import annotations

from dataclasses import replace

from lightning_gqsgd.codecs import LinearCodec
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.reducers.base import Exchange, Reducer, Setting, StepKeys, Steps, run_virtual
from lightning_gqsgd.reducers.gather import Gather
from lightning_gqsgd.reducers.native import Native
from lightning_gqsgd.reducers.sum import Sum
from lightning_gqsgd.reducers.two_shot import TwoShot

REDUCERS: dict[str, type[Reducer]] = {"native": Native, "sum": Sum, "two_shot": TwoShot, "gather": Gather}

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
]


def choose_reducer(config: GQSGDConfig, ranks: int) -> str:
    """The reducer for ``ranks``: the configured one, or for "auto" the one with the least predicted error on the same
    wire.

    Raises:
        ConfigError: the configured reducer (or the only one with the configured scales) cannot sum so many ranks.
    """
    codec = LinearCodec(config.bits, config.dither)
    if config.reducer != "auto":
        if config.reducer == "sum":
            codec.levels(summed=ranks)
        return config.reducer
    if config.scale == "global":
        codec.levels(summed=ranks)
        return "sum"
    # At two ranks a gather moves as many bytes as two shots and rounds once less; beyond, it moves more.
    names = ["two_shot"] + (["gather"] if ranks <= 2 else [])
    if config.scale == "auto" and _fits_sum(codec, ranks):
        names.append("sum")
    return min(names, key=lambda name: codec.mean_error(name, ranks))


def resolve(config: GQSGDConfig, ranks: int) -> GQSGDConfig:
    """The configuration with the reducer chosen, and no demand on scales beyond what that reducer has anyway.

    Raises:
        ConfigError: see `choose_reducer`.
    """
    return replace(config, reducer=choose_reducer(config, ranks), scale="auto")


def _fits_sum(codec: LinearCodec, ranks: int) -> bool:
    try:
        codec.levels(summed=ranks)
    except ConfigError:
        return False
    return True
