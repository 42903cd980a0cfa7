"""Decides which fragments are averaged after which optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_gqsgd.local_steps.options import LocalOptions


class Rounds:
    """Rounds of optimizer steps, in each of which every fragment is averaged once.

    In a round of H steps, the average of fragment f of F starts after step ⌈(f + 1) H / F⌉ of the round. So a single
    fragment starts after the last step, and several fragments are spread evenly over the round.

    Attributes:
        number: number of rounds that are over.
        begun_after: the step after which the current round began.
    """

    def __init__(self, options: LocalOptions) -> None:
        self._options = options
        self.number = 0
        self.begun_after = 0

    def due_after(self, step: int) -> list[int]:
        """Returns the fragments whose averages start after a step."""
        steps = self._options.steps_of_round(self.number)
        parts = self._options.fragments
        return [part for part in range(parts) if -(-(part + 1) * steps // parts) == step - self.begun_after]

    def end_step(self, step: int) -> None:
        """Begin the next round if the current round ends after this step.

        Raises:
            ConfigError: if ``every`` returns an invalid number of steps for the next round.
        """
        if step - self.begun_after >= self._options.steps_of_round(self.number):
            self.begin_anew(step)
            self._options.steps_of_round(self.number)

    def begin_anew(self, step: int) -> None:
        """End the current round after a step, and begin the next round, unless the current one has just begun."""
        if step > self.begun_after:
            self.number += 1
            self.begun_after = step

    def state_dict(self) -> dict[str, int]:
        """Returns the counters as plain values."""
        return {"number": self.number, "begun_after": self.begun_after}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Continue the rounds of another run after a step.

        If that run's rounds were longer, the current round may already have more steps than a round of this run. Then
        it ends with the next step.
        """
        self.number = state["number"]
        self.begun_after = state["begun_after"]
        steps = self._options.steps_of_round(self.number)
        if step - self.begun_after >= steps:
            self.begun_after = step + 1 - steps
