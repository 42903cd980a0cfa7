"""What a rank remembers between steps, by parameter, and the numbers with which that is stable.

Nothing is keyed by bucket or piece: DDP rebuilds its buckets after the first step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs import codec_of
from lightning_gqsgd.codecs.variance import best_alpha, stability
from lightning_gqsgd.config import ConfigError, GQSGDConfig, Memory
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES
from lightning_gqsgd.layout import Run, stripe


class StabilityWarning(UserWarning):
    """A memory that may amplify errors without bound; the message names the reason and the number that works."""


def kinds(config: GQSGDConfig) -> list[str]:
    """What a configuration remembers, in a fixed order; see `MemoryStore`."""
    found = []
    if config.up is not None:
        found += ["up_error"] if config.up.keeps_error else []
        found += ["up_reference", "up_mean"] if config.up.keeps_reference else []
    if config.down is not None:
        found += ["down_error"] if config.down.keeps_error else []
        found += ["down_reference"] if config.down.keeps_reference else []
    return found


class MemoryStore:
    """Flat tensors of one rank: one for each kind of memory and parameter, zero at first.

    Kinds: ``up_error``, ``up_reference`` (this rank's e and h), ``up_mean`` (mean of all ranks' h, where messages are
    averaged), ``down_error`` (where they are), ``down_reference`` (equal on all ranks). With the reducer "two_shot",
    where messages are averaged is the blocks' owner (see `layout.place_by_owner`), which keeps its share only.

    Args:
        config: the configuration, with its reducer chosen.
        ranks: number of ranks.
        sizes: number of coordinates of each compressed parameter, by parameter number.
        dtype: of the gradients; memory is fp32, or fp64 for fp64 gradients.
        device: device of the gradients.
    """

    def __init__(
        self, config: GQSGDConfig, ranks: int, sizes: Mapping[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._sizes, self._dtype, self._device = dict(sizes), COMPUTE_DTYPES[dtype], device
        self._owners = ranks if config.reducer == "two_shot" else 1
        #: Consecutive coordinates of each parameter with the same owner.
        self._stripes = {
            parameter: int(stripe(np.array(-(-size // config.block_size)), self._owners)) * config.block_size
            for parameter, size in sizes.items()
        }
        self._tensors: dict[tuple[str, int], Tensor] = {}

    def load(self, kind: str, runs: Sequence[Run], like: Tensor) -> Tensor:
        """The memory of some runs at their places in a tensor like ``like``; zero elsewhere."""
        values = torch.zeros_like(like)
        for run in runs:
            values[run.start : run.start + run.numel] = self._part(kind, run)
        return values

    def store(self, kind: str, runs: Sequence[Run], values: Tensor) -> None:
        """Remember what a tensor has at the places of some runs."""
        for run in runs:
            self._part(kind, run).copy_(values[run.start : run.start + run.numel])

    def row(self, kind: str, parameter: int) -> Tensor:
        """What this rank keeps of a parameter, zeros if there is nothing yet; as long on every rank."""
        key = (kind, parameter)
        if key not in self._tensors:
            size, owned = self._sizes[parameter], self._stripes[parameter]
            share = -(-size // (owned * self._owners_of(kind))) * owned
            self._tensors[key] = torch.zeros(min(size, share), dtype=self._dtype, device=self._device)
        return self._tensors[key]

    def take(self, saved: Mapping[str, Mapping[int, Tensor]], rank: int) -> None:
        """Remember what was saved of all ranks: tensors [ranks, ...] by kind and parameter.

        Raises:
            ConfigError: of other parameters, or of other sizes; nothing has been taken.
        """
        pairs = []
        for kind, tensors in saved.items():
            for number, rows in tensors.items():
                row = self.row(kind, number) if number in self._sizes else None
                if row is None or rows.shape[1:] != row.shape:
                    here = 0 if row is None else row.numel()
                    raise ConfigError(
                        f"the checkpoint remembers {rows.shape[-1]} values of parameter {number}, the model compresses "
                        f"{here}; resume with the model and the configuration that wrote it"
                    )
                pairs.append((row, rows[rank]))
        for row, values in pairs:
            row.copy_(values)

    def _owners_of(self, kind: str) -> int:
        """Among how many ranks a kind of memory is divided."""
        return self._owners if kind in ("up_mean", "down_error") else 1

    def _part(self, kind: str, run: Run) -> Tensor:
        """Where a run is kept: an owner's stripes lie side by side, and its runs within one stripe."""
        length = self._stripes[run.parameter]
        number, rest = divmod(run.offset, length)
        start = number // self._owners_of(kind) * length + rest
        return self.row(kind, run.parameter)[start : start + run.numel]


def resolve_memory(config: GQSGDConfig) -> GQSGDConfig:
    """The configuration with all numbers of its memories given: α = 1/(1 + ω), ρ = 1/(2 (1 + ω)) where they are None.

    Raises:
        ConfigError: the codec has no ω to compute them from.

    Warns:
        StabilityWarning: an error memory with λ >= 1, or a reference with ρ (1 + ω) >= 2, for the codec's bound ω.
    """
    given: dict[str, Any] = {}
    for name, memory in (("memory", config.up), ("memory_down", config.down)):
        uses = memory is not None and (memory.keeps_error or memory.keeps_reference)
        given[name] = _resolved(config, name, memory) if memory is not None and uses else "none"
    return replace(config, **given)


def _resolved(config: GQSGDConfig, name: str, memory: Memory) -> Memory:
    has_omega = not config.biased and config.scale_per == "block"
    if not has_omega:
        if memory.alpha is None or memory.rho is None:
            sizes = "with scale_per='parameter' it depends on the parameter"
            why = f"codec={config.codec!r} is biased" if config.biased else sizes
            raise ConfigError(
                f"{name}={_described(memory)} takes its numbers from the variance ω of an unbiased codec, but {why}; "
                "take 'ef' or 'ef21', or give the numbers"
            )
        return memory
    omega = codec_of(config).omega(config.block_size)
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
    if rho * (1 + omega) >= 2:
        warnings.warn(
            f"{name} with rho={rho:g} may diverge: for this codec, ω is up to {omega:.3g}, and from rho (1 + ω) = 2 on "
            f"the reference moves away from what it follows; rho={1 / (1 + omega):.3g} works ('diana' takes half)",
            StabilityWarning,
            stacklevel=3,
        )
    return Memory(alpha, memory.beta, rho)


def _described(memory: Memory) -> str:
    return f"(alpha={memory.alpha}, beta={memory.beta}, rho={memory.rho})"
