"""The reducers over one level of ranks, and which of them "auto" is."""

from __future__ import annotations

from lightning_gqsgd.codecs import LinearCodec, codec_of
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.reducers.base import Reducer
from lightning_gqsgd.reducers.gather import Gather
from lightning_gqsgd.reducers.native import Native
from lightning_gqsgd.reducers.sum import Sum
from lightning_gqsgd.reducers.tree import Tree
from lightning_gqsgd.reducers.two_shot import TwoShot

FLAT: dict[str, type[Reducer]] = {
    "native": Native,
    "sum": Sum,
    "two_shot": TwoShot,
    "gather": Gather,
    "tree": Tree,
}


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
