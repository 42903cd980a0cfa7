"""How far a run or a comparison has come, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

#: Seconds between two lines of progress where output is redirected.
LINE_EVERY_S = 30.0

Clock = Callable[[], float]


def duration(seconds: float) -> str:
    """Seconds as ``0:07``, ``12:30`` or ``2:05:00``."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


class RunPace:
    """The pace of one run.

    Args:
        total: steps of the whole run; infinite if the run has no end.
        first: the step from which the run goes on, 0 for a new run.
        clock: gives seconds.
    """

    def __init__(self, total: float, first: int = 0, clock: Clock = time.monotonic) -> None:
        self._total, self._first, self._clock = total, first, clock
        self._start = clock()

    def text(self, step: int) -> str:
        """``step 66/440 (15 %), 0:12 left``; without share and time where the number of steps is not known."""
        if not 0 < self._total < float("inf"):
            return f"step {step}"
        shown = f"step {step}/{self._total:.0f} ({self.share(step):.0%})".replace("%", " %")
        left = self.seconds_left(step)
        return shown if left is None else f"{shown}, {duration(left)} left"

    def share(self, step: int) -> float:
        """Part of the run that is done, 0 to 1."""
        return min(1.0, step / self._total)

    def seconds_left(self, step: int) -> float | None:
        """Seconds that the rest will take at the mean pace so far; None before the first step."""
        done = step - self._first
        if done <= 0:
            return None
        return (self._clock() - self._start) / done * max(0.0, self._total - step)


class ComparisonPace:
    """The pace of a comparison. Trainings and probes have paces of their own.

    A cell's time before its first steps is not part of its pace: it imports, reads data and compiles then. A kind of
    cell of which nothing is known yet counts as that time, because a probe has few steps.

    Args:
        kinds: what each cell is, e.g. ``"training"`` or ``"probe"``, in their order.
        clock: gives seconds.
    """

    def __init__(self, kinds: Sequence[str], clock: Clock = time.monotonic) -> None:
        self._kinds, self._clock = kinds, clock
        self._waiting = set(range(len(kinds)))
        self._durations: dict[str, list[float]] = {}
        self._current: tuple[int, float] | None = None
        self._first: tuple[float, float] | None = None  # of the current cell: share and time of its first steps
        self._opening: float | None = None  # seconds before the first steps of the latest cell that had some

    def start(self, number: int) -> None:
        """A cell begins."""
        self._waiting.discard(number)
        self._current, self._first = (number, self._clock()), None

    def finish(self, number: int) -> None:
        """A cell has ended; a cell that had not begun was finished before, and says nothing of the pace."""
        self._waiting.discard(number)
        if self._current is not None and self._current[0] == number:
            self._durations.setdefault(self._kinds[number], []).append(self._clock() - self._current[1])
        self._current = None

    def seconds_left(self, share: float) -> float | None:
        """Seconds that all cells that are left will take; None as long as there is nothing to judge that by.

        Args:
            share: part of the current cell that is done, 0 to 1.
        """
        means = {kind: sum(values) / len(values) for kind, values in self._durations.items()}
        left = 0.0
        if self._current is not None:
            number, start = self._current
            elapsed, kind = self._clock() - start, self._kinds[number]
            rest = self._rest_of_current(share, elapsed)
            whole = means.get(kind) if rest is None else elapsed + rest
            if whole is None:
                return None
            means.setdefault(kind, whole)
            left = max(0.0, whole - elapsed)
        if not means:
            return None
        unknown = max(means.values()) if self._opening is None else self._opening
        return left + sum(means.get(self._kinds[number], unknown) for number in self._waiting)

    def _rest_of_current(self, share: float, elapsed: float) -> float | None:
        """Seconds that the current cell will take from now on; None before it has made steps to judge that by."""
        if share <= 0:
            return None
        if self._first is None:
            self._first, self._opening = (share, elapsed), elapsed
        first_share, first_elapsed = self._first
        if share == first_share:
            return None
        return (elapsed - first_elapsed) / (share - first_share) * (1 - share)
