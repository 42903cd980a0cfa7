"""Builds the codec of a configuration, and chooses its reducer for a number of ranks, with one level or two."""

from __future__ import annotations

from dataclasses import replace

from lightning_gqsgd.codecs import CODECS, Codec
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.reducers import REDUCERS
from lightning_gqsgd.spec.fields import AnyFields, Fields


def codec_of(config: Fields) -> Codec:
    """Returns the codec that the fields of a configuration describe.

    Raises:
        ConfigError: see `Codec.check_bits` and `Codec.of`; or if the codec reads a field that configurations lack.
    """
    kind = CODECS[config.codec]
    for name in sorted(kind.fields):
        if not hasattr(config, name):
            raise ConfigError(
                f"codec={config.codec!r} reads the field {name!r}, which configurations do not have; add a line "
                f"'{name}: TYPE = DEFAULT' to Fields and a line '{name}: TYPE' to FieldArguments, both in "
                "lightning_gqsgd/spec/fields.py"
            )
    kind.check_bits(config.num_bits)
    return kind.of(config.num_bits, **{name: getattr(config, name) for name in kind.fields})


def level_or_levels(config: AnyFields, ranks: int) -> AnyFields:
    """Returns the configuration. If one level is enough for `hierarchical`, it has a reducer of one level instead.

    One level is enough if each node has one rank, or if there is only one node.

    Raises:
        ConfigError: if the size of nodes is not given, if nodes have unequal sizes, or if no reducer fits between them.
    """
    if config.reducer != "hierarchical":
        return config
    size = config.node_size if ranks > 1 else 1
    if not size:
        raise ConfigError("reducer='hierarchical' needs to know how many ranks each node has: give node_size")
    if ranks % size:
        raise ConfigError(
            f"{ranks} ranks do not make nodes of {size}; reducer='hierarchical' needs nodes of equal size: "
            "correct node_size, or take another reducer"
        )
    # With one node, there are no links between nodes. With one rank per node, there is nothing to average inside.
    if size == ranks:
        return replace(config, reducer="native", node_size=0, scale="auto", norm_over_ranks="max")
    if size == 1:
        return replace(config, reducer="auto", node_size=0)
    between_nodes(config, ranks)
    return config


def between_nodes(config: AnyFields, ranks: int) -> AnyFields:
    """Returns the configuration for the ranks that have the same place on each node."""
    flat = replace(config, reducer="auto", node_size=0)
    return replace(flat, reducer=choose_reducer(flat, ranks // config.node_size))


def choose_reducer(config: Fields, ranks: int) -> str:
    """Returns the configured reducer, or for "auto", of reducers that send about as many bytes, the one with the
    smallest predicted error for this number of ranks.

    Raises:
        ConfigError: if the reducer cannot add the codes of so many ranks.
    """
    codec = codec_of(config)
    name = _automatic(config, codec, ranks) if config.reducer == "auto" else config.reducer
    # The quantiser is built only for its check: it refuses numbers of ranks whose sums do not fit the bits.
    if REDUCERS[name].adds_codes:
        codec.quantiser(config.block_size, summed=ranks)
    return name


def _automatic(config: Fields, codec: Codec, ranks: int) -> str:
    candidates = _candidates(config, codec, ranks)
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda name: REDUCERS[name].mean_error(codec, ranks))


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
