"""A configuration once the number of ranks is known: its reducer is chosen, and its memories have all their numbers."""

from __future__ import annotations

from dataclasses import replace

from lightning_gqsgd.config.configuration import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.reducers import REDUCERS, choose_reducer
from lightning_gqsgd.reducers.hierarchical import level_or_levels
from lightning_gqsgd.reducers.memory import resolve_memory


def resolve(config: GQSGDConfig, ranks: int) -> GQSGDConfig:
    """Returns the configuration with the reducer chosen and all numbers of its memories given.

    A field ``scale`` that only repeats what the reducer always has becomes "auto".

    Raises:
        ConfigError: bits are to be chosen while training, or given by name (see `resolve_each`); see also
            `reducers.choose_reducer`, `reducers.hierarchical.level_or_levels` and `reducers.memory.resolve_memory`.

    Warns:
        StabilityWarning: see `reducers.memory.resolve_memory`.
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
