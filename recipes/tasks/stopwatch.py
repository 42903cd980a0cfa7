"""Time on the device that trains."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Marks in time and the seconds between them: the processor's clock on CPU, events of the current stream on CUDA.

    A mark costs microseconds and never waits; `seconds` waits on CUDA until the device has passed the later mark.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        """This moment; on CUDA, the moment at which the device gets here."""
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
