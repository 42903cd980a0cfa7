"""What compression did: bytes, seconds, and the error measured on samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_gqsgd.reducers.base import Exchange, Steps

#: Coordinates per piece whose exact mean is computed on sampling steps.
SAMPLE_NUMEL = 4096


@dataclass
class BucketCounters:
    """Totals of one bucket index since the start.

    Attributes:
        calls: number of times that the bucket was reduced.
        numel: coordinates reduced.
        message_bytes: bytes of one rank's messages (see `reducers.base.Reducer`).
        bytes_sent: bytes sent by this rank.
        encode_s: seconds in stages before the last exchange.
        decode_s: seconds after it.
        latency_s: seconds from the hook's call to the result.
        nonfinite_blocks: blocks whose mean is NaN or infinite.
    """

    calls: int = 0
    numel: int = 0
    message_bytes: int = 0
    bytes_sent: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    latency_s: float = 0.0
    nonfinite_blocks: int = 0


@dataclass
class Telemetry:
    """Counters of one process; all are totals since the start.

    Attributes:
        steps: number of reduced steps.
        wait_s: seconds in which pieces were on the wire and the processor had nothing to do for them.
        exposed_s: seconds from the last bucket's arrival to the last result: what backward waited for.
        buckets: counters by bucket index (buckets are rebuilt once after the first step).
        error, reference: sums of squares of (estimate - mean) and of the mean over all sampled coordinates.
        last_rel_l2: relative L2 error of the latest sampled step; NaN before the first.
    """

    steps: int = 0
    wait_s: float = 0.0
    exposed_s: float = 0.0
    buckets: dict[int, BucketCounters] = field(default_factory=dict)
    error: float = 0.0
    reference: float = 0.0
    last_rel_l2: float = math.nan
    _step_error: float = 0.0
    _step_reference: float = 0.0

    def bucket(self, index: int) -> BucketCounters:
        """Counters of a bucket, made on first use."""
        return self.buckets.setdefault(index, BucketCounters())

    def add_sample(self, error: float, reference: float) -> None:
        """Add sums of squares over one sample; a non-finite sample is left out."""
        if math.isfinite(error) and math.isfinite(reference):
            self._step_error += error
            self._step_reference += reference

    def end_step(self) -> None:
        """Close a step."""
        self.steps += 1
        if self._step_reference > 0:
            self.last_rel_l2 = math.sqrt(self._step_error / self._step_reference)
            self.error += self._step_error
            self.reference += self._step_reference
        self._step_error = self._step_reference = 0.0

    def totals(self) -> dict[str, float]:
        """All counters as plain numbers: totals over buckets, bits per coordinate, relative L2 error."""
        buckets = list(self.buckets.values())
        numel = sum(bucket.numel for bucket in buckets)
        totals = {
            name: sum(getattr(bucket, name) for bucket in buckets)
            for name in ("bytes_sent", "encode_s", "decode_s", "nonfinite_blocks")
        }
        message_bytes = sum(bucket.message_bytes for bucket in buckets)
        return {
            **totals,
            "bits_per_coordinate": 8 * message_bytes / numel if numel else math.nan,
            "wait_s": self.wait_s,
            "exposed_s": self.exposed_s,
            "rel_l2": self.last_rel_l2,
            "steps": self.steps,
        }


class Meter:
    """Reads counters for a logger, from here on.

    Totals since the start: ``bytes_sent`` (by this rank), ``nonfinite_blocks``. Means since the last reading:
    ``encode_s``, ``wait_s``, ``decode_s``, ``exposed_s`` (seconds per step). Mean since the start:
    ``bits_per_coordinate``. Of the latest sampled step: ``rel_l2``, NaN before the first.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._before = telemetry.totals()

    def read(self) -> dict[str, float]:
        """The values by name, with ``gqsgd/`` in front; none if no step was reduced since the last reading."""
        before, totals = self._before, self._telemetry.totals()
        steps = totals["steps"] - before["steps"]
        if not steps:
            return {}
        self._before = totals
        values = {name: totals[name] for name in ("bytes_sent", "nonfinite_blocks", "bits_per_coordinate", "rel_l2")}
        for name in ("encode_s", "wait_s", "decode_s", "exposed_s"):
            values[name] = (totals[name] - before[name]) / steps
        return {f"gqsgd/{name}": float(value) for name, value in values.items()}


def sampled(steps: Steps, x: Tensor, sample: Sequence[slice], result: slice, ranks: int, telemetry: Telemetry) -> Steps:
    """The same steps, which also measure the error of some coordinates of ``x`` against their exact mean.

    ``sample``: where they are, all of one length; ``result``: in which of these places the steps leave the mean.
    """
    exact = torch.stack([x[part] for part in sample]).to(torch.promote_types(x.dtype, torch.float32)) / ranks
    first: Sequence[Exchange] = next(steps)
    yield (*first, Exchange.in_place("sum", exact))
    bad = yield from steps
    mean = exact[result]
    estimate = torch.stack([x[part] for part in sample[result]]).to(mean.dtype)
    telemetry.add_sample(float((estimate - mean).square().sum()), float(mean.square().sum()))
    return bad
