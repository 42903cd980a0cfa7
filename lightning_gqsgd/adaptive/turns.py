"""Lengths of steps from the turns of candidates: in a trial under way, and while plain DDP has its turn."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from lightning_gqsgd.adaptive.prediction import Measured
from lightning_gqsgd.spec.decisions import Rules, positive, width


@dataclass
class Trial:
    """A trial under way.

    Attributes:
        why: why there is a trial.
        turns: candidates whose turns are still to come in this round.
        round: number of the round, from 0.
        bits: the candidate whose turn it is.
        left: steps that are left of the turn.
        used: number of steps so far.
        samples: lengths of steps in seconds, by candidate.
        waits: for the same steps, how long they waited for gradients, and how long their buckets arrived, in seconds.
        predicted: predictions, by candidate; those of measured candidates are from before they were measured.
        at_least: candidates whose predictions leave out what their codes cost.
        hopeless: candidates that have no further turn.
        skipped: candidates that have no turn because of what was predicted for them.
        tried: candidates that have had a turn.
        is_new_turn: whether the next step is the first one of its turn.
        draining: steps until the last length is known; None while there are turns.
    """

    why: str
    turns: deque[int]
    round: int = 0
    bits: int = 0
    left: int = 0
    used: int = 0
    samples: dict[int, list[float]] = field(default_factory=dict)
    waits: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    predicted: dict[int, float | None] = field(default_factory=dict)
    at_least: set[int] = field(default_factory=set)
    hopeless: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)
    tried: set[int] = field(default_factory=set)
    is_new_turn: bool = False
    draining: int | None = None

    def measured(self) -> dict[int, Measured]:
        """Medians of the candidates that have two counted steps or more."""
        counted = {bits: seconds for bits, seconds in self.samples.items() if len(seconds) > 1}
        return {bits: Measured(median(seconds), *_medians(self.waits[bits])) for bits, seconds in counted.items()}


@dataclass
class Challenge:
    """Bits that have won a trial by so little that plain DDP may be shorter: they wait for the lengths of its steps.

    Attributes:
        bits: their number.
        seconds: the medians of the trial.
        left: steps with the hook until they are taken, because plain DDP does not come.
        passed: steps that plain DDP has carried.
    """

    bits: int
    seconds: dict[int, float]
    left: int = Rules.latest
    passed: int = 0

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None) -> Challenge | None:
        """Restore a challenge from what `Trials.state` has written; None if it has written none.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is no such state.
        """
        if state is None:  # versions before challenges wrote none
            return None
        seconds = {width(bits): positive(value) for bits, value in state["seconds"].items()}
        challenge = cls(width(state["bits"]), seconds)
        challenge.seconds[challenge.bits]  # it has to be there
        return challenge


def _medians(waits: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The medians of both columns over the rows that are known; NaN if none is."""
    known = [row for row in waits if not any(map(math.isnan, row))]
    return (median(row[0] for row in known), median(row[1] for row in known)) if known else (math.nan, math.nan)


def standard_error(samples: Sequence[float]) -> float:
    """Standard error of a median, from the median deviation: 1.25 σ/sqrt(n) with σ = 1.48 median |x - median|."""
    middle = median(samples)
    return 1.25 * 1.48 * median(abs(sample - middle) for sample in samples) / len(samples) ** 0.5
