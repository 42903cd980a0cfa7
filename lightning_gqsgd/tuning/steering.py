"""What the hook asks in each step where bits are chosen by the length of steps: the configuration to use."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.reducers import resolve
from lightning_gqsgd.transport.agreement import digest_of
from lightning_gqsgd.tuning.clock import StepClock
from lightning_gqsgd.tuning.trials import Decision, Trials

logger = logging.getLogger(__name__)


class Steering:
    """Chooses the configuration of each step of one training.

    Args:
        config: a configuration with ``auto=True``.
        ranks: number of ranks.

    Attributes:
        candidates: the configurations by their bits, widest first, with their reducers chosen.
        trials: what has been tried and decided.

    Raises:
        ConfigError: a candidate cannot work with so many ranks.
    """

    def __init__(self, config: GQSGDConfig, ranks: int) -> None:
        self.candidates = {bits: resolve(candidate, ranks) for bits, candidate in config.candidates().items()}
        self.trials = Trials(tuple(self.candidates))
        self._ranks = ranks
        self._clock = StepClock()

    @property
    def config(self) -> GQSGDConfig:
        """The configuration of the latest step; before the first step, that of the first."""
        return self.candidates[self.trials.bits]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The ends of all trials, in order."""
        return tuple(self.trials.decisions)

    def watch(self, model: nn.Module) -> None:
        """Count the forward passes of a model, see `clock.StepClock`."""
        self._clock.watch(model)

    def begin_step(self, step: int, periods: Mapping[int, int], *, logs: bool) -> tuple[GQSGDConfig, int]:
        """Begin a step.

        Args:
            step: number of the step.
            periods: for each step up to ``step - 2`` since the last call, the length of the step before it: the
                longest over ranks in microseconds, or 0 if the length does not count on all ranks.
            logs: whether to log a decision.

        Returns:
            The step's configuration, and the length of the step before on this rank in microseconds, or 0.
        """
        for compared_in, period_us in sorted(periods.items()):
            self.trials.observe(compared_in - 1, period_us * 1e-6 if period_us else None)
        known = len(self.trials.decisions)
        self.trials.choose(step)
        if logs and len(self.trials.decisions) > known:
            logger.info("gqsgd: %s", describe(self.trials.decisions[-1]))
        return self.config, self._clock.begin_step()

    def digest(self, digest: int) -> int:
        """What ranks compare in a step: a digest of all facts, and the step's bits."""
        return digest_of(f"{digest} {self.trials.bits}")

    def reseed(self, seed: int) -> None:
        """Give all candidates another seed."""
        self.candidates = {bits: replace(config, seed=seed) for bits, config in self.candidates.items()}

    def state(self) -> dict[str, Any]:
        """What a resumed run begins with: plain values."""
        return {**self.trials.state(), "ranks": self._ranks}

    def resume(self, state: object) -> None:
        """Begin with what `state` gave; with nothing, if ``state`` is None.

        Raises:
            ConfigError: ``state`` is no such state.
        """
        self._clock.interrupt()
        if state is None:
            self.trials = Trials(tuple(self.candidates))
            return
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"the gqsgd state's entry 'auto' is {state!r}; load what state_dict has written, or drop the entry"
            )
        is_same_world = state.get("ranks") == self._ranks
        self.trials = Trials.resumed(tuple(self.candidates), state, is_same_world=is_same_world)

    def report(self, ranks: int) -> str:
        """One line for people."""
        allowed = ", ".join(map(str, self.candidates))
        text = f"gqsgd: auto over {ranks} ranks: bits of {allowed}, whichever makes steps shortest"
        if self.trials.decisions:
            return f"{text}; {describe(self.trials.decisions[-1])}"
        return f"{text}; {self.trials.bits} until the first trial"


def describe(decision: Decision) -> str:
    """One line that says what was decided, and how to keep it."""
    times = ", ".join(f"{bits} bits {1e3 * seconds:.3g} ms" for bits, seconds in decision.seconds.items())
    return (
        f"auto takes {decision.bits} bits from step {decision.step} on ({times or 'nothing measured'}: "
        f"{decision.reason}). To keep that in other runs, give auto=False, bits={decision.bits}"
    )
