"""The reducers over one level of ranks, and which of them "auto" is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_gqsgd.codecs import Codec, codec_of
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.reducers.base import Reducer
from lightning_gqsgd.reducers.bf16 import Bf16
from lightning_gqsgd.reducers.gather import Gather
from lightning_gqsgd.reducers.lossless import Lossless
from lightning_gqsgd.reducers.native import Native
from lightning_gqsgd.reducers.sum import Sum
from lightning_gqsgd.reducers.tree import Tree
from lightning_gqsgd.reducers.two_shot import TwoShot

if TYPE_CHECKING:
    from lightning_gqsgd.spec.fields import Fields

FLAT: dict[str, type[Reducer]] = {
    "native": Native,
    "bf16": Bf16,
    "lossless": Lossless,
    "sum": Sum,
    "two_shot": TwoShot,
    "gather": Gather,
    "tree": Tree,
}


def choose_reducer(config: Fields, ranks: int) -> str:
    """Returns the reducer for ``ranks``: the configured one, or for "auto" the one with the least predicted error on
    the same wire.

    Raises:
        ConfigError: the configured reducer (or the only one with the configured scales) cannot add the codes of so many
            ranks.
    """
    codec = codec_of(config)
    name = _automatic(config, codec, ranks) if config.reducer == "auto" else config.reducer
    # The quantiser is built for its check only: it refuses a world size whose sums do not fit the bits.
    if FLAT[name].adds_codes:
        codec.quantiser(config.block_size, summed=ranks)
    return name


def _automatic(config: Fields, codec: Codec, ranks: int) -> str:
    candidates = _candidates(config, codec, ranks)
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda name: FLAT[name].mean_error(codec, ranks))


def _candidates(config: Fields, codec: Codec, ranks: int) -> list[str]:
    """Returns the reducers that "auto" chooses among, all of which send about the same number of bytes."""
    if config.down is not None:  # only two_shot has a way back with a memory
        return ["two_shot"]
    # A sum of codes needs shared scales. Integers are added by the backend, powers of two hop by hop. All other codes
    # can only be gathered.
    if config.scale == "global":
        return ["sum"] if codec.adds_as_integers else ["tree"] if codec.adds_in_pairs else ["gather"]
    if codec.biased_by:  # two_shot would need a memory on the way back
        return ["gather"]
    # At two ranks a gather sends as many bytes as two shots and rounds once less; beyond, it sends more.
    names = ["two_shot"] + (["gather"] if ranks <= 2 else [])
    if config.scale == "auto" and codec.adds_as_integers and _can_add(codec, config.block_size, ranks):
        names.append("sum")
    return names


def _can_add(codec: Codec, block_size: int, ranks: int) -> bool:
    try:
        codec.quantiser(block_size, summed=ranks)
    except ConfigError:
        return False
    return True
