"""A virtual clock: tasks that take time, resources that do one task at a time, and processors that tasks share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

#: A function that is called at the end of a task.
Then = Callable[[], None]

#: A task with fewer seconds left counts as finished. This is far below any cost, and above rounding errors.
_EPSILON_S = 1e-12


class Event(NamedTuple):
    """One task of a resource, with its times in seconds.

    Attributes:
        resource: ``"backward"``, ``"codec"``, ``"stream 0"``, ``"link"``, ``"node"``, ...
        label: the kind of task, e.g. ``"encode"``.
        bucket: number of the bucket, in the order in which buckets are ready.
        piece: number of the piece in its bucket; -1 for a task of the whole bucket.
        start_s: start, in seconds from the start of the step.
        end_s: end, in seconds from the start of the step.
    """

    resource: str
    label: str
    bucket: int
    piece: int
    start_s: float
    end_s: float


@dataclass
class _Task:
    left_s: float  # at full speed
    demand: float  # processors that it keeps busy at full speed
    then: Then
    rate: float = 1.0


class Clock:
    """The virtual time, and the tasks that run.

    A task at full speed keeps some processors busy, or a fraction of one. If all tasks together need more processors
    than exist, the processors are shared by max-min fairness: a task that needs less than an equal share gets its full
    demand, and the others share the rest. If a task gets only a fraction of its demand, it is slower by that factor.

    Attributes:
        now_s: seconds since the start.
        events: the tasks of resources, in the order in which they ended.
    """

    def __init__(self, cores: float) -> None:
        self.now_s = 0.0
        self.events: list[Event] = []
        self._cores = cores
        self._running: list[_Task] = []

    def start(self, seconds: float, demand: float, then: Then) -> None:
        """Start a task; ``demand`` is the number of processors that it keeps busy at full speed."""
        self._running.append(_Task(seconds, demand, then))

    def run(self) -> None:
        """Advance the time until all tasks have ended."""
        while self._running:
            self._share()
            step = min(task.left_s / task.rate for task in self._running)
            self.now_s += step
            for task in self._running:
                task.left_s -= step * task.rate
            over = [task for task in self._running if task.left_s <= _EPSILON_S]
            self._running = [task for task in self._running if task.left_s > _EPSILON_S]
            for task in over:
                task.then()

    def _share(self) -> None:
        """Set the speed of every task."""
        left = self._cores
        waiting = sorted(self._running, key=lambda task: task.demand)
        for place, task in enumerate(waiting):
            got = min(task.demand, left / (len(waiting) - place))
            task.rate = got / task.demand if task.demand > 0 else 1.0
            left -= got


class Resource:
    """Does one task at a time, in the order in which tasks were added; for ``name``, see `Event`."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.name = name
        self._clock = clock
        self._waiting: deque[tuple[float, float, str, int, int, Then]] = deque()
        self._is_busy = False

    def add(self, seconds: float, demand: float, label: str, bucket: int, piece: int, then: Then) -> None:
        """Add a task to the queue; see `Event` and `Clock.start`."""
        self._waiting.append((seconds, demand, label, bucket, piece, then))
        self._next()

    def _next(self) -> None:
        if self._is_busy or not self._waiting:
            return
        seconds, demand, label, bucket, piece, then = self._waiting.popleft()
        begun = self._clock.now_s
        self._is_busy = True

        def over() -> None:
            self._is_busy = False
            if seconds > 0:
                self._clock.events.append(Event(self.name, label, bucket, piece, begun, self._clock.now_s))
            then()
            self._next()

        self._clock.start(seconds, demand, over)
