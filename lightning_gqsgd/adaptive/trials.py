"""Chooses the candidate of each step from the lengths of earlier steps: try, stay, watch.

`Trials` is a state machine without processes, clocks or tensors. Its inputs are the lengths of steps that all ranks
know, and its output is the candidate of each step. Ranks that give it the same inputs get the same outputs.

Try: the candidates take turns, each for a block of consecutive steps, for some rounds. The first step of a block does
not count, because it follows a step of another candidate. A candidate whose shortest step is twice as long as the
shortest median gets no further block. The candidate with the shortest median is kept. Of several candidates that are
equal within the error of their medians, the widest is kept.

Predict: with a predictor, the blocks of the first two candidates are as long as it takes to know their lengths. Then
the predictor says how long steps of the other candidates would be. The candidate with the shortest prediction has its
turn next, and candidates that cannot win have none, as long as later steps do not say otherwise. The widest candidate
always has its turns.

Stay: all steps use the candidate that was kept. If the median of the latest 50 steps differs from that of the decision
by more than 15 %, there is a new trial. If one of them is longer than the other by half, the median of the latest 20
steps is enough. Trials cost steps, so there is a credit of steps: each step adds a twentieth of a step, and a trial has
to be paid for.

Rest: if 32 bits were kept, plain DDP may replace the hook. Steps are then not chosen one by one. Every tenth step,
ranks exchange how long their latest steps took, and the watch uses these lengths. The first median may be shorter than
that of the decision by the share of a step that the hook may cost. If it is even shorter, there is a new trial.

Challenge: trials measure 32 bits with the hook, and plain DDP is faster because it has no hook. If other bits win by
less than the hook may cost, plain DDP reduces the gradients until the median of 20 of its steps is known. It is kept
unless this median is longer by more than the error of medians.

Permit: something else, such as the noise of gradients, may forbid candidates for a while. The widest candidate is never
forbidden. A candidate that is forbidden is left at once, and one that becomes permitted asks for a trial.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from lightning_gqsgd.adaptive.prediction import Measured
from lightning_gqsgd.adaptive.states import Challenge, Settle, State, Stay, Try, Watch, standard_error
from lightning_gqsgd.codecs.floats.codec import REDUCER_OF_BITS
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.spec.decisions import LAG, Decision, Rules, positive, width

#: Predicts the seconds of a step at every number of bits, from those that were measured; see `prediction`.
Predictor = Callable[[Mapping[int, Measured]], Mapping[int, "float | None"]]


class PlainDDP(NamedTuple):
    """The knowledge of all ranks on whether plain DDP can take the hook's place (see `plain`).

    Attributes:
        obstacle: why it cannot, in a few words; empty if nothing prevents it; None if this was not checked.
        is_countable: whether all ranks can count their steps without the hook.
    """

    obstacle: str | None = None
    is_countable: bool = False

    @property
    def can_come(self) -> bool:
        """Returns whether plain DDP can replace the hook."""
        return self.obstacle == "" and self.is_countable

    def after_native(self) -> str:
        """Returns the part of a decision's reason that says whether plain DDP replaces the hook."""
        if self.obstacle is None:
            return ""
        return f"; the hook stays, because of {self.obstacle}" if self.obstacle else "; plain DDP takes over"


#: It was not checked whether plain DDP can replace the hook.
UNKNOWN = PlainDDP()


class Trials:
    """State machine that chooses the candidate of each step, by the rules at the top of the module.

    Args:
        allow: the candidates, by their bits.
        predictor: predicts the durations of steps; None means no predictions.

    Attributes:
        allow: the candidates, widest first.
        permitted: the candidates that may currently be used.
        bits: the candidate of the latest step; at first, the widest candidate.
        decisions: the ends of all trials and all other changes of bits, in order.
        state: the current state, see `states`.
    """

    def __init__(self, allow: Sequence[int], predictor: Predictor | None = None) -> None:
        self.allow = tuple(sorted(allow, reverse=True))
        self.permitted = self.allow
        self._predictor = predictor
        self.bits = self.allow[0]
        self.decisions: list[Decision] = []
        self.state: State = Settle("first trial")
        self._watch = Watch()
        self._cost = Rules.longest_trial(len(self.allow)) + (2 * LAG if predictor else 0)
        self._credit = float(Rules.most_trials * self._cost)
        self._asked: str | None = None  # why a trial is due as soon as the credit is enough
        self._counted: dict[int, int | None] = {}  # candidate of each recent step; None if its duration does not count
        self._steps: Iterator[bool] = iter(())  # of the latest trial, see `_steps_of`

    @property
    def is_trying(self) -> bool:
        """Returns whether a trial is under way, or plain DDP has its turn."""
        return isinstance(self.state, Try | Challenge)

    @property
    def is_resting(self) -> bool:
        """Returns whether 32 bits were measured and kept, and no trial is due or under way."""
        if isinstance(self.state, Settle | Try) or self._asked is not None or not self.decisions:
            return False
        return REDUCER_OF_BITS.get(self.bits) == "native" and self.bits in self.decisions[-1].seconds

    def observe(
        self, step: int, seconds: float | None, exposed_s: float = math.nan, backward_s: float = math.nan
    ) -> None:
        """Note the duration of a step, the maximum over all ranks; None if the duration cannot be used.

        Steps are observed in order, each before `choose` is called for the step that is `LAG` later. For ``exposed_s``
        and ``backward_s``, see `prediction.Measured`.
        """
        bits = self._counted.pop(step, None)
        if seconds is None or bits is None:
            return
        if isinstance(self.state, Try):
            self.state.samples.setdefault(bits, []).append(seconds)
            self.state.waits.setdefault(bits, []).append((exposed_s, backward_s))
        elif bits == self.bits:
            self._watch.window.append(seconds)

    def permit(self, bits: Collection[int], step: int, why: str) -> None:
        """Set which candidates may be used from a step on. Call it before `choose` is called for the step.

        Args:
            bits: the candidates, including the widest.
            step: the step.
            why: why others may not be used, in words.
        """
        before = self.permitted
        self.permitted = tuple(width for width in self.allow if width in bits)
        if isinstance(self.state, Try):
            self.state.hopeless |= set(self.allow) - set(self.permitted)
        if self.bits not in self.permitted:
            self._retreat(step, why)
        new = [str(width) for width in self.permitted if width not in before]
        # The first trial takes place anyway.
        if new and (self.decisions or not isinstance(self.state, Settle)):
            self._asked = self._asked or f"{', '.join(new)} bits are allowed"

    def choose(self, step: int, plain: PlainDDP = UNKNOWN) -> int:
        """Returns the candidate of a step, by its bits. Called once for each step with the hook, in order.

        Args:
            step: the step.
            plain: whether plain DDP can take the hook's place.
        """
        self._earn(1)
        if isinstance(self.state, Challenge):
            self.state.left -= 1
            if self.state.left < 0:
                self._end_challenge(self.state, step, None)
        else:
            if isinstance(self.state, Settle):
                self.state.left -= 1
                if self.state.left < 0:
                    self._asked = self.state.why
                    self._enter(Stay())
            if isinstance(self.state, Stay):
                self._begin_if_due()
        counts = not isinstance(self.state, Try) or self._go_on(self.state, step, plain)
        self._counted[step] = self.bits if counts else None
        for old in [old for old in self._counted if old < step - 2 * LAG]:
            del self._counted[old]
        return self.bits

    def begin_rest(self) -> None:
        """Forget the durations of the hook's steps, because plain DDP has replaced the hook."""
        self._enter(self.state)

    def rest(self, steps: int, seconds: float | None, step: int) -> None:
        """Count steps for which `choose` was not called. Afterwards, `is_resting` is False if a trial has begun, or if
        other bits were taken.

        Args:
            steps: number of steps since the last call.
            seconds: the median duration of the latest steps, as a maximum over all ranks; None if unknown.
            step: the step that begins.
        """
        self._earn(steps)
        if isinstance(self.state, Challenge):
            self.state.passed += steps
            if seconds is not None:
                self._end_challenge(self.state, step, seconds)
        elif seconds is not None and self.is_resting:
            self._compare(seconds, is_plain=True)

    def watched(self, lengths: Sequence[float]) -> float | None:
        """Returns the duration of steps that the watch compares with that of the decision; see `Watch.length`."""
        return self._watch.length(lengths, at_once=isinstance(self.state, Challenge))

    # --- from state to state -----------------------------------------------------------------------------------------

    def _enter(self, state: State) -> None:
        """Change the state. Durations of earlier steps are forgotten, because they say nothing about the new state."""
        self.state = state
        self._watch.window.clear()
        self._counted.clear()

    def _earn(self, steps: int) -> None:
        """Add the share of these steps to the credit for trials."""
        self._credit = min(self._credit + steps * Rules.share, Rules.most_trials * self._cost)

    def _begin_if_due(self) -> None:
        """Begin a trial if one was requested, or if the duration of steps has changed, and if the credit is enough."""
        if len(self.permitted) < 2:
            return
        if self._asked is None:
            now = self.watched(self._watch.window)
            if now is not None:
                self._compare(now)
        elif not self.decisions or self._credit >= self._cost:
            self._begin(self._asked)

    def _retreat(self, step: int, why: str) -> None:
        """Switch from a forbidden candidate to the permitted one whose steps were shortest."""
        latest = self.decisions[-1] if self.decisions else None
        seconds = {} if latest is None else {b: s for b, s in latest.seconds.items() if b in self.permitted}
        # Without measurements, the fewest permitted bits are closest to the previous choice.
        self.bits = min(seconds, key=lambda bits: (seconds[bits], -bits)) if seconds else self.permitted[-1]
        if not isinstance(self.state, Try):
            decision = Decision(step, self.bits, seconds, why)
            if latest is not None:
                decision = replace(decision, predicted=latest.predicted, at_least=latest.at_least)
            self._decide(decision, self.state)

    def _compare(self, now: float, *, is_plain: bool = False) -> None:
        """Begin a trial if the median duration of steps has changed, and if the credit is enough; see
        `Watch.change`."""
        change = self._watch.change(now, is_plain=is_plain)
        if change is not None and self._credit >= self._cost:
            why = f"steps became {abs(change):.0%} {'longer' if change > 0 else 'shorter'}"
            self._begin(why, plain_s=now if is_plain else None)

    def _begin(self, why: str, plain_s: float | None = None) -> None:
        """Begin a trial. If steps of plain DDP began it, ``plain_s`` is their median."""
        self._asked = None
        self._watch.began_s = plain_s
        trial = Try(why, deque(self.permitted), hopeless=set(self.allow) - set(self.permitted))
        self._steps = self._steps_of(trial)
        self._enter(trial)

    def _decide(self, decision: Decision, state: State) -> None:
        """Record a decision, and watch the following steps."""
        self.decisions.append(decision)
        self._watch = Watch(decision.seconds.get(self.bits), self._watch.began_s)
        self._enter(state)

    def _end_trial(self, trial: Try, step: int, plain: PlainDDP) -> None:
        """Choose the candidate with the shortest steps; or 32 bits, if plain DDP may be as fast."""
        self._credit -= trial.used if self.decisions else 0  # the first trial is free
        medians = {bits: median(trial.samples[bits]) for bits in self.allow if trial.samples.get(bits)}
        state: State = Stay()
        if not self._counting(trial):
            reason = f"{trial.why}; no step could be measured, so {self.bits} bits stay"
        else:
            self.bits, reason = self._best(trial)
            reason = f"{trial.why}; {reason}"
            if plain.can_come and self._is_challenged(medians):
                state = Challenge(self.bits, medians)
                self.bits = self.allow[0]
                reason += f", by less than the hook may cost at {self.bits} bits"
        skipped = ", ".join(map(str, sorted(trial.skipped, reverse=True)))
        reason += f"; {skipped} bits were not tried, because they are predicted not to win" if skipped else ""
        reason += plain.after_native() if REDUCER_OF_BITS.get(self.bits) == "native" else ""
        predicted = {bits: trial.predicted.get(bits) for bits in self.allow}
        at_least = tuple(sorted(trial.at_least, reverse=True))
        self._decide(Decision(step, self.bits, medians, reason, predicted, at_least), state)

    def _is_challenged(self, medians: Mapping[int, float]) -> bool:
        """Returns whether the best candidate beats 32 bits by less than the hook may cost at 32 bits."""
        widest = self.allow[0]
        if REDUCER_OF_BITS.get(widest) != "native" or widest not in medians:
            return False
        return widest != self.bits and medians[self.bits] > medians[widest] * (1 - Rules.hook)

    def _end_challenge(self, challenge: Challenge, step: int, seconds: float | None) -> None:
        """Keep plain DDP or the bits with which it was compared. ``seconds`` is the median of plain DDP; None if it did
        not replace the hook."""
        medians = dict(challenge.seconds)
        reason = "plain DDP could not take over"
        stays = False
        if seconds is not None:
            medians[self.bits] = seconds
            stays = seconds <= medians[challenge.bits] * (1 + Rules.widest_tie)
            reason = f"32 bits were measured under plain DDP, {'which stays' if stays else 'whose steps are longer'}"
        if not stays:
            self.bits = challenge.bits
            self._credit -= challenge.passed
        latest = self.decisions[-1]
        decision = replace(latest, step=step, bits=self.bits, seconds=medians, reason=reason)
        self._decide(decision, Stay())
        if seconds is not None and stays:
            # The trial measured the other bits. If steps have become much shorter since then, it is no longer valid.
            self._watch.reference_s = challenge.seconds.get(self.bits)
            self._compare(seconds, is_plain=True)

    # --- a trial -----------------------------------------------------------------------------------------------------

    def _go_on(self, trial: Try, step: int, plain: PlainDDP) -> bool:
        """Choose the candidate of the next step of a trial, or end the trial. Returns whether the step's duration
        counts."""
        counts = next(self._steps, None)
        if counts is None:
            self._end_trial(trial, step, plain)
            return False  # it may follow a step of another candidate
        trial.used += 1
        return counts

    def _steps_of(self, trial: Try) -> Iterator[bool]:
        """Choose the candidate of each step of a trial, and yield whether the step's duration counts."""
        while True:
            self._predict(trial)
            turns = (trial.turns.popleft() for _ in range(len(trial.turns)))
            bits = next((bits for bits in turns if bits not in trial.hopeless | trial.skipped), None)
            if bits is not None:
                yield from self._turn(trial, bits)
            elif not self._begin_round(trial):
                break
        self.bits = self._best(trial)[0] if self._counting(trial) else self.bits
        yield from [False] * (LAG - 1)  # until the durations of the last steps are known

    def _turn(self, trial: Try, bits: int) -> Iterator[bool]:
        """Yield whether the duration of each step of a turn counts. The turn ends early if its candidate becomes
        hopeless."""
        is_new = bits not in trial.tried
        trial.tried.add(bits)
        # The durations from which others are predicted have to be known when the turn ends.
        is_longer = self._predictor is not None and is_new and len(trial.tried) <= 2
        self.bits = bits
        for number in range(Rules.block + (LAG if is_longer else 0)):
            yield number > 0
            self._give_up_hopeless(trial)
            if bits in trial.hopeless:
                return

    def _begin_round(self, trial: Try) -> bool:
        """Give turns to all candidates that may still win. Returns False if no further round is needed."""
        trial.round += 1
        remaining = [bits for bits in self.permitted if bits not in trial.hopeless | trial.skipped]
        measured = all(len(trial.samples.get(bits, ())) > 1 for bits in remaining)
        enough = trial.round >= Rules.rounds + (not measured)
        if enough or (len(remaining) == 1 and measured):
            return False
        trial.turns.extend(remaining)
        return True

    def _give_up_hopeless(self, trial: Try) -> None:
        medians = {bits: median(seconds) for bits, seconds in trial.samples.items() if len(seconds) > 1}
        if medians:
            limit = Rules.hopeless * min(medians.values())
            trial.hopeless |= {bits for bits in medians if min(trial.samples[bits]) > limit}

    def _best(self, trial: Try) -> tuple[int, str]:
        """Returns the candidate to keep, and the reason."""
        samples = self._counting(trial)
        medians = {bits: median(seconds) for bits, seconds in samples.items()}
        shortest = min(medians, key=lambda bits: (medians[bits], -bits))
        for bits in samples:  # widest first
            error = (standard_error(samples[bits]) ** 2 + standard_error(samples[shortest]) ** 2) ** 0.5 / medians[
                shortest
            ]
            tie = min(max(Rules.tie, error), Rules.widest_tie)
            if medians[bits] <= medians[shortest] * (1 + tie):
                break
        if bits == shortest:
            return bits, "it is the shortest"
        return bits, f"it is within {tie:.0%} of {shortest} bits, the shortest"

    def _counting(self, trial: Try) -> dict[int, list[float]]:
        """Returns the durations of steps of the candidates that were measured and are permitted, widest first."""
        return {bits: trial.samples[bits] for bits in self.permitted if trial.samples.get(bits)}

    def _predict(self, trial: Try) -> None:
        """Predict the steps of candidates that had no turn yet, and skip those that cannot win.

        This is done before each turn of the first round, and after each round, so that a skipped candidate still gets a
        turn if later steps give it a chance.
        """
        untried = [bits for bits in self.permitted if bits not in trial.tried]
        if self._predictor is None or not untried or (trial.round and trial.turns):
            return
        measured = trial.measured()
        trial.skipped = set()
        if not measured or self._is_refuted(trial, measured):
            return
        predictions = self._predictor(measured)
        best_s = min(medians.step_s for medians in measured.values())
        knows_codec = any(bits not in REDUCER_OF_BITS for bits in measured)
        for bits in untried:
            seconds = trial.predicted[bits] = predictions[bits]
            leaves_out = REDUCER_OF_BITS[bits] == "bf16" if bits in REDUCER_OF_BITS else not knows_codec
            trial.at_least = trial.at_least - {bits} | ({bits} if leaves_out and seconds is not None else set())
            # Predictions without the codec's cost are lower bounds, so they need no allowance for doubt.
            share = 1 - Rules.doubt if knows_codec else 1 + Rules.tie
            if seconds is not None and bits != self.allow[0] and seconds * share > best_s:
                trial.skipped.add(bits)
        trial.turns = deque(sorted(trial.turns, key=lambda bits: (trial.predicted.get(bits) or math.inf, -bits)))

    def _is_refuted(self, trial: Try, measured: Mapping[int, Measured]) -> bool:
        """Returns whether steps were shorter than their predicted lower bound. Then something else has changed since
        the first turn, so no conclusion can be drawn from that turn."""
        pairs = [(trial.predicted.get(bits), medians.step_s) for bits, medians in measured.items()]
        return any(seconds is not None and length < seconds * (1 - Rules.doubt) for seconds, length in pairs)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def describe_rest(self) -> str:
        """Returns the state that ranks must share to find the next trial due at the same step."""
        challenge = self.state if isinstance(self.state, Challenge) else None
        watch = self._watch
        reference = (watch.reference_s, watch.is_refined, watch.is_plain, watch.began_s)
        return f"{len(self.decisions)} {self.bits} {reference} {self._credit} {challenge}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the state for a resumed run, as plain values."""
        challenge = self.state if isinstance(self.state, Challenge) else None
        return {
            "allow": list(self.allow),
            "bits": self.decisions[-1].bits if self.decisions else None,
            "reference_s": self._watch.reference_s,
            "is_plain": self._watch.is_plain,
            "began_s": self._watch.began_s,
            "credit": self._credit,
            "challenge": None if challenge is None else {"bits": challenge.bits, "seconds": challenge.seconds},
            "decisions": [decision.to_dict() for decision in self.decisions],
        }

    @classmethod
    def resumed(
        cls,
        allow: Sequence[int],
        state: Mapping[str, Any],
        *,
        is_same_world: bool,
        predictor: Predictor | None = None,
    ) -> Trials:
        """Create trials from the result of `to_dict`. The candidate of the latest decision is used until there is a new
        trial.

        If more bits are allowed than in the saved run, a trial follows soon, because they were never measured.

        Args:
            allow: the candidates, by their bits.
            state: the result of `to_dict`.
            is_same_world: whether the number of ranks equals that of the saved run; if not, a trial follows soon.
            predictor: see the class.

        Raises:
            ConfigError: if ``state`` is no such state.
        """
        try:
            decisions = [Decision.from_dict(row) for row in state["decisions"]]
            bits = state["bits"]
            reference_s = state["reference_s"]
            credit = _credit(state["credit"])
            bits = None if bits is None else width(bits)
            reference_s = None if reference_s is None else positive(reference_s)
            # States of earlier versions do not have these two entries.
            is_plain = bool(state.get("is_plain", False))
            began_s = state.get("began_s")
            began_s = None if began_s is None else positive(began_s)
            tried = tuple(map(width, state.get("allow", allow)))
            challenge = Challenge.from_state(state.get("challenge"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"the gqsgd state's entry 'auto' cannot be read ({type(error).__name__}: {error}); load what "
                "state_dict has written, or drop the entry to try anew"
            ) from None
        trials = cls(allow, predictor=predictor)
        trials.decisions = decisions
        if bits not in trials.allow:
            return trials
        trials.bits = bits
        trials._credit = min(credit, trials._credit)
        fresh = [candidate for candidate in trials.allow if candidate not in tried]
        if not is_same_world:
            trials.state = Settle("another number of ranks")
        elif fresh:
            trials.state = Settle(f"{', '.join(map(str, fresh))} bits are allowed now")
        else:
            trials._watch = Watch(reference_s, began_s, is_plain, is_refined=is_plain)
            trials.state = challenge if challenge is not None and challenge.bits in trials.allow else Stay()
        return trials


def _credit(value: Any) -> float:
    """Returns the credit of steps in a state. Plain DDP's turn is paid for afterwards, so the credit may be negative.

    Raises:
        TypeError, ValueError: if it is no finite number.
    """
    credit = float(value)
    if not math.isfinite(credit):
        raise ValueError(f"the credit of steps is {credit}, not finite")
    return credit
