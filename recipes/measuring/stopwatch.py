"""Time on the device that trains."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Marks in time, and the seconds between them: of the processor's clock on CPU, of stream events on CUDA.

    A mark costs microseconds and never waits. On CUDA, `seconds` waits until the device has passed the later mark.

    Args:
        device: the device that trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        """This moment; on CUDA, the moment at which the current stream gets here."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks."""
        if not self._cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
