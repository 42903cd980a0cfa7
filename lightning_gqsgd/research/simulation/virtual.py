"""Runs reducers on virtual ranks in one process, to measure the effect of a configuration on given gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.errors import ConfigError, counted
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.presets import make_config
from lightning_gqsgd.reducers import new_store
from lightning_gqsgd.reducers.memory import Keeps
from lightning_gqsgd.sparse.options import refuse_for
from lightning_gqsgd.wire.plan import Plan, check_gradient

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lightning_gqsgd.spec.fields import FieldArguments


class VirtualRanks:
    """Virtual ranks in this process, each with its own memory. They use the codec, memory and reducer objects of a
    training.

    Args:
        ranks: number of ranks.
        segments: the parameters in a gradient, in order.
        dtype: dtype of the gradients.
        preset: name of a preset (see `presets.PRESETS`), or a configuration.
        device: device of the gradients, if there is a memory. None: the CPU.
        **fields: fields of `GQSGDConfig`.

    Attributes:
        config: the configuration, with the chosen reducer and the numbers of its memories.
        bytes_sent: bytes that each rank has sent so far.

    Raises:
        ConfigError: if the configuration cannot work.
    """

    def __init__(
        self,
        ranks: int,
        segments: Sequence[Segment],
        dtype: torch.dtype = torch.float32,
        preset: str | GQSGDConfig | None = None,
        *,
        device: torch.device | None = None,
        **fields: Unpack[FieldArguments],
    ) -> None:
        self.config = resolve(make_config(preset, **fields), ranks)
        refuse_for(self.config, "simulations, which have dense gradients only")
        self.bytes_sent = 0
        self._dtype = dtype
        self._plan = Plan(segments, setting_of(self.config, ranks, dtype))
        sizes = {segment.parameter: segment.numel for segment in segments if not segment.raw}
        self._device = device or torch.device("cpu")
        self._segments = list(segments)
        self.stores = [new_store(self._plan.setting, sizes, self._device) for _ in range(ranks)]

    @property
    def wire_bits(self) -> float:
        """Bits of one rank's message per coordinate, including scales; if lengths vary, those of the latest step."""
        return 8 * self._plan.message_bytes / self._plan.numel

    def errors(self) -> Tensor:
        """Returns the error memory of each rank for its own messages, e of `spec.memories.Memory`, [ranks, d].

        Raises:
            ConfigError: if the configuration has no error memory.
        """
        if self.config.up is None or not self.config.up.keeps_error:
            raise ConfigError("there is no error memory; take memory='ef' or 'ecq'")
        kept = [
            torch.cat(
                [
                    torch.zeros(segment.numel, dtype=self._dtype, device=self._device)
                    if segment.raw
                    else store.row(Keeps.UP_ERROR, segment.parameter)
                    for segment in self._segments
                ]
            )
            for store in self.stores
        ]
        return torch.stack(kept)

    def average(self, gradients: Sequence[Tensor], step: int) -> list[Tensor]:
        """Returns the mean that each rank would have after a reduction; all of them have the same bits.

        Raises:
            ConfigError: if the gradients and the segments have different numbers of coordinates.
        """
        return self._averaged(gradients, step)

    def mean(self, gradients: Sequence[Tensor], step: int) -> Tensor:
        """Returns the mean that rank 0 would have; see `average`. Without a memory, this is faster."""
        return self._averaged(gradients, step, only_first=not self.config.remembers)[0]

    def _averaged(self, gradients: Sequence[Tensor], step: int, *, only_first: bool = False) -> list[Tensor]:
        for rank, gradient in enumerate(gradients):
            if gradient.numel() != self._plan.numel:
                raise ConfigError(
                    f"the gradient of rank {rank} has {counted(gradient.numel(), 'coordinate')}, the segments have "
                    f"{self._plan.numel:,}; give segments whose numel add up to the gradient's"
                )
        results = [gradient.clone() for gradient in gradients]
        self.bytes_sent += self._plan.average(results, step, self.stores, only_first=only_first)
        return results


def average(
    gradients: Sequence[Tensor],
    *,
    step: int = 0,
    segments: Sequence[Segment] | None = None,
    preset: str | GQSGDConfig | None = None,
    **fields: Unpack[FieldArguments],
) -> list[Tensor]:
    """Returns the mean that each rank would have after a reduction with an empty memory; see `VirtualRanks`.

    Args:
        gradients: one flat floating-point tensor per rank, all of one shape, dtype and device; not changed.
        step: number of the dither.
        segments: the parameters in a gradient, in order. None means that the gradient is one compressed parameter.
        preset: name of a preset (see `presets.PRESETS`), or a configuration.
        **fields: fields of `GQSGDConfig`.

    Returns:
        One tensor per rank, all with the same bits.

    Raises:
        ConfigError: if the gradients or the configuration cannot work.
    """
    _check(gradients)
    first = gradients[0]
    segments = segments or [Segment(0, first.numel(), raw=False)]
    return VirtualRanks(len(gradients), segments, first.dtype, preset, **fields).average(gradients, step)


def relative_error(estimate: Tensor, gradients: Sequence[Tensor]) -> float:
    """Returns the relative L2 error of an estimate against the exact mean of the gradients."""
    mean = torch.stack([gradient.double() for gradient in gradients]).mean(0)
    return float((estimate.double() - mean).norm() / mean.norm())


def _check(gradients: Sequence[Tensor]) -> None:
    if not gradients:
        raise ConfigError("no gradients were given; give one flat tensor per rank")
    for rank, gradient in enumerate(gradients):
        check_gradient(gradient, f"the gradient of rank {rank}")
        kind, expected = ((g.shape, g.dtype, g.device) for g in (gradient, gradients[0]))
        if gradient.ndim != 1 or kind != expected:
            raise ConfigError(
                f"the gradient of rank {rank} is {tuple(gradient.shape)} {gradient.dtype} on {gradient.device}, that "
                f"of rank 0 {tuple(gradients[0].shape)} {gradients[0].dtype} on {gradients[0].device}; "
                "give flat tensors of one shape, dtype and device"
            )
