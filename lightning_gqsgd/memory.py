"""What a rank remembers between steps, by parameter, and the numbers with which that is stable.

Nothing is keyed by bucket or piece: DDP rebuilds its buckets after the first step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_gqsgd.codecs import codec_of
from lightning_gqsgd.codecs.variance import best_alpha, stability
from lightning_gqsgd.config import ConfigError, GQSGDConfig, Memory
from lightning_gqsgd.layout import Run


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
    averaged), ``down_error`` (where they are), ``down_reference`` (equal on all ranks).

    Args:
        sizes: number of coordinates of each compressed parameter, by parameter number.
        dtype: fp32, or fp64 for fp64 gradients.
        device: device of the gradients.
    """

    def __init__(self, sizes: Mapping[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._sizes, self._dtype, self._device = dict(sizes), dtype, device
        self._tensors: dict[str, dict[int, Tensor]] = {}

    def load(self, kind: str, runs: Sequence[Run], like: Tensor) -> Tensor:
        """The memory of some runs at their places in a tensor like ``like``; zero elsewhere."""
        values = torch.zeros_like(like)
        for run in runs:
            values[run.start : run.start + run.numel] = self._part(kind, run)
        return values

    def store(self, kind: str, runs: Sequence[Run], values: Tensor, finite: Tensor) -> None:
        """Remember ``values`` where ``finite`` is true, and keep what was there elsewhere."""
        for run in runs:
            part, place = self._part(kind, run), slice(run.start, run.start + run.numel)
            part.copy_(torch.where(finite[place], values[place], part))

    def numbers(self) -> int:
        """How many numbers are remembered."""
        return sum(tensor.numel() for tensors in self._tensors.values() for tensor in tensors.values())

    def row(self, kind: str, number: int) -> Tensor:
        """A parameter's memory, zeros if there is none yet."""
        return self._part(kind, Run(0, number, 0, self._sizes[number]))

    @property
    def parameters(self) -> list[int]:
        """Numbers of the compressed parameters, in order."""
        return sorted(self._sizes)

    def _part(self, kind: str, run: Run) -> Tensor:
        tensors = self._tensors.setdefault(kind, {})
        if run.parameter not in tensors:
            size = self._sizes[run.parameter]
            tensors[run.parameter] = torch.zeros(size, dtype=self._dtype, device=self._device)
        return tensors[run.parameter][run.offset : run.offset + run.numel]


def resolve_memory(config: GQSGDConfig) -> GQSGDConfig:
    """The configuration with all numbers of its memories given: α = 1/(1 + ω), ρ = 1/(2 (1 + ω)) where they are None.

    Raises:
        ConfigError: the codec has no ω to compute them from.

    Warns:
        StabilityWarning: an error memory with λ >= 1, or a reference with ρ (1 + ω) >= 2, for the codec's bound ω.
    """
    given: dict[str, Any] = {}
    for name, memory in (("memory", config.up), ("memory_down", config.down)):
        given[name] = "none" if memory is None else _resolved(config, name, memory)
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
