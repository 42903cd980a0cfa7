"""The states of `trials.Trials`, and the watch on the duration of steps that runs in all of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from lightning_gqsgd.adaptive.prediction import Measured
from lightning_gqsgd.spec.decisions import Rules, positive, width


@dataclass
class Settle:
    """The first steps, which are not used to judge candidates, because DDP rebuilds its buckets after its first step.

    Attributes:
        why: why there is a trial afterwards.
        left: number of remaining steps.
    """

    why: str
    left: int = Rules.settling


class Stay:
    """All steps use the kept candidate, and the watch continues, also while plain DDP replaces the hook."""


@dataclass
class Try:
    """A trial that is under way. Candidates take turns.

    Attributes:
        why: why there is a trial.
        turns: candidates whose turns are still to come in this round.
        round: number of the round, from 0.
        used: number of steps so far.
        samples: durations of steps in seconds, by candidate.
        waits: for the same steps, seconds of waiting for gradients, and seconds from the first to the last bucket.
        predicted: predictions, by candidate. Those of measured candidates were made before the measurement.
        at_least: candidates whose predictions do not include the cost of their codes.
        hopeless: candidates that get no further turn.
        skipped: candidates that get no turn because of their predictions.
        tried: candidates that have had a turn.
    """

    why: str
    turns: deque[int]
    round: int = 0
    used: int = 0
    samples: dict[int, list[float]] = field(default_factory=dict)
    waits: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    predicted: dict[int, float | None] = field(default_factory=dict)
    at_least: set[int] = field(default_factory=set)
    hopeless: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)
    tried: set[int] = field(default_factory=set)

    def measured(self) -> dict[int, Measured]:
        """Returns the medians of the candidates that have at least two counted steps."""
        counted = {bits: seconds for bits, seconds in self.samples.items() if len(seconds) > 1}
        return {bits: Measured(median(seconds), *_medians(self.waits[bits])) for bits, seconds in counted.items()}


@dataclass
class Challenge:
    """Bits that have won a trial by so little that plain DDP may be faster. They wait until the steps of plain DDP are
    measured.

    Attributes:
        bits: the number of bits.
        seconds: the medians of the trial.
        left: number of steps with the hook after which these bits are used, because plain DDP has not replaced the
            hook.
        passed: number of steps that plain DDP has reduced.
    """

    bits: int
    seconds: dict[int, float]
    left: int = Rules.latest
    passed: int = 0

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None) -> Challenge | None:
        """Restore a challenge from its entry in `Trials.to_dict`; None if the entry is None.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: if it is no such entry.
        """
        if state is None:  # versions before challenges wrote none
            return None
        seconds = {width(bits): positive(value) for bits, value in state["seconds"].items()}
        challenge = cls(width(state["bits"]), seconds)
        challenge.seconds[challenge.bits]  # raises KeyError if it is missing
        return challenge


State = Settle | Try | Stay | Challenge


@dataclass
class Watch:
    """Detects that the duration of steps has changed since a decision.

    Attributes:
        reference_s: the duration of steps with which others are compared, in seconds; None means the next median.
        began_s: the median of plain DDP's steps that began the latest trial; None if something else began it.
        is_plain: whether the reference is a median of plain DDP's steps.
        is_refined: whether the reference is a median of steps after the decision.
        window: durations of the latest steps with the hook.
    """

    reference_s: float | None = None
    began_s: float | None = None
    is_plain: bool = False
    is_refined: bool = False
    window: deque[float] = field(default_factory=partial(deque, maxlen=Rules.window))

    def length(self, lengths: Sequence[float], *, at_once: bool) -> float | None:
        """Returns the duration of steps to compare; None if too few steps are known.

        Args:
            lengths: durations of the latest steps, in seconds, at most `Rules.window`.
            at_once: whether few steps are always enough, and not only if their duration is very different.
        """
        if len(lengths) >= Rules.latest:
            now = median(list(lengths)[-Rules.latest :])
            decided = self.reference_s
            jumps = decided is not None and max(now / decided, decided / now) > 1 + Rules.jump
            if jumps or at_once:
                return now
        return median(lengths) if len(lengths) == Rules.window else None

    def change(self, now: float, *, is_plain: bool) -> float | None:
        """Returns the relative change of the duration of steps if it is large enough for a trial, and otherwise None.

        Args:
            now: the median duration of the latest steps, in seconds.
            is_plain: whether these are steps of plain DDP. They may be shorter than steps with the hook by
                `Rules.hook`, because they do not include the cost of the hook.
        """
        if self.reference_s is None:
            self.reference_s = now
        change = now / self.reference_s - 1
        leaves_hook = is_plain and not self.is_plain
        is_shorter = change < -(Rules.hook if leaves_hook else Rules.drift)
        if leaves_hook and self.began_s is not None and abs(now / self.began_s - 1) <= Rules.drift:
            # The trial that these steps began has kept 32 bits, so the hook costs more than is assumed.
            is_shorter = False
        if change > Rules.drift or is_shorter:
            return change
        # Once, steps after a decision replace those of the trial, because they are a better reference.
        if not self.is_refined or is_plain != self.is_plain:
            self.reference_s = now
            self.is_refined = True
            self.is_plain = is_plain
        return None


def _medians(waits: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the medians of both columns over the known rows; NaN if no row is known."""
    known = [row for row in waits if not any(map(math.isnan, row))]
    return (median(row[0] for row in known), median(row[1] for row in known)) if known else (math.nan, math.nan)


def standard_error(samples: Sequence[float]) -> float:
    """Returns the standard error of a median: 1.25 σ/sqrt(n), with σ = 1.48 median |x - median|."""
    middle = median(samples)
    return 1.25 * 1.48 * median(abs(sample - middle) for sample in samples) / len(samples) ** 0.5
