"""Times of several cases in turns, so that slow changes of the machine meet all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np


class Spread(NamedTuple):
    """Median with the 10th and 90th percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: np.ndarray) -> Spread:
        """Of all values."""
        low, median, high = np.quantile(values, (0.1, 0.5, 0.9))
        return cls(float(median), float(low), float(high))


def in_turns(
    cases: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 2,
    before: Callable[[], object] = lambda: None,
) -> dict[str, np.ndarray]:
    """Seconds of every case in every round; a round runs each case once.

    Args:
        cases: what to time, by name.
        rounds: number of timed rounds.
        warmup: rounds before them that are not timed.
        before: called before every run of a case, outside its time; a barrier, say.
    """
    seconds = {name: np.empty(rounds) for name in cases}
    for number in range(-warmup, rounds):
        for name, case in cases.items():
            before()
            begun = time.perf_counter()
            case()
            elapsed = time.perf_counter() - begun
            if number >= 0:
                seconds[name][number] = elapsed
    return seconds


def ratio(seconds: Mapping[str, np.ndarray], name: str, to: str) -> float:
    """Median over rounds of the ratio of two cases of the same round."""
    return float(np.median(seconds[name] / seconds[to]))
