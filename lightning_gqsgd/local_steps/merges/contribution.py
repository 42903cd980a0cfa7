"""The contribution of one member to a merge: its change since the anchor from which it started."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gqsgd.local_steps.fragments import Bundle, is_same


@dataclass(frozen=True, eq=False)
class Contribution:
    """A member's change that was handed over between two of its steps.

    Attributes:
        number: number of this member's contribution, counted from 1.
        starts: the start of the change: the anchor from which the member started, a flat tensor for each bundle.
        positions: the end of the change: the member's tensors.
        samples: number of samples that the steps in between have used, or another weight if there were no steps.
        steps: number of those steps.
        integers: the member's buffers that are not averaged, as int64 numbers; see `starting.IntegerBuffers`.
        rate: largest learning rate of those steps; 0 if it is not known.
        peak: largest learning rate of the member so far.
    """

    number: int
    starts: Sequence[Tensor]
    positions: Sequence[Tensor]
    samples: int
    steps: int
    integers: Tensor
    rate: float = 0.0
    peak: float = 0.0

    def changes(self, bundles: Sequence[Bundle]) -> list[Tensor]:
        """Returns the change of each bundle, [numel].

        That is starts minus positions of parameters, and anchors minus positions of buffers. Other members may have
        moved the anchors since the handover. Parameters then keep both changes, and the anchors of buffers become the
        mean of the members' values: the sum of two changes of a variance may be negative.

        A buffer may hold infinities or NaN, see `Bundle.change`; where start and position are equal, the result is 0.

        Args:
            bundles: the bundles, with their present anchors.
        """
        starts = map(with_buffers_of_anchors, bundles, self.starts)
        return [difference(start, end) for start, end in zip(starts, self.positions, strict=True)]


def learning_rate_of(optimizers: Sequence[Optimizer]) -> float:
    """Returns the largest learning rate of some optimizers. It is 0 if they have none, or if it is on a GPU, for which
    a step would have to wait."""
    rates = (group.get("lr") for optimizer in optimizers for group in optimizer.param_groups)
    known = (rate for rate in rates if isinstance(rate, int | float) or (isinstance(rate, Tensor) and not rate.is_cuda))
    return max(map(float, known), default=0.0)


def parameters_in(bundle: Bundle) -> int:
    """Returns the number of values of parameters in a bundle's flat tensors. Those of buffers are behind them."""
    return sum(entry.segment.numel for entry in bundle.entries if not entry.is_buffer)


def with_buffers_of_anchors(bundle: Bundle, flat: Tensor) -> Tensor:
    """Returns a flat tensor of a bundle whose buffers have the values of the anchors, [numel]."""
    count = parameters_in(bundle)
    return flat if count == len(flat) else torch.cat([flat[:count], bundle.flat_anchors()[count:]])


def difference(start: Tensor, end: Tensor) -> Tensor:
    """Returns ``start − end``, with 0 where both are equal, also where both are infinite, or NaN."""
    return torch.where(is_same(start, end), torch.zeros((), dtype=start.dtype, device=start.device), start - end)


def norm_of(changes: Sequence[Tensor]) -> float:
    """Returns the l2 norm of several flat tensors together. It is not finite if one of their values is not."""
    return math.hypot(*(float(torch.linalg.vector_norm(change.double())) for change in changes))
