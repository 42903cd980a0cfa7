"""Checks that the values of several fields can be combined: scales, reducers, memories and sparse gradients."""

from __future__ import annotations

from lightning_gqsgd.codecs import Codec
from lightning_gqsgd.codecs.scales import NORMS, NORMS_OVER_RANKS, SCALE_PER
from lightning_gqsgd.config.choosing import codec_of
from lightning_gqsgd.errors import ConfigError, check_one_of, check_real
from lightning_gqsgd.reducers import REDUCERS
from lightning_gqsgd.spec.fields import SPARSE_LIMIT, Fields
from lightning_gqsgd.spec.memories import described

#: The scales: those of all ranks together, each rank's own ones, or those that the reducer needs.
SCALES = ("auto", "global", "local")
#: What can be done with sparse gradients.
SPARSE_METHODS = ("refuse", "gather", "logarithmic", "sketch")
_MOST_ROWS = 2**20


def adds_codes(config: Fields) -> bool:
    """Returns whether the reducer adds the codes of several ranks; False for "auto", which is not chosen yet."""
    return config.reducer != "auto" and REDUCERS[config.reducer].adds_codes


def shares_scales(config: Fields) -> bool:
    """Returns whether all ranks have the same scales in the messages that they send at the same time."""
    return config.scale == "global" or adds_codes(config)


def check_scales(config: Fields, codec: Codec) -> None:
    """Raise ConfigError for a field about scales that is out of its range, or does not go with the codec."""
    check_one_of("norm", config.norm, NORMS)
    check_one_of("scale", config.scale, SCALES)
    check_one_of("norm_over_ranks", config.norm_over_ranks, NORMS_OVER_RANKS)
    check_one_of("scale_per", config.scale_per, SCALE_PER)
    check_real("clip", config.clip, 0, 1e6)
    _check_norm_over_ranks(config)
    if codec.takes_norm:
        return
    for name, usual in (("norm", "max"), ("clip", 0.0), ("scale_per", "block")):
        if getattr(config, name) != usual:
            raise ConfigError(
                f"{name}={getattr(config, name)!r} is not for codec={config.codec!r}, which has no such scale; "
                "leave it out"
            )
    if config.scale == "global":
        raise ConfigError(
            f"codec={config.codec!r} has no scale that ranks could share; take reducer='two_shot' or 'gather'"
        )


def _check_norm_over_ranks(config: Fields) -> None:
    """Check that ranks share scales, and that the norm over ranks goes with the norm and the clipping of a scale."""
    if config.norm_over_ranks == "max":
        return
    named = f"norm_over_ranks={config.norm_over_ranks!r}"
    if not shares_scales(config):
        raise ConfigError(
            f"{named} is for scales that all ranks share, which scale={config.scale!r} does not ask for; give "
            "scale='global' or reducer='sum', or leave norm_over_ranks out"
        )
    if config.norm == "power_of_two":
        raise ConfigError(
            f"{named} of powers of two is not a power of two; take norm='max' or 'l2', or leave norm_over_ranks out"
        )
    if config.clip:
        raise ConfigError(
            f"clip={config.clip:g} limits each rank's scale, and {named} would exceed the limit; leave one of the two "
            "out"
        )


def check_floats(config: Fields) -> None:
    """Raise ConfigError if the reducer does not average floating-point numbers of so many bits, and for 16 bits with
    parameters that are to stay uncompressed."""
    if config.codec != "float":
        return
    if config.num_bits not in REDUCERS[config.reducer].float_bits:
        raise ConfigError(
            f"bits={config.num_bits} is averaged by the backend's own all-reduce, not by "
            f"reducer={config.reducer!r}; leave reducer out, or take at most 8 bits"
        )
    if config.exclude and config.num_bits == 16:
        raise ConfigError(
            f"bits=16 rounds every parameter to bf16, so exclude={config.exclude} cannot be kept; leave exclude "
            "out, or take bits=32 or at most 8 bits"
        )


def check_reducer(config: Fields) -> None:
    """Raise ConfigError for a reducer that does not go with the codec, or with the scales, memories or coder that are
    asked for, as far as that does not depend on the number of ranks."""
    codec = codec_of(config)
    name = config.reducer
    if config.scale == "global":
        codec.check_room_for_sums()
    if config.coder == "elias" and (name == "auto" or "elias" not in REDUCERS[name].coders or not codec.has_odd_levels):
        raise ConfigError(
            "coder='elias' needs codec='linear', dither='stochastic' and reducer='gather'; give all three, or leave "
            "coder out"
        )
    if config.node_size and name != "hierarchical":
        raise ConfigError(f"node_size={config.node_size} is for reducer='hierarchical', not {name!r}; leave it out")
    if name == "auto":
        return
    reducer = REDUCERS[name]
    reducer.check(codec)
    if codec.biased_by and "memory_down" in reducer.memories and config.memory_down == "auto":
        raise ConfigError(
            "a biased codec loses on the way back, too: give memory_down='ef' or 'ef21' ('none' if you mean to do "
            "without), or reducer='gather', which has no way back"
        )
    if reducer.divides_parameters and config.scale_per != "block":
        what = "parameters" if config.scale_per == "parameter" else "buckets"
        raise ConfigError(
            f"reducer={name!r} divides {what} among the ranks of a node, so they cannot have one scale each: take "
            "scale_per='block'"
        )
    if reducer.scales and config.scale not in ("auto", *reducer.scales):
        others = [other for other, kind in REDUCERS.items() if config.scale in kind.scales]
        raise ConfigError(
            f"scale={config.scale!r} does not fit reducer={name!r}, which needs {reducer.scales[0]} scales; "
            f"take scale='auto' or one of the reducers {', '.join(others)}"
        )
    if config.down is not None and "memory_down" not in reducer.memories:
        raise ConfigError(
            f"memory_down needs a way back that is encoded, which reducer={name!r} does not have; take "
            "reducer='two_shot', or leave memory_down out"
        )
    if config.up is not None and "memory" not in reducer.memories:
        if name in ("bf16", "native"):  # what many bits choose by themselves
            raise ConfigError(
                f"bits={config.num_bits} is averaged by reducer={name!r}, which has no memory; take at most 8 bits and "
                "leave reducer out, or take memory='none'"
            )
        fitting = ", ".join(other for other, kind in REDUCERS.items() if "memory" in kind.memories)
        raise ConfigError(
            f"a memory works with the reducers {fitting}, not {name!r}; take one of these, or memory='none'"
        )


def check_memories(config: Fields) -> None:
    """Raise ConfigError for a biased codec whose memory is left to "auto", and for a shared ``memory_down`` that is not
    the memory of the other way."""
    biased_by = codec_of(config).biased_by
    if biased_by and config.memory == "auto":
        raise ConfigError(
            f"{biased_by} is biased, so training needs a memory of what was lost: memory='ef', or 'ef21'; "
            "memory='none' if you mean to do without"
        )
    if config.down is not None and config.down.shared and config.down != config.up:
        raise ConfigError(
            f"memory_down={described(config.down)} is the reference that ranks share on both ways, so it needs the "
            "same memory; leave memory_down out, and give memory='shared'"
        )


def check_sparse(config: Fields) -> None:
    """Raise ConfigError for a field about sparse gradients that is out of its range, or that goes with fields which
    sparse gradients cannot have."""
    check_one_of("sparse", config.sparse, SPARSE_METHODS)
    check_real("sparse_limit", config.sparse_limit, 0, _MOST_ROWS)
    if config.sparse == "refuse":
        if config.sparse_limit != SPARSE_LIMIT:
            raise ConfigError(
                f"sparse_limit={config.sparse_limit} is for sparse='gather', not sparse='refuse'; leave it out"
            )
        return
    named = f"sparse={config.sparse!r}"
    if config.remembers:
        raise ConfigError(
            f"{named} does not work with a memory, because a memory has a number for every row of a table; "
            "leave memory and memory_down out"
        )
    if config.scale == "global":
        raise ConfigError(
            f"{named} sends a separate scale for each touched row and rank, so scale='global' does not work; leave "
            "scale out"
        )
    if config.norm_over_ranks != "max":
        raise ConfigError(
            f"{named} sends a separate scale for each touched row and rank, so "
            f"norm_over_ranks={config.norm_over_ranks!r} does not work; leave norm_over_ranks out"
        )
    if config.scale_per != "block":
        raise ConfigError(
            f"{named} sends a separate scale for each touched row, so scale_per={config.scale_per!r} does not work; "
            "leave scale_per out"
        )
    if config.coder == "elias":
        raise ConfigError(
            f"{named} writes the codes of rows with a fixed width, so coder='elias' does not work; leave coder out"
        )
    if config.sparse == "logarithmic" and (config.codec == "float" or config.num_bits < 2):
        raise ConfigError(f"{named} needs a sign and an exponent, so 2 to 8 bits, not bits={config.bits}")
