"""Resolves a configuration for a number of ranks: chooses the reducer and the numbers of memories, and builds the
`Setting` from which reducers are built.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from lightning_gqsgd.codecs.companded.codec import CompandedCodec
from lightning_gqsgd.codecs.linear.codec import LinearCodec
from lightning_gqsgd.codecs.scales import ScaleRule
from lightning_gqsgd.codecs.variance import best_alpha, dimension_together, stability
from lightning_gqsgd.config.choosing import between_nodes, choose_reducer, codec_of, level_or_levels
from lightning_gqsgd.config.combinations import adds_codes, shares_scales
from lightning_gqsgd.config.configuration import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import USUAL_SIZE, PieceSize
from lightning_gqsgd.reducers import REDUCERS, Setting
from lightning_gqsgd.reducers.memory import StabilityWarning
from lightning_gqsgd.spec.fields import AnyFields, Fields
from lightning_gqsgd.spec.memories import Memory, described


def check_has_one_width(config: GQSGDConfig) -> None:
    """Raise ConfigError for bits that are chosen during the training, or given by name."""
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


def resolve(config: GQSGDConfig, ranks: int) -> GQSGDConfig:
    """Returns the configuration with the chosen reducer and all numbers of its memories.

    A field ``scale`` that only repeats what the reducer always has becomes "auto".

    Raises:
        ConfigError: for the reasons of `check_has_one_width`, `choosing.choose_reducer`, `choosing.level_or_levels` and
            `resolve_memory`.

    Warns:
        StabilityWarning: see `resolve_memory`.
    """
    check_has_one_width(config)
    config = level_or_levels(config, ranks)
    if config.reducer == "hierarchical":
        return config
    reducer = choose_reducer(config, ranks)
    kept = config.scale if config.scale in REDUCERS[reducer].scales[1:] else "auto"
    config = replace(config, reducer=reducer, scale=kept)
    if config.up is not None and config.up.shared and config.memory_down == "auto":
        # If the way back is encoded, too, it has the same reference.
        config = replace(config, memory_down=config.up) if "memory_down" in REDUCERS[reducer].memories else config
    return resolve_memory(config, ranks)


def resolve_each(config: GQSGDConfig, ranks: int) -> dict[int, GQSGDConfig]:
    """Returns the result of `resolve` for each configuration that parameters have, by their bits. The first one belongs
    to the first pattern."""
    return {bits: resolve(one_width, ranks) for bits, one_width in config.by_bits().items()}


def setting_of(config: GQSGDConfig, ranks: int, dtype: torch.dtype, piece_size: PieceSize = USUAL_SIZE) -> Setting:
    """Returns the setting from which the reducer of a configuration is built.

    Args:
        config: the configuration with the chosen reducer and all numbers of its memories, see `resolve`.
        ranks: number of ranks.
        dtype: dtype of the gradients.
        piece_size: number of coordinates of a piece; results do not depend on it.
    """
    has_levels = config.reducer == "hierarchical"
    between = setting_of(between_nodes(config, ranks), ranks // config.node_size, dtype) if has_levels else None
    return Setting(
        REDUCERS[config.reducer],
        codec_of(config),
        ranks,
        dtype,
        config.block_size,
        ScaleRule(config.norm, config.clip, config.scale_per, config.norm_over_ranks),
        global_scales=config.scale == "global",
        rotates=config.rotation,
        coder=config.coder,
        up=config.up,
        down=config.down,
        seed=config.seed,
        sample_every=config.sample_every,
        piece_size=piece_size,
        between=between,
    )


def omega_of(config: Fields, ranks: int, *, is_shared: bool = True) -> float:
    """Returns ω of the coordinates that share a scale: of a block, or of the blocks of all ranks if these share scales;
    see `codecs.variance.dimension_together`.

    Args:
        config: the configuration, with the chosen reducer.
        ranks: number of ranks.
        is_shared: whether the messages are those that the ranks send at the same time. Those of the way back have
            scales of their own.
    """
    codec = codec_of(config)
    # A power of two is up to twice the maximum norm, which these constants are for.
    factor = 4 if config.norm == "power_of_two" and isinstance(codec, (LinearCodec, CompandedCodec)) else 1
    if not (is_shared and shares_scales(config)):
        return factor * codec.omega(config.block_size)
    together = dimension_together(config.block_size, ranks, config.norm_over_ranks)
    return factor * codec.omega(together, summed=ranks if adds_codes(config) else 1)


def _noise_of_shared(config: Fields, ranks: int) -> float:
    """Returns θ with E|m|² <= θ |h|², where m is the reduced gradient if all gradients are 0 and h is the shared
    reference; see "Side information" in docs/theory.md."""
    omega = omega_of(config, ranks)
    if config.reducer != "two_shot":
        return omega / ranks
    up = omega * (ranks - 1) / ranks**2  # the owner of a shard has its own coordinates exactly
    back = omega_of(config, ranks, is_shared=False)
    return up + back * (up + (1 if config.down is not None and config.down.shared else 0))


def resolve_memory(config: AnyFields, ranks: int) -> AnyFields:
    """Returns the configuration with all numbers of its memories: α = 1/(1 + ω) and ρ = 1/(2 (1 + ω)) if they are None.

    Raises:
        ConfigError: if a number is None, and the codec has no ω.

    Warns:
        StabilityWarning: if an error memory has λ >= 1, a reference ρ (1 + ω) >= 2, or a shared reference
            β² + ρ² θ >= 1, for the codec's bound ω and the bound θ of the reduced gradient's noise.
    """
    given: dict[str, Any] = {}
    for name, memory in (("memory", config.up), ("memory_down", config.down)):
        uses = memory is not None and (memory.keeps_error or memory.keeps_reference)
        given[name] = _resolved(config, ranks, name, memory) if memory is not None and uses else "none"
    return replace(config, **given)


def _resolved(config: Fields, ranks: int, name: str, memory: Memory) -> Memory:
    codec = codec_of(config)
    has_omega = not codec.biased_by and config.scale_per == "block"
    # A biased codec has no ω. If a scale belongs to a whole parameter or bucket, ω depends on its size.
    if not has_omega:
        if memory.alpha is None or memory.rho is None:
            sizes = f"with scale_per={config.scale_per!r} it depends on the {config.scale_per}"
            why = f"codec={config.codec!r} is biased" if codec.biased_by else sizes
            raise ConfigError(
                f"{name}={described(memory)} takes its numbers from the variance ω of an unbiased codec, but {why}; "
                "take 'ef' or 'ef21', or give the numbers"
            )
        return memory
    omega = omega_of(config, ranks, is_shared=name == "memory")
    alpha = 1 / (1 + omega) if memory.alpha is None else memory.alpha
    rho = 1 / (2 * (1 + omega)) if memory.rho is None else memory.rho
    factor = stability(alpha, memory.beta, omega)
    if alpha and factor >= 1:
        warnings.warn(
            f"{name} with alpha={alpha:g}, beta={memory.beta:g} may diverge: for this codec, ω is up to {omega:.3g}, "
            f"so λ = alpha² ω + (beta - alpha)² is up to {factor:.3g} >= 1, and errors are amplified rather than "
            f"corrected; alpha={best_alpha(memory.beta, omega):.3g} works (memory='ecq' takes the best one)",
            StabilityWarning,
            stacklevel=3,
        )
    grows = memory.beta**2 + rho**2 * _noise_of_shared(config, ranks) if memory.shared else 0.0
    if grows >= 1:
        warnings.warn(
            f"{name} with beta={memory.beta:g}, rho={rho:g} may diverge: for this codec, ω is up to {omega:.3g}, so "
            f"beta² + rho² θ is up to {grows:.3g} >= 1, where θ |h|² bounds the noise that {ranks} ranks add to the "
            "shared reference h: it amplifies its own noise; take a smaller rho, or more bits",
            StabilityWarning,
            stacklevel=3,
        )
    elif rho * (1 + omega) >= 2 and not memory.shared:
        warnings.warn(
            f"{name} with rho={rho:g} may diverge: for this codec, ω is up to {omega:.3g}, and from rho (1 + ω) = 2 on "
            f"the reference moves away from what it follows; rho={1 / (1 + omega):.3g} works ('diana' takes half)",
            StabilityWarning,
            stacklevel=3,
        )
    return replace(memory, alpha=alpha, rho=rho)
