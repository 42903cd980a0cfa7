"""The default rule `mean`: the mean of all changes, in one message of each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_gqsgd.local_steps.rules.base import Averager, MeanOf, Rule, RuleRequests

if TYPE_CHECKING:
    from lightning_gqsgd.local_steps.fragments import Bundle


@dataclass(frozen=True)
class Mean(Rule):
    """The mean of all changes."""

    def averager(self, bundle: Bundle, ranks: int) -> Averager:
        """Returns the averager of one bundle, as `Rule.averager` specifies."""
        return _MeanAverager(bundle)


class _MeanAverager(Averager):
    def __init__(self, bundle: Bundle) -> None:
        self._segments = bundle.segments

    def requests(self, change: Tensor) -> RuleRequests:
        """Yield the requests of one average, as `Averager.requests` specifies."""
        return (yield MeanOf(change, self._segments))
