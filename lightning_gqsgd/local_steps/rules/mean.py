"""The mean of all changes, in one message of each rank: what local steps do unless they are told otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_gqsgd.local_steps.rules.base import MeanOf, Part, Questions, Rule

if TYPE_CHECKING:
    from lightning_gqsgd.local_steps.fragments import Bundle


@dataclass(frozen=True)
class Mean(Rule):
    """See the module."""

    def part(self, bundle: Bundle, rank: int, ranks: int) -> Part:
        """See `Rule.part`."""
        return _MeanPart(bundle)


class _MeanPart(Part):
    def __init__(self, bundle: Bundle) -> None:
        self._segments = bundle.segments

    def questions(self, change: Tensor) -> Questions:
        """See `Part.questions`."""
        return (yield MeanOf(change, self._segments))
