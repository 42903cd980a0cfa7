"""Times several cases in turns, on one rank or on several, so that slow changes of the machine affect all cases
equally.

A *clock* runs a case, and returns a function that returns the duration of the case in seconds. That function is called
at the end of a round, because it waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

Case = Callable[[], object]
Clock = Callable[[Case], Callable[[], float]]


class Spread(NamedTuple):
    """Median, with the 10th and 90th percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: np.ndarray) -> Spread:
        """Returns the median and percentiles of all values."""
        low, median, high = np.quantile(values, (0.1, 0.5, 0.9))
        return cls(float(median), float(low), float(high))


def _timed(now: Callable[[], float], case: Case) -> Callable[[], float]:
    begun = now()
    case()
    elapsed = now() - begun
    return lambda: elapsed


#: Clock that measures the wall-clock time while this thread runs a case.
stopwatch: Clock = partial(_timed, time.perf_counter)
#: Clock that measures this thread's own processor time, for cases that use no other thread.
thread_clock: Clock = partial(_timed, time.thread_time)


class EventClock:
    """A clock of the current CUDA stream, from the first kernel of a case to the end of its last kernel.

    The stream is kept busy until the host has issued the whole case, so that no kernel waits for the host. The
    necessary delay is found during the measurement: if a case was issued too late, it runs again, now and in all later
    rounds with twice the delay, up to `MOST_CYCLES` (about 9 ms).

    Args:
        agreed: function that returns whether a case runs again. The argument is whether this process has issued the
            case too late. If a case has collectives, all ranks have to run it equally often; see `clock_of_ranks`.
    """

    MOST_CYCLES = 1 << 24

    def __init__(self, agreed: Callable[[bool], bool] = bool) -> None:
        self._agreed = agreed
        self._cycles = 1 << 20

    def __call__(self, case: Case) -> Callable[[], float]:
        """Run a case. Returns a function that waits for the case and returns its duration in seconds."""
        while True:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(self._cycles)
            start.record()
            case()
            end.record()
            if not self._agreed(start.query()) or self._cycles >= self.MOST_CYCLES:
                return lambda: _between(start, end)
            self._cycles *= 2


def _between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def clock_of_ranks(device: torch.device) -> Clock:
    """Returns the clock for cases with collectives, which all ranks of the default process group run equally often."""
    return EventClock(partial(_on_any_rank, device)) if device.type == "cuda" else stopwatch


def _on_any_rank(device: torch.device, is_so: bool) -> bool:
    """Returns whether something is so on at least one rank. A collective."""
    return bool(slowest([is_so], device)[0])


def in_turns(
    cases: Mapping[str, Case],
    rounds: int,
    *,
    warmup: int = 2,
    before: Callable[[], object] = lambda: None,
    clock: Clock = stopwatch,
) -> dict[str, np.ndarray]:
    """Time every case in every round. A round runs each case once.

    Args:
        cases: the cases, by name.
        rounds: number of timed rounds.
        warmup: number of rounds before them that are not timed.
        before: function that is called before every run of a case, outside the timed part; for example a barrier.
        clock: the clock.

    Returns:
        For each case, seconds (rounds,).
    """
    seconds = {name: np.empty(rounds) for name in cases}
    for number in range(-warmup, rounds):
        readings = {}
        for name, case in cases.items():
            before()
            readings[name] = clock(case)
        for name, reading in readings.items():
            elapsed = reading()
            if number >= 0:
                seconds[name][number] = elapsed
    return seconds


def slowest(values: Any, device: torch.device | None = None) -> np.ndarray:
    """Returns the element-wise maximum over the ranks of the default process group, fp64. A collective.

    Args:
        values: the numbers of this rank, a sequence or an array of the same shape on all ranks.
        device: this rank's GPU, if the group's backend is NCCL, which cannot send from host memory.
    """
    moved = _sendable(values, device)
    dist.all_reduce(moved, op=dist.ReduceOp.MAX)
    return moved.cpu().numpy()


def of_all_ranks(values: Any, device: torch.device) -> Tensor:
    """Returns the values of all ranks, [ranks, ...], on the host. A collective; see `slowest` for the arguments."""
    mine = _sendable(values, device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone).cpu()


def name_of(device: torch.device) -> str:
    """Returns the name of a GPU; ``"CPU"`` for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _sendable(values: Any, device: torch.device | None) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device if dist.get_backend() == "nccl" else "cpu")
