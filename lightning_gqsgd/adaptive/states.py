"""The states of `trials.Trials`, and the watch over the length of steps that runs in all of them."""

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
class Settle:
    """The first steps, which no candidate is judged by: DDP builds its buckets anew after its first step.

    Attributes:
        why: why there is a trial afterwards.
        left: steps that are left.
    """

    why: str
    left: int


class Stay:
    """All steps use the candidate that was kept, and the watch goes on."""


class Rest(Stay):
    """Plain DDP has the hook's place, so that steps are not chosen one by one, and ranks say now and then how long
    their steps took."""


@dataclass
class Try:
    """A trial under way: candidates take turns.

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
        """Returns the medians of the candidates that have two counted steps or more."""
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


State = Settle | Try | Stay | Challenge


class Watch:
    """Notices that the length of steps has changed since a decision.

    Args:
        keeps: how many lengths are kept.
        reference_s: the length of steps that others are compared with, in seconds; None: the next median becomes it.

    Attributes:
        reference_s: see above.
        is_refined: whether the reference is a median of steps after the decision.
        window: lengths of the latest steps with the hook.
    """

    def __init__(self, keeps: int, reference_s: float | None = None) -> None:
        self.reference_s = reference_s
        self.is_refined = False
        self.window: deque[float] = deque(maxlen=keeps)

    def length(self, lengths: Sequence[float], rules: Rules, *, at_once: bool) -> float | None:
        """Returns the length of steps that is to be compared; None: too few steps are known.

        Args:
            lengths: of the latest steps, in seconds, up to `Rules.window` of them.
            rules: the numbers.
            at_once: whether few steps are enough in any case, and not only where they are of quite another length.
        """
        if len(lengths) >= rules.latest:
            now = median(list(lengths)[-rules.latest :])
            decided = self.reference_s
            jumps = decided is not None and max(now / decided, decided / now) > 1 + rules.jump
            if jumps or at_once:
                return now
        return median(lengths) if len(lengths) == rules.window else None

    def change(self, now: float, rules: Rules, *, expects_shorter: bool = False) -> float | None:
        """Returns the relative change of the length of steps, if it is large enough for a trial.

        Args:
            now: the median length of the latest steps, in seconds.
            rules: the numbers.
            expects_shorter: whether steps that are shorter than the decision's are no reason for a trial.
        """
        if self.reference_s is None:
            self.reference_s = now
        change = now / self.reference_s - 1
        if abs(change) > rules.drift and not (expects_shorter and change < 0):
            return change
        # Steps after a decision are a better reference than those of the trial, once.
        if not self.is_refined:
            self.reference_s = now
            self.is_refined = True
        return None


def _medians(waits: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the medians of both columns over the rows that are known; NaN if none is."""
    known = [row for row in waits if not any(map(math.isnan, row))]
    return (median(row[0] for row in known), median(row[1] for row in known)) if known else (math.nan, math.nan)


def standard_error(samples: Sequence[float]) -> float:
    """Returns the standard error of a median: 1.25 σ/sqrt(n), with σ = 1.48 median |x - median|."""
    middle = median(samples)
    return 1.25 * 1.48 * median(abs(sample - middle) for sample in samples) / len(samples) ** 0.5
