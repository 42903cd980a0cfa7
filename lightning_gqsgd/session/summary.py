"""A summary of compression in a training, as numbers and as one line: bytes, error, and how long steps waited."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from lightning_gqsgd.errors import counted
from lightning_gqsgd.wire.telemetry import Telemetry

#: Steps whose lengths are kept, at most: the latest ones.
STEPS_KEPT = 256
FP32_BYTES = 4


class _Tick(NamedTuple):
    """The end of a backward pass: seconds of the host's clock, and the telemetry's counters."""

    moment: float
    exposed_s: float
    plain_steps: int


class StepClock:
    """Lengths of the latest steps, and of the parts of them in which backward waited, both in seconds.

    Medians are reported, so that a validation or a checkpoint between two steps does not count.

    Args:
        telemetry: counters of this process, which are only read.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._latest: _Tick | None = None
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS_KEPT)

    def tick(self) -> None:
        """Note that a backward pass has filled its last bucket."""
        now = _Tick(time.perf_counter(), self._telemetry.exposed_s, self._telemetry.plain_steps)
        before = self._latest
        self._latest = now
        # Between these two, plain DDP may have carried steps, which nothing measures.
        if before is not None and now.plain_steps == before.plain_steps:
            self._steps.append((now.moment - before.moment, now.exposed_s - before.exposed_s))

    @property
    def step_s(self) -> float:
        """Median seconds from one backward pass to the next; NaN before the second."""
        return statistics.median(length for length, _ in self._steps) if self._steps else math.nan

    @property
    def exposed_s(self) -> float:
        """Median seconds of a step in which backward waited for gradients; NaN before the second step."""
        return statistics.median(waited for _, waited in self._steps) if self._steps else math.nan


def summary(telemetry: Telemetry, clock: StepClock, ranks: int) -> dict[str, float]:
    """Returns what compression did since the hook was made, as this rank has counted it. Waits for a GPU.

    Args:
        telemetry: counters of this process.
        clock: lengths of its steps.
        ranks: number of ranks.

    Returns:
        Numbers by name; NaN stands for what nothing has measured:

        * ``steps``: averaged steps.
        * ``bytes_sent``: bytes of gradients that this rank has sent.
        * ``fp32_bytes``: bytes that this rank would have sent in ring all-reduces of the same gradients in fp32.
        * ``compression_ratio``: ``fp32_bytes`` over ``bytes_sent``.
        * ``bits_per_coordinate``: of one rank's messages, with scales, padding and what travels uncompressed.
        * ``mean_rel_l2``: relative L2 error of the gradients' mean, over all sampled coordinates.
        * ``step_s``, ``exposed_s``: median seconds of a step, and of its wait for gradients, of the latest steps.
        * ``waiting_share``: ``exposed_s`` over ``step_s``, 0 to 1.
    """
    totals = telemetry.totals()
    numel = sum(bucket.numel for bucket in telemetry.buckets.values())
    fp32_bytes = 2 * (ranks - 1) / ranks * FP32_BYTES * numel
    sent = totals["bytes_sent"]
    error = telemetry.error
    reference = telemetry.reference
    return {
        "steps": totals["steps"],
        "bytes_sent": sent,
        "fp32_bytes": fp32_bytes,
        "compression_ratio": fp32_bytes / sent if sent else math.nan,
        "bits_per_coordinate": totals["bits_per_coordinate"],
        "mean_rel_l2": math.sqrt(error / reference) if reference > 0 else math.nan,
        "step_s": clock.step_s,
        "exposed_s": clock.exposed_s,
        "waiting_share": min(1.0, clock.exposed_s / clock.step_s) if clock.step_s > 0 else math.nan,
    }


def in_words(values: Mapping[str, float]) -> str:
    """The line that is said at the end of a training.

    Args:
        values: what `summary` gives.
    """
    steps = counted(int(values["steps"]), "step")
    if not values["bytes_sent"]:
        return f"gqsgd: {steps}, in which this process has sent no gradients"
    sent = values["bytes_sent"] / 1e6
    whole = values["fp32_bytes"] / 1e6
    ratio = values["compression_ratio"]
    times = f"{ratio:.1f} times less" if ratio >= 1 else f"{1 / ratio:.1f} times more"
    parts = [
        f"gqsgd: in {steps}, rank 0 sent {sent:,.1f} MB of gradients instead of {whole:,.1f} MB in fp32, {times} "
        f"({values['bits_per_coordinate']:.2f} bits per coordinate)"
    ]
    if not math.isnan(values["mean_rel_l2"]):
        parts.append(f"the relative error of the mean gradient was {values['mean_rel_l2']:.2%}".replace("%", " %"))
    if not math.isnan(values["waiting_share"]):
        waited = f"{values['waiting_share']:.0%}".replace("%", " %")
        parts.append(f"a step took {1e3 * values['step_s']:.1f} ms, and waited for gradients in {waited} of it")
    return "; ".join(parts)
