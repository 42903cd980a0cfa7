"""Censoring: if a rank's change is nearly the one that it sent last, it says so in one bit and sends nothing (CHB,
arXiv 2209.11944).

Every rank remembers the last change that it sent, h_i, and the mean of all ranks' h_i, h̄. With this rank's change Δ_i
and the latest move of the anchor, it sends

    δ_i = Δ_i - h_i    unless    |δ_i|² <= ε |a - a_before|²

and then h_i <- Δ_i; all ranks take h̄ <- h̄ + 1/n Σ δ_i over those that sent, which is the mean change. With one step
of gradient descent between two averages, Δ_i = η ∇f_i. CHB makes steps of α = η/n along the sum of gradients, so this
is its rule with ε₁ = ε / η² = ε / (α n)². The momentum is the outer optimizer's. The norms are those of a bundle of
tensors, which is the whole model unless there are fragments.

First, ranks tell each other in one byte whether they send. If no rank sends, this is all. Otherwise, each sending rank
sends its difference uncompressed to every other rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lightning_gqsgd.errors import ConfigError, check_real
from lightning_gqsgd.local_steps.rules.base import Averager, Exchanges, Rule, RuleRequests
from lightning_gqsgd.reducers import Steps
from lightning_gqsgd.reducers.base import Exchange

if TYPE_CHECKING:
    from lightning_gqsgd.config import GQSGDConfig
    from lightning_gqsgd.local_steps.fragments import Bundle


@dataclass(frozen=True)
class Censored(Rule):
    """Rule in which a rank sends its change only if it differs enough from the last one that it sent.

    Args:
        threshold: ε, 0 or more. With 0, a rank sends whenever its change differs from the last one that it sent.

    Raises:
        ConfigError: if the threshold is out of its range.
    """

    threshold: float = 0.1

    remembers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_real("threshold", self.threshold, 0, float("inf"))

    def check(self, config: GQSGDConfig) -> None:
        if config.reducer != "native":
            raise ConfigError(
                f"rule='censored' sends differences as they are, without reducer={config.reducer!r}; take bits=32"
            )

    def averager(self, bundle: Bundle, ranks: int) -> Averager:
        return _CensoredAverager(self, bundle, ranks)


class _CensoredAverager(Averager):
    def __init__(self, rule: Censored, bundle: Bundle, ranks: int) -> None:
        super().__init__(bundle)
        self._ranks = ranks
        self._threshold = rule.threshold
        anchors = bundle.flat_anchors()
        self._sent = torch.zeros_like(anchors)
        self._mean = torch.zeros_like(anchors)
        self._anchors = anchors

    def state(self) -> dict[str, Tensor]:
        """Returns the memory by name, as `Averager.state` specifies: h_i, h̄, and the anchor at the latest average."""
        return {"sent": self._sent, "mean": self._mean, "anchors": self._anchors}

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Load a memory, as `Averager.take` specifies. At the start, the anchor at the latest average is the current
        one: with zeros, it would seem to have moved by its whole norm, and no change would be large enough to send."""
        super().take({"anchors": self._bundle.flat_anchors(), **state})

    def requests(self, change: Tensor) -> RuleRequests:
        anchors = self._bundle.flat_anchors()
        moved = float((anchors - self._anchors).double().square().sum())
        difference = change - self._sent
        size = float(difference.double().square().sum())
        sends = not size <= self._threshold * moved  # also if it is NaN
        total = difference if sends else torch.zeros_like(difference)
        exchanges = Exchanges(total, lambda: self._steps(exchanges, sends))
        mean = self._mean + (yield exchanges) / self._ranks
        if bool(mean.isfinite().all()):
            if sends:
                self._sent.copy_(change)
            self._mean.copy_(mean)
            self._anchors.copy_(anchors)
        return mean.clone()

    def _steps(self, exchanges: Exchanges, sends: bool) -> Steps:
        """Exchange differences; ``exchanges.x`` is this rank's difference, which becomes the sum over all ranks."""
        x = exchanges.x
        ranks = self._ranks
        flags = torch.empty(ranks, 1, dtype=torch.uint8, device=x.device)
        exchanges.message_bytes = 1
        exchanges.sent_bytes = ranks - 1
        yield (Exchange("all_gather", flags, torch.full((1,), sends, dtype=torch.uint8, device=x.device)),)

        senders = flags.flatten().nonzero().flatten().tolist()
        if not senders:
            return 0
        received = torch.empty(len(senders) * x.numel(), dtype=x.dtype, device=x.device)
        into = [x.numel() if rank in senders else 0 for rank in range(ranks)]
        own = x.repeat(ranks) if sends else x.new_empty(0)
        splits = (into, [x.numel() if sends else 0] * ranks)
        yield (Exchange("all_to_all", received, own, splits),)

        x.zero_()
        # Added one after the other in rank order, so that all ranks get the same bits.
        for difference in received.view(len(senders), -1):
            x += difference
        if sends:
            exchanges.message_bytes += x.nbytes
            exchanges.sent_bytes += (ranks - 1) * x.nbytes
        return 0
