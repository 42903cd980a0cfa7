"""Chooses the configuration of each step for the hook, if bits are chosen during the training.

There are two rules, which can be combined. The noise of gradients says how few bits are allowed (`noise`). The length
of steps says which of the allowed numbers of bits is fastest (`trials`); without this rule, the fewest allowed bits are
used.

All ranks know everything on which decisions depend. In its stamp of a step, each rank tells the others the measurements
of its previous step (`wire.agreement.Stamp.numbers`), and all ranks use a stamp two steps later.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_gqsgd.adaptive.clock import StepClock
from lightning_gqsgd.adaptive.noise import EVERY, NoiseGauge, NoiseSums, Way
from lightning_gqsgd.adaptive.prediction import predicted_steps
from lightning_gqsgd.adaptive.sampling import GradientSampler, Taken
from lightning_gqsgd.adaptive.trials import UNKNOWN, Trials
from lightning_gqsgd.codecs.floats.codec import REDUCER_OF_BITS
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.spec.decisions import Decision, count
from lightning_gqsgd.wire.agreement import Agreed, Stamp, digest_of
from lightning_gqsgd.wire.announcing import say


class Steering:
    """Chooses the configuration of each step of one training.

    Args:
        config: a configuration whose bits are chosen during the training.
        ranks: number of ranks.
        says: whether this rank announces decisions.

    Attributes:
        candidates: the configurations by their bits, widest first, with the chosen reducers.
        trials: the trials and decisions so far; None without ``auto``.
        gauge: the noise of the gradients; None without ``bits="auto"``.
        bits: the bits of the latest step; before the first step, those of the first.
        clock: measures the steps of this rank.
        sampler: measures the noise of this rank's gradients.
        is_plain: whether plain DDP replaces the hook.

    Raises:
        ConfigError: if a candidate cannot work with this number of ranks.
    """

    def __init__(self, config: GQSGDConfig, ranks: int, *, says: bool = False) -> None:
        self.candidates = {bits: resolve(candidate, ranks) for bits, candidate in config.candidates().items()}
        self._ranks = ranks
        self._predictor = partial(predicted_steps, self.candidates, ranks)
        self.trials = Trials(tuple(self.candidates), predictor=self._predictor) if config.auto else None
        self.gauge: NoiseGauge | None = None
        if config.max_slowdown is not None:
            ways = {bits: Way.of(candidate, ranks) for bits, candidate in self.candidates.items()}
            self.gauge = NoiseGauge(ways, ranks, config.max_slowdown)
        self.bits = max(self.candidates)
        self.sampler = GradientSampler(self.candidates)
        self.clock = StepClock()
        self._say: Callable[[str], None] | None = say if says else None
        self._plain = UNKNOWN
        self.is_plain = False
        self._begin_run()
        self._permit(0)

    def _begin_run(self) -> None:
        """Forget all steps so far."""
        self._changes: list[Decision] = []  # without trials
        self._inherited = 0  # number of decisions from the loaded state
        self._inbox: dict[int, Agreed] = {}  # stamps that are not used yet, by the step in which they were exchanged
        self._measuring: int | None = None  # the measured step, until its sums are sent
        self._exposed_s: float | None = None
        self._total_bits = 0
        self._total_steps = 0

    @property
    def config(self) -> GQSGDConfig:
        """The configuration of the latest step; before the first step, the configuration of the first step."""
        return self.candidates[self.bits]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The ends of all trials and all other changes of bits, in order."""
        return tuple(self._changes if self.trials is None else self.trials.decisions)

    @property
    def average_bits(self) -> float:
        """Mean number of bits over all steps so far, including those before a resume; NaN before the first step."""
        return self._total_bits / self._total_steps if self._total_steps else math.nan

    def compile(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compile the kernels that measure the noise of gradients, so that no step waits for a compiler."""
        if self.gauge is not None and self._ranks > 1:
            self.sampler.compile(dtype, device)

    # --- one step ----------------------------------------------------------------------------------------------------

    def receive(self, agreed: Mapping[int, Agreed]) -> None:
        """Store the agreed stamps of all ranks, by the step in which they were exchanged.

        Stamps without numbers belong to steps that plain DDP has reduced. They are ignored, because they say nothing
        about the hook's steps. One may be left unread if a state was loaded or the model was wrapped again.
        """
        self._inbox |= {number: told for number, told in agreed.items() if any(told.numbers)}

    def begin_step(self, step: int, exposed_s: float | None, *, digest: int = 0, is_countable: bool = False) -> Stamp:
        """Begin a step: choose its bits, from stamps that were exchanged in steps up to ``step - 2``.

        Args:
            step: number of the step.
            exposed_s: seconds in which this rank's backward passes have waited for gradients so far; None if unknown.
            digest: digest of the facts that ranks compare in addition to the bits.
            is_countable: whether this rank can count its steps without the hook (see `plain.PlainPath`).

        Returns:
            The stamp of the step, which tells other ranks the measurements of this rank in the previous step.
        """
        period_us = self.clock.begin_step()
        begun = time.perf_counter()
        known = len(self.decisions)
        for compared_in in sorted(number for number in self._inbox if number <= step - 2):
            self._use(compared_in, self._inbox.pop(compared_in), step)
        if self.trials is not None:
            self.bits = self.trials.choose(step, self._plain)
        self.count_step()
        self._say_from(known)
        told = (int(is_countable),) if self.gauge is None else self._sums(self.gauge, step)
        numbers = (*self._waits(exposed_s), *told)
        self.clock.skip(time.perf_counter() - begun)  # a prediction takes some time, once per trial
        return Stamp(self.config.seed, step, digest_of(f"{digest} {self.bits}"), period_us, numbers)

    def take(self, x: Tensor, segments: Sequence[Segment], step: int) -> Taken | None:
        """Copy the sample of a bucket before it is reduced. Returns None if nothing is measured in this step."""
        if self.gauge is None or self._ranks == 1 or step % EVERY:
            return None
        self._measuring = step
        return self.sampler.take(x, segments, step, self.config.seed)

    def choice(self) -> dict[str, float]:
        """Returns the latest step in numbers, for telemetry: ``bits``; ``trying`` and ``plain``, with ``auto``;
        ``noise_scale``, in batches of one rank, and ``predicted_step_s`` of these bits, if they are known."""
        values: dict[str, float] = {"bits": self.bits}
        if self.trials is not None:
            values |= {"trying": float(self._is_trying), "plain": float(self.is_plain)}
        if self.gauge is not None and self.gauge.count:
            values["noise_scale"] = self.gauge.noise_scale
        predicted = self.decisions[-1].predicted.get(self.bits) if self.decisions else None
        return values if predicted is None else {**values, "predicted_step_s": predicted}

    def _use(self, compared_in: int, agreed: Agreed, step: int) -> None:
        """Use the stamps of an earlier step for decisions from ``step`` on."""
        waits = [row[:2] for row in agreed.numbers]
        sums = [row[2:] for row in agreed.numbers]
        if self.trials is not None:
            # If a rank waits longer than others, it waits for them, and not only for the link.
            exposed_s = _seconds(min(row[0] for row in waits))
            backward_s = _seconds(max(row[1] for row in waits))
            period_s = agreed.period_us * 1e-6 if agreed.period_us else None
            self.trials.observe(compared_in - 1, period_s, exposed_s, backward_s)
            self._plain = self._plain._replace(is_countable=all(map(any, sums)))
        if self.gauge is not None and all(map(any, sums)):
            self.gauge.observe([_sums_of(row) for row in sums])
            self._permit(step)

    def _permit(self, step: int) -> None:
        """Tell the trials which bits the noise allows; without trials, use the fewest allowed bits."""
        if self.gauge is None:
            return
        why = self.gauge.describe()
        if self.trials is not None:
            self.trials.permit(self.gauge.allowed, step, why)
        elif self.gauge.floor != self.bits:
            self.bits = self.gauge.floor
            self._changes.append(Decision(step, self.bits, {}, why, dict.fromkeys(self.candidates)))

    def _say_from(self, known: int) -> None:
        """Announce the decisions after the first ``known`` ones."""
        for decision in self.decisions[known:]:
            self.say(self._described(decision))

    def _waits(self, exposed_s: float | None) -> tuple[int, int]:
        """Returns two times of the previous step in microseconds plus 1: the wait for gradients, and the time from the
        first to the last bucket. 0 means unknown."""
        before = self._exposed_s
        self._exposed_s = exposed_s
        if exposed_s is None or before is None:
            return 0, 0
        return 1 + round(1e6 * max(0.0, exposed_s - before)), 1 + round(1e6 * self.clock.backward_s)

    def _sums(self, gauge: NoiseGauge, step: int) -> tuple[int, ...]:
        """Returns the sums of the previous step, as integers with the bits of fp64 numbers; zeros if there are none."""
        measured = self._measuring
        self._measuring = None
        sums = self.sampler.collect() if measured == step - 1 else None
        if sums is None:
            self.sampler.drop()
            return (0,) * (2 + len(gauge.coded))
        return struct.unpack(f"<{len(sums)}q", struct.pack(f"<{len(sums)}d", *sums))

    # --- steps without the hook --------------------------------------------------------------------------------------

    @property
    def _timed(self) -> Trials:
        """The trials. Plain DDP takes the hook's place only where the duration of steps alone chooses bits."""
        assert self.trials is not None
        return self.trials

    @property
    def rests(self) -> bool:
        """Returns whether 32 bits were kept because of their duration, so that the hook is not needed until the
        duration of steps changes."""
        return self._timed.is_resting

    @property
    def leaves_hook(self) -> bool:
        """Returns whether plain DDP replaces the hook on all ranks after the current step."""
        return self.rests and self._plain.can_come

    def permit_plain(self, obstacle: str) -> None:
        """Note whether plain DDP can replace the hook; ``obstacle`` is the reason why not, empty if it can."""
        self._plain = self._plain._replace(obstacle=obstacle)

    def begin_plain(self) -> None:
        """Note that plain DDP has replaced the hook, and forget the durations of the hook's steps."""
        self._timed.begin_rest()
        self.is_plain = True
        self._plain = self._plain._replace(is_countable=False)
        self._inbox.clear()
        self.clock.interrupt()

    def end_plain(self) -> None:
        """Note that the hook has replaced plain DDP."""
        self.is_plain = False
        self.clock.interrupt()

    def count_step(self) -> None:
        """Count a step at the current bits, for the average."""
        self._total_bits += self.bits
        self._total_steps += 1

    def watch_plain(self, steps: int, period_us: int, step: int) -> None:
        """Use the agreed duration of plain DDP's steps. Afterwards, `rests` is False if the hook has to return.

        Args:
            steps: number of steps since the last call.
            period_us: the result of `watched_us`, as a maximum over ranks.
            step: the step that begins.
        """
        known = len(self.decisions)
        self._timed.rest(steps, period_us * 1e-6 if period_us else None, step)
        self._say_from(known)

    def watched_us(self, lengths_us: Sequence[int]) -> int:
        """Returns the duration that this rank reports for plain DDP's steps, in microseconds; 0 if too few are known.

        Args:
            lengths_us: durations of the latest steps.
        """
        seconds = self._timed.watched([1e-6 * length for length in lengths_us])
        return 0 if seconds is None else round(1e6 * seconds)

    def plain_digest(self, digest: int) -> int:
        """Returns the digest that ranks compare while plain DDP replaces the hook; ``digest`` is the digest of all
        other facts."""
        return digest_of(f"{digest} {self._timed.describe_rest()}")

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def reseed(self, seed: int) -> None:
        """Give all candidates another seed."""
        self.candidates = {bits: replace(config, seed=seed) for bits, config in self.candidates.items()}

    def state(self) -> dict[str, Any]:
        """Returns the state for a resumed run, as plain values.

        A measurement of noise that was not exchanged yet is dropped, because a state contains only values that all
        ranks know. If one rank has dropped its measurement, all ranks ignore that measurement, so this run continues
        exactly as a resumed run does.
        """
        self.sampler.drop()
        self._measuring = None
        state: dict[str, Any] = {"ranks": self._ranks, "total_bits": self._total_bits, "total_steps": self._total_steps}
        if self.trials is None:
            state |= {"bits": self.bits, "decisions": [decision.to_dict() for decision in self._changes]}
        else:
            state |= self.trials.to_dict()
        if self.gauge is not None:
            inbox = {str(number): [list(row[2:]) for row in agreed.numbers] for number, agreed in self._inbox.items()}
            state |= {"noise": self.gauge.state(), "inbox": inbox}
        return state

    def resume(self, state: object) -> None:
        """Load a `state`. Start again if it is None.

        Raises:
            ConfigError: if ``state`` is no such state. Nothing is changed then.
        """
        before = {**vars(self), "gauge": copy(self.gauge)}
        try:
            self._resume(state)
        except ConfigError:
            vars(self).update(before)
            raise

    def _resume(self, state: object) -> None:
        self.clock.interrupt()
        self._plain = self._plain._replace(is_countable=False)
        self.sampler.drop()
        self._begin_run()
        if state is not None and not isinstance(state, Mapping):
            raise ConfigError(
                f"the gqsgd state's entry 'auto' is {state!r:.100}; load what state_dict has written, or drop the entry"
            )
        is_same_world = state is not None and state.get("ranks") == self._ranks
        if self.gauge is not None:
            self.gauge.resume(None if state is None else state.get("noise"), is_same_world=is_same_world)
        if self.trials is not None:
            self._resume_trials(state, is_same_world)
        elif self.gauge is not None:
            self.bits = self.gauge.floor
        if state is None:
            return
        self._read(state, is_same_world)
        self._permit(0)

    def _resume_trials(self, state: Mapping[str, Any] | None, is_same_world: bool) -> None:
        allow = tuple(self.candidates)
        # If bits were chosen by the noise alone in the saved run, there are no trials to continue.
        if state is None or ("noise" in state and "credit" not in state):
            self.trials = Trials(allow, predictor=self._predictor)
        else:
            self.trials = Trials.resumed(allow, state, is_same_world=is_same_world, predictor=self._predictor)
        self.bits = self.trials.bits
        self._inherited = len(self.decisions)
        self._permit(0)

    def _read(self, state: Mapping[str, Any], is_same_world: bool) -> None:
        """Read the entries of a state that neither trials nor gauge have read."""
        try:
            # States of earlier versions do not have these entries.
            totals = count(state.get("total_bits", 0)), count(state.get("total_steps", 0))
            inbox = {
                count(number): Agreed(0, tuple((0, 0, *map(_told, row)) for row in rows))
                for number, rows in state.get("inbox", {}).items()
            }
            if self.trials is None:
                self._changes = [Decision.from_dict(row) for row in state["decisions"]]
                self._inherited = len(self._changes)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"the gqsgd state's entry 'auto' cannot be read ({type(error).__name__}: {error}); load what "
                "state_dict has written, or drop the entry to begin anew"
            ) from None
        self._total_bits, self._total_steps = totals
        width = 2 + (2 + len(self.gauge.coded) if self.gauge is not None else 0)
        shapes = {tuple(len(row) for row in agreed.numbers) for agreed in inbox.values()}
        self._inbox = inbox if is_same_world and shapes <= {(width,) * self._ranks} else {}

    # --- what the user sees ------------------------------------------------------------------------------------------

    def announce(self, say: Callable[[str], None]) -> None:
        """Announce decisions by ``say`` from now on, on the rank that announces them."""
        self._say = say if self._say is not None else None

    def say(self, text: str) -> None:
        """Announce a line, if this rank announces anything."""
        if self._say is not None:
            self._say(f"gqsgd: {text}")

    def report(self, ranks: int) -> str:
        """Returns a line on the allowed bits, the average so far, and the latest decision."""
        allowed = ", ".join(map(str, self.candidates))
        rules = ["whichever makes steps shortest"] if self.trials is not None else []
        if self.gauge is not None:
            rules.append(f"as few as the noise of gradients allows (max_slowdown {self.gauge.max_slowdown:g})")
        text = f"gqsgd: auto over {ranks} ranks: bits of {allowed}, {', '.join(rules)}"
        if self._total_steps:
            text += f"; {self.average_bits:.3g} bits on average over {self._total_steps} steps"
        if not self.decisions:
            return f"{text}; {self.bits} until the first {'trial' if self.gauge is None else 'decision'}"
        tried = " on trial" if self._is_trying else ""
        text += f"; {'plain DDP reduces the gradients' if self.is_plain else f'{self.bits} bits{tried}'} at present"
        return f"{text}; {self._described(self.decisions[-1], is_earlier=len(self.decisions) <= self._inherited)}"

    @property
    def _is_trying(self) -> bool:
        return self.trials is not None and self.trials.is_trying

    def _described(self, decision: Decision, *, is_earlier: bool = False) -> str:
        """Returns a decision in words."""
        is_native = decision.bits in decision.seconds and REDUCER_OF_BITS.get(decision.bits) == "native"
        is_plain = is_native and self.gauge is None and self._plain.obstacle == ""
        return decision.describe(is_plain=is_plain, is_earlier=is_earlier, is_open=self._is_trying)


def _seconds(microseconds: int) -> float:
    """Returns the seconds for a number of `Steering._waits`; NaN if unknown."""
    return (microseconds - 1) * 1e-6 if microseconds else math.nan


def _sums_of(row: Sequence[int]) -> NoiseSums:
    """Returns the sums whose fp64 numbers have the bits of these integers."""
    return struct.unpack(f"<{len(row)}d", struct.pack(f"<{len(row)}q", *row))


def _told(value: Any) -> int:
    """Returns a number of a stamp in a state.

    Raises:
        TypeError, ValueError: if it is no integer of 64 bits.
    """
    number = int(value)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"a number of a stamp is {number}, which has more than 64 bits")
    return number
