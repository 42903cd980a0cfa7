"""Decides when a member hands over its change: by the clock, or after a number of steps.

By the clock, all members begin a round at the same moment, when the previous merge has gathered their rows. The round
ends ``every`` seconds later. A member can only hand over between two of its steps. It does so at the end of its last
step before the round's end plus ``grace``, where ``grace`` is the time of the fastest member's step. So a fast member
waits for less than one of its own steps. A slow member hands over up to one of its own steps early, so it also waits
for less than one step.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

from lightning_gqsgd.local_steps.merges.rows import Row, fastest_step_s
from lightning_gqsgd.local_steps.options import LocalOptions

#: Number of latest steps whose times are used.
_STEPS = 8

#: The smallest patience with other members, in seconds.
_PATIENCE_S = 600.0


class MergeRounds(ABC):
    """The rounds of one member.

    Attributes:
        step_s: seconds of the second longest of the latest steps; 0 before the first one.
        latest_step: time.monotonic() at the end of the latest step, or of the wait after it; minus infinity before the
            first one.
        patience_s: seconds without a successful merge after which members give up.
    """

    patience_s: float

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_STEPS)
        self.latest_step = -math.inf
        self._waits = False

    @property
    def step_s(self) -> float:
        """Seconds of the second longest of the latest steps; see the class."""
        # The longest one may contain a pause, such as a validation or a compilation, and a member that took it for a
        # step would hand over early, and wait.
        # `sorted` copies them at once: the thread of merges reads this while a step may end.
        return min(sorted(self._times)[-2:], default=0.0)

    @property
    @abstractmethod
    def round_s(self) -> float:
        """Seconds of a round, as far as this member knows."""

    def end_step(self) -> None:
        """Note that a step has ended."""
        now = time.monotonic()
        if self.latest_step > -math.inf:
            self._times.append(now - self.latest_step)
        self.latest_step = now

    def begin_step(self) -> None:
        """Note that the next step begins now, because this member has waited since the last step."""
        self.latest_step = time.monotonic()

    def wait(self) -> None:
        """Make no handover due until the next round begins.

        A member that joined between two merges has already asked for the next merge, without a change to hand over.
        """
        self._waits = True

    def is_due(self, steps: int) -> bool:
        """Returns whether to hand over after a step; ``steps`` is the number of steps since the last handover."""
        return not self._waits and self._is_over(steps)

    def begin(self, began: float, rows: Sequence[Row]) -> None:
        """Begin the next round; ``began`` is time.monotonic() when the rows of all members were gathered."""
        self._waits = False
        self._plan(began, rows)

    def start_after(self, merges: int) -> None:  # noqa: B027  # a clock does not count
        """Continue after ``merges`` merges, the count of a checkpoint."""

    @abstractmethod
    def late_after_s(self, most_s: float = math.inf) -> float | None:
        """Returns the seconds until this member merges without a handover; None if it never does.

        Args:
            most_s: how many seconds after the end of the round, and the grace, that is at most.
        """

    @abstractmethod
    def _is_over(self, steps: int) -> bool:
        """Returns whether the round ends after a step; see `is_due`."""

    @abstractmethod
    def _plan(self, began: float, rows: Sequence[Row]) -> None:
        """Plan the next round; see `begin`."""


class ByClock(MergeRounds):
    """Rounds of a number of seconds; see the module's docstring.

    Args:
        every_s: seconds of a round.
    """

    def __init__(self, every_s: float) -> None:
        super().__init__()
        self.patience_s = max(_PATIENCE_S, 3 * every_s)
        self._every_s = every_s
        self._ends = time.monotonic() + every_s
        self._grace_s = 0.0

    @property
    def round_s(self) -> float:
        return self._every_s

    def _is_over(self, steps: int) -> bool:
        """Returns whether the end of the next step would be too late."""
        return steps > 0 and time.monotonic() + self.step_s >= self._ends + self._grace_s

    def late_after_s(self, most_s: float = math.inf) -> float | None:
        """Returns the seconds until the end of the round plus the grace, plus half a step because the times of steps
        vary."""
        return max(0.0, self._ends + self._grace_s + min(self.step_s / 2, most_s) - time.monotonic())

    def _plan(self, began: float, rows: Sequence[Row]) -> None:
        self._ends = began + self.round_s
        self._grace_s = min(fastest_step_s(rows), self.round_s / 2)


class BySteps(MergeRounds):
    """Rounds of a number of this member's own steps. The other members wait for these steps.

    Args:
        steps_of_round: the number of steps of a round, by the number of rounds so far.
    """

    patience_s = 3600.0

    def __init__(self, steps_of_round: Callable[[int], int]) -> None:
        super().__init__()
        self._steps_of_round = steps_of_round
        self._number = 0

    @property
    def round_s(self) -> float:
        """Seconds of this member's steps of a round. Those of the others may take longer."""
        return self.step_s * self._steps_of_round(self._number)

    def start_after(self, merges: int) -> None:
        """Continue after ``merges`` merges with the length that the next round has."""
        # No round was before the first merge, in which members meet.
        self._number = max(merges - 1, 0)

    def _is_over(self, steps: int) -> bool:
        return steps >= self._steps_of_round(self._number)

    def late_after_s(self, most_s: float = math.inf) -> float | None:
        """Returns None: a merge begins only after this member has handed over."""
        return None

    def _plan(self, began: float, rows: Sequence[Row]) -> None:
        self.start_after(rows[0].merges + 1)  # which is equal on all members


def rounds_of(options: LocalOptions) -> MergeRounds:
    """Returns the rounds that options ask for."""
    if options.every_s is not None:
        return ByClock(options.every_s)
    return BySteps(options.steps_of_round)
