"""`Rules`, the constants of `adaptive.trials`, and `Decision`, a result that can be passed instead of ``auto=True``.

A run that is given a decision uses the decided bits and makes no trials.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_gqsgd.errors import MAX_INTEGER, ConfigError
from lightning_gqsgd.spec.quantities import duration

#: Number of steps from a step to the first choice that can use its length. The length is known when the next step
#: begins. Ranks exchange it in that step. Over NCCL, the host reads the exchanged values one step later.
LAG = 3

#: The numbers of bits that there are: 1 to 8 for codes, of which each codec has some, 16 for bf16 numbers, and 32 for
#: uncompressed gradients.
WIDTHS = (*range(1, 9), 16, 32)
WIDTHS_IN_WORDS = "1 to 8, 16, 32"
#: The default of the field ``allow``: the numbers of bits that ``auto`` chooses among.
ALLOW = (32, 16, 8, 4)

#: Part of error messages: how to pass a decision instead of ``auto=True``.
_REMEDY = "give a row of state.decisions, or its to_dict()"


class Rules:
    """The constants of the state machine in `adaptive.trials`.

    Attributes:
        settling: number of steps before the first trial. DDP rebuilds its buckets after its first step.
        rounds: number of turns of each candidate in a trial.
        block: number of steps of one turn. The first of them does not count.
        tie: candidates whose medians differ by less than this relative difference count as equal.
        widest_tie: the upper limit of this difference, if the errors of the medians are larger than ``tie``.
        hopeless: a candidate gets no further turn once its shortest step is this many times the shortest median.
        window: number of latest steps whose median is compared with the median of the decision.
        drift: a new trial starts if these two medians differ by this relative difference.
        latest: number of latest steps whose median is watched for a jump.
        jump: a new trial starts at once if that median is longer or shorter than the decision's by this relative
            difference.
        hook: the largest share of a step that the hook may cost at 32 bits. If other bits are faster by less than this,
            plain DDP gets a turn.
        doubt: the relative error that is assumed for a prediction if the costs of the codec are known.
        share: the number by which each step increases the credit of steps for trials.
        most_trials: the largest credit, as a number of trials of full length. The credit begins with this number.
        matches: number of successive steps whose backward passes have to be counted correctly without the hook before
            plain DDP may replace the hook.
        compare_every: number of steps from one comparison between ranks to the next while plain DDP replaces the hook.
    """

    settling = 5
    rounds = 3
    block = 4
    tie = 0.02
    widest_tie = 0.05
    hopeless = 2.0
    window = 50
    drift = 0.15
    latest = 20
    jump = 0.5
    hook = 0.25
    doubt = 0.2
    share = 0.05
    most_trials = 3
    matches = 5
    compare_every = 10

    @classmethod
    def longest_trial(cls, candidates: int) -> int:
        """Returns the largest number of steps of a trial, which has one extra round if steps could not be measured."""
        return (cls.rounds + 1) * cls.block * candidates + LAG


@dataclass(frozen=True)
class Decision:
    """The result of a trial, or another change of the number of bits.

    Attributes:
        step: the first step to which the decision applies.
        bits: the candidate that is kept.
        seconds: the median length of the steps of each candidate that was tried, by its bits.
        reason: why there was a trial or a change, and why this candidate is kept.
        predicted: the prediction for each candidate before it was measured, in seconds; None if there was none.
        at_least: the candidates whose predictions are lower bounds. The time of the codec is known only after a number
            of bits with codes was measured, and the time of rounding to 16 bits is never known.
    """

    step: int
    bits: int
    seconds: Mapping[int, float]
    reason: str
    predicted: Mapping[int, float | None] = field(default_factory=dict)
    at_least: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the decision as a dictionary of plain values."""
        mappings = {"seconds": dict(self.seconds), "predicted": dict(self.predicted)}
        return {**asdict(self), **mappings, "at_least": list(self.at_least)}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Decision:
        """Returns the decision that `to_dict` turned into ``row``. Keys may have become strings in JSON.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: if ``row`` does not come from `to_dict`, or if it has
                numbers that no trial produces.
        """
        seconds = {width(bits): positive(value) for bits, value in row["seconds"].items()}
        # Versions of the package without predictions did not write this key.
        predictions = row.get("predicted", {}).items()
        predicted = {width(bits): None if value is None else not_negative(value) for bits, value in predictions}
        at_least = tuple(map(width, row.get("at_least", ())))
        return cls(count(row["step"]), width(row["bits"]), seconds, str(row["reason"]), predicted, at_least)

    def describe(self, *, is_plain: bool = False, is_earlier: bool = False, is_open: bool = False) -> str:
        """Returns the decision and its reason on one line.

        Args:
            is_plain: whether plain DDP replaces the hook under this decision.
            is_earlier: whether it is a decision of the run whose state this run has loaded, so that other bits may be
                in use.
            is_open: whether a trial is under way that may change the decision.
        """
        what = f"{'the run before took' if is_earlier else 'auto takes'} {self.bits} bits from step {self.step} on"
        text = f"{what} ({': '.join([*self._times(), self.reason])})"
        if is_earlier or is_open:
            return text
        # At 32 bits, the hook is slower than plain DDP, and the decision was for plain DDP.
        how = "use plain DDP, without gqsgd" if is_plain else f"give auto=False, bits={self.bits}"
        return f"{text}. To keep that in other runs, {how}"

    def _times(self) -> list[str]:
        """Returns the measured and predicted times as one item, or no item if no time was measured."""
        times = [f"{bits} bits {duration(seconds)}{self._as_predicted(bits)}" for bits, seconds in self.seconds.items()]
        untried = [bits for bits, seconds in self.predicted.items() if seconds and bits not in self.seconds]
        times += [f"{bits} bits not tried{self._as_predicted(bits)}" for bits in untried]
        return [", ".join(times)] if times else []

    def _as_predicted(self, bits: int) -> str:
        seconds = self.predicted.get(bits)
        if seconds is None:
            return ""
        return f" (predicted {'at least ' if bits in self.at_least else ''}{duration(seconds)})"


def width(value: Any) -> int:
    """Returns a number of bits from a saved state, after a check.

    Raises:
        TypeError, ValueError: if no candidate can have this number of bits.
    """
    if isinstance(value, (bool, float)) or int(value) not in WIDTHS:
        raise ValueError(f"a number of bits is {value!r}, not one of {', '.join(map(str, WIDTHS))}")
    return int(value)


def count(value: Any) -> int:
    """Returns a number of steps, or of bits in all steps, from a saved state, after a check.

    Raises:
        TypeError, ValueError: if the number is not from 0 to 2^63 - 1.
    """
    number = int(value)
    if not 0 <= number <= MAX_INTEGER or isinstance(value, bool):
        raise ValueError(f"a number of steps or bits is {value!r}, not from 0 to {MAX_INTEGER}")
    return number


def positive(value: Any) -> float:
    """Returns a length of steps, in seconds, from a saved state, after a check.

    Raises:
        TypeError, ValueError: if the length is not a finite number above 0.
    """
    seconds = float(value)
    if not 0 < seconds < math.inf:
        raise ValueError(f"a length of steps is {seconds}, not above 0 and finite")
    return seconds


def not_negative(value: Any) -> float:
    """Returns a prediction from a saved state, in seconds, after a check.

    Raises:
        TypeError, ValueError: if the number is not finite, or is negative.
    """
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"a number is {number}, not from 0 on and finite")
    return number


def pinned_bits(value: Any, bits: Any, max_slowdown: float | None, allow: Sequence[int]) -> int:
    """Returns the bits of a decision that was passed as ``auto``.

    Args:
        value: the decision, or its dictionary.
        bits: ``bits`` of the same configuration; must be None.
        max_slowdown: ``max_slowdown`` of the same configuration; must be None.
        allow: ``allow`` of the same configuration. If it is `ALLOW`, a decision may have any number of bits.

    Raises:
        ConfigError: if the value is not a decision, or if another field of the configuration contradicts it.
    """
    decided = _decision(value).bits
    for name, other in (("bits", bits), ("max_slowdown", max_slowdown)):
        if other is not None:
            raise ConfigError(f"{name}={other!r} with a decision for {decided} bits as auto; leave {name} or auto out")
    if set(allow) != set(ALLOW) and decided not in allow:
        raise ConfigError(
            f"the decision that auto has is for {decided} bits, and allow={tuple(allow)} has others; leave allow out, "
            f"or give auto=True to decide anew"
        )
    return decided


def _decision(value: Any) -> Decision:
    if isinstance(value, Decision):
        value = value.to_dict()
    elif not isinstance(value, Mapping):
        raise ConfigError(f"auto={value!r:.100} must be True or False, or a decision; {_REMEDY}")
    try:
        return Decision.from_dict(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"auto={value!r:.100} is not a decision ({type(error).__name__}: {error}); {_REMEDY}"
        ) from None
