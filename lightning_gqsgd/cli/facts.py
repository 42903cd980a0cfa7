"""Facts of presets at a number of ranks: bits, bytes, state, bias and constants, for ``gqsgd presets``."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_gqsgd.cli.asking import unknown
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.choosing import codec_of
from lightning_gqsgd.config.combinations import shares_scales
from lightning_gqsgd.config.resolving import omega_of, resolve, setting_of
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.presets import PRESETS, Preset, make_config
from lightning_gqsgd.reducers import REDUCERS
from lightning_gqsgd.reducers.base import ring_bytes
from lightning_gqsgd.reducers.memory import KEPT_BY_OWNERS, StabilityWarning, kinds
from lightning_gqsgd.research.simulation import VirtualRanks
from lightning_gqsgd.wire.plan import Plan

#: Size of the parameter whose messages are counted, where their length is known without a step.
NUMEL = 1 << 20
#: Coordinates of all ranks together, where the length of a message is known after a step only.
STEP_NUMEL = 1 << 20
#: Coordinates of each rank in such a step, at least.
LEAST_STEP_NUMEL = 1 << 12

#: The columns of the table, with their meanings.
COLUMNS = {
    "preset": 'the name of the preset, for `preset="NAME"`',
    "bits": "bits per coordinate of one rank's message, including scales; for Elias codes, of Gaussian gradients",
    "sent / fp32": "bytes that a rank sends in a step, divided by those of an fp32 ring all-reduce",
    "collective": "how messages travel between ranks ([Method](method.md))",
    "state": "numbers per coordinate that a rank remembers; numbers that only the owner of a shard remembers count 1/n",
    "bias": "unbiased: the mean is correct on average, so errors average out over steps",
    "ω or δ": "the worst error of one message x: E‖Q(x) - x‖² ≤ ω ‖x‖² of an unbiased codec Q, and "
    "‖C(x) - x‖² ≤ (1 - δ) ‖x‖² of a biased codec C; x are the coordinates that share a scale, and "
    "typical gradients have smaller errors",
    "scale shared by": "coordinates that share a scale; 8 × 256 means blocks of 256 of all 8 ranks",
    "paper": "where the system was published",
}
#: The columns that are explained below the table in a terminal. The others speak for themselves.
_EXPLAINED = ("bits", "sent / fp32", "state", "ω or δ", "scale shared by")


@dataclass(frozen=True)
class Facts:
    """The facts of a preset at a number of ranks. If ``config`` is None, the preset cannot work.

    Attributes:
        name: of the preset.
        preset: the preset.
        ranks: number of ranks.
        config: with the reducer chosen and the numbers of its memories.
        problem: why the preset cannot work; empty if it can.
        warnings: on the stability of its memories.
        wire_bits: bits of one rank's message per coordinate, scales included.
        sent_ratio: bytes that a rank sends, over those of an fp32 ring all-reduce.
        state: numbers remembered per coordinate, by kind.
        omega: ω of the coordinates that share a scale; None where it does not apply.
        delta: δ of a biased codec's block.
    """

    name: str
    preset: Preset
    ranks: int
    config: GQSGDConfig | None = None
    problem: str = ""
    warnings: tuple[str, ...] = ()
    wire_bits: float | None = None
    sent_ratio: float | None = None
    state: dict[str, float] = dataclasses.field(default_factory=dict)
    omega: float | None = None
    delta: float | None = None

    @property
    def bias(self) -> str:
        """Whether the mean of a message is its input, in words."""
        config = self.config or self.preset.config
        if config.biased:
            return "biased, memory corrects" if config.up is not None else "biased"
        if config.clip:
            return "clipped"
        over = codec_of(config).unbiased_over
        return f"unbiased over {over}" if over else "unbiased"

    @property
    def sharing(self) -> str:
        """The coordinates that share a scale, in words."""
        if self.config is None:
            return "–"
        if not codec_of(self.config).has_scale:
            return f"none ({self.config.block_size})"
        block = f"{self.config.block_size}" if self.config.scale_per == "block" else self.config.scale_per
        return f"{self.ranks} × {block}" if shares_scales(self.config) else block

    @property
    def constant(self) -> str:
        """ω or δ, as text."""
        if self.omega is not None:
            return f"ω = {self.omega:.3g}"
        return "–" if self.delta is None else f"δ = {self.delta:.3g}"

    def row(self) -> list[str]:
        """Returns the cells of a row under `COLUMNS`."""
        if self.config is None:
            what = "chosen in training" if self.preset.config.chooses_bits else f"not at n = {self.ranks}"
            return [self.name, "–", "–", what, "–", self.bias, "–", "–", self.preset.paper]
        return [
            self.name,
            f"{self.wire_bits:.2f}",
            f"{self.sent_ratio:.3f}",
            self.config.reducer,
            f"{sum(self.state.values()):.4g}",
            self.bias,
            self.constant,
            self.sharing,
            self.preset.paper,
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns the facts as plain values."""
        return {
            "name": self.name,
            "ranks": self.ranks,
            "works": self.config is not None or self.preset.config.chooses_bits,
            "problem": self.problem or None,
            "wire_bits": self.wire_bits,
            "sent_vs_fp32_ring": self.sent_ratio,
            "collective": self.config and self.config.reducer,
            "state": self.state,
            "state_per_coordinate": sum(self.state.values()),
            "bias": self.bias,
            "omega": self.omega,
            "delta": self.delta,
            "block_size": (self.config or self.preset.config).block_size,
            "scale_shared_by": self.sharing,
            "paper": self.preset.paper,
            "what": self.preset.what,
            "optimizer": self.preset.optimizer,
            "left_out": self.preset.left_out or "nothing",
            "warnings": list(self.warnings),
            "config": (self.config or self.preset.config).to_dict(),
        }


def facts_at(name: str, ranks: int, block_size: int | None = None) -> Facts:
    """Returns the facts of a preset at ``ranks``, with another block size if one is given.

    Raises:
        ConfigError: an unknown preset.
    """
    if name not in PRESETS:
        raise unknown(name)
    preset = PRESETS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StabilityWarning)
        try:
            fields = {} if block_size is None else {"block_size": block_size}
            config = resolve(make_config(name, **fields), ranks)
            bits, sent = _traffic(config, ranks)
        except ConfigError as error:
            return Facts(name, preset, ranks, problem=str(error))
    of_stability = [warning for warning in caught if issubclass(warning.category, StabilityWarning)]
    said = tuple(dict.fromkeys(str(warning.message) for warning in of_stability))
    delta = codec_of(config).delta(config.block_size) if config.biased else None
    state = _state(config, ranks)
    return Facts(name, preset, ranks, config, "", said, bits, sent, state, _omega(config, ranks), delta)


def _traffic(config: GQSGDConfig, ranks: int) -> tuple[float, float]:
    """Returns the bits of a message per coordinate, and the bytes sent over those of an fp32 ring all-reduce."""
    if config.coder == "fixed":
        plan = Plan([Segment(0, NUMEL, raw=False)], setting_of(config, ranks, torch.float32))
        return 8 * plan.message_bytes / NUMEL, plan.sent_bytes / ring_bytes(4 * NUMEL, ranks)
    numel = max(LEAST_STEP_NUMEL, STEP_NUMEL // ranks)
    virtual = VirtualRanks(ranks, [Segment(0, numel, raw=False)], **config.to_dict())
    generator = torch.Generator().manual_seed(0)
    virtual.mean([torch.randn(numel, generator=generator) for _ in range(ranks)], step=0)
    return virtual.wire_bits, virtual.bytes_sent / ring_bytes(4 * numel, ranks)


def _state(config: GQSGDConfig, ranks: int) -> dict[str, float]:
    """Returns the numbers remembered per coordinate, by kind. Owners of shards share some kinds among them."""
    owned = REDUCERS[config.reducer].owns_shards
    kept = kinds(config.up, config.down)
    return {kind.value: 1 / ranks if owned and kind in KEPT_BY_OWNERS else 1.0 for kind in kept}


def _omega(config: GQSGDConfig, ranks: int) -> float | None:
    """Returns ω of the coordinates that share a scale: a block, or the blocks of all ranks under a shared scale (see
    `theory.theta_linear`). None where the theory does not apply."""
    if config.biased or config.clip or config.scale_per != "block":
        return None
    return omega_of(config, ranks)


def notes(rows: Sequence[Facts]) -> list[str]:
    """Returns notes on the columns of the table, and on the presets that cannot work."""
    return [*(f"{heading}: {COLUMNS[heading]}." for heading in _EXPLAINED), *problems(rows)]


def problems(rows: Sequence[Facts]) -> list[str]:
    """Returns a note on each preset that cannot work."""
    failing = [row for row in rows if row.problem and not row.preset.config.chooses_bits]
    return [f"{row.name}: not at n = {row.ranks}: {row.problem}" for row in failing]
