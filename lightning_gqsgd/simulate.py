"""The reducers on virtual ranks in one process: what a configuration does to given gradients, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES
from lightning_gqsgd.layout import Segment
from lightning_gqsgd.memory import MemoryStore, kinds
from lightning_gqsgd.plan import Plan, check_gradient
from lightning_gqsgd.presets import make_config
from lightning_gqsgd.reducers import Setting, resolve


class VirtualRanks:
    """Ranks in this process, with what each of them remembers: the codec, memory and reducer objects of training.

    Args:
        ranks: number of ranks.
        segments: the parameters in a gradient, in order.
        dtype: dtype of the gradients.
        preset: name of a preset; see `presets.PRESETS`.
        **fields: fields of `GQSGDConfig`.

    Attributes:
        config: the configuration, with its reducer chosen and the numbers of its memories.
        bytes_sent: bytes that each rank has sent so far.

    Raises:
        ConfigError: a configuration that cannot work.
    """

    def __init__(
        self,
        ranks: int,
        segments: Sequence[Segment],
        dtype: torch.dtype = torch.float32,
        preset: str | None = None,
        **fields: Any,
    ) -> None:
        self.config = resolve(make_config(preset, **fields), ranks)
        self.bytes_sent = 0
        self._plan = Plan(segments, Setting(self.config, ranks, dtype))
        sizes = {segment.parameter: segment.numel for segment in segments if not segment.raw}
        remembers = bool(kinds(self.config))
        device = torch.device("cpu")
        self.stores = [MemoryStore(sizes, COMPUTE_DTYPES[dtype], device) if remembers else None for _ in range(ranks)]

    @property
    def wire_bits(self) -> float:
        """Bits of one rank's message per coordinate, scales included; of variable lengths, the latest step's."""
        return 8 * self._plan.message_bytes / self._plan.numel

    def average(self, gradients: Sequence[Tensor], step: int) -> list[Tensor]:
        """What each rank would hold after reducing its gradient; all with the same bits."""
        results = [one.clone() for one in gradients]
        self.bytes_sent += self._plan.average(results, step, self.stores)
        return results

    def mean(self, gradients: Sequence[Tensor], step: int) -> Tensor:
        """The same, for one rank only, with less work where nothing is remembered."""
        results = [one.clone() for one in gradients]
        only_first = self.stores[0] is None
        self.bytes_sent += self._plan.average(results, step, self.stores, only_first=only_first)
        return results[0]


def average(
    gradients: Sequence[Tensor],
    *,
    step: int = 0,
    segments: Sequence[Segment] | None = None,
    preset: str | None = None,
    **fields: Any,
) -> list[Tensor]:
    """What each rank would hold after reducing its gradient, with empty memory; see `VirtualRanks`.

    Args:
        gradients: one flat floating-point tensor per rank, all of one shape, dtype and device; not changed.
        step: number of the dither.
        segments: the parameters in a gradient, in order; None takes it as one compressed parameter.
        preset: name of a preset; see `presets.PRESETS`.
        **fields: fields of `GQSGDConfig`.

    Returns:
        One tensor per rank, all with the same bits.

    Raises:
        ConfigError: gradients or a configuration that cannot work.
    """
    _check(gradients)
    first = gradients[0]
    segments = segments or [Segment(0, first.numel(), raw=False)]
    return VirtualRanks(len(gradients), segments, first.dtype, preset, **fields).average(gradients, step)


def relative_error(estimate: Tensor, gradients: Sequence[Tensor]) -> float:
    """Relative L2 error of an estimate against the exact mean of the gradients."""
    mean = torch.stack([one.double() for one in gradients]).mean(0)
    return float((estimate.double() - mean).norm() / mean.norm())


def _check(gradients: Sequence[Tensor]) -> None:
    if not gradients:
        raise ConfigError("no gradients were given; give one flat tensor per rank")
    for rank, one in enumerate(gradients):
        check_gradient(one, f"the gradient of rank {rank}")
        kind, expected = ((g.shape, g.dtype, g.device) for g in (one, gradients[0]))
        if one.ndim != 1 or kind != expected:
            raise ConfigError(
                f"the gradient of rank {rank} is {tuple(one.shape)} {one.dtype} on {one.device}, that of rank 0 "
                f"{tuple(gradients[0].shape)} {gradients[0].dtype} on {gradients[0].device}; "
                "give flat tensors of one shape, dtype and device"
            )
