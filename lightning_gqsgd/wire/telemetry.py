"""Counters of compression: bytes sent, seconds, and the error measured on samples.

Nothing here waits for a GPU during a step. Numbers that a GPU computes are added up on the GPU, and copied to the host
when they are read.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast

from lightning_gqsgd.kernels.protocol import Count
from lightning_gqsgd.reducers.base import Exchange, Steps

#: Coordinates per piece whose exact mean is computed on sampling steps, roughly.
SAMPLE_NUMEL = 4096
#: Consecutive coordinates of a sample. Several runs of them are spread over a piece, which may have several layers.
SAMPLE_RUN = 64
#: Distance of two runs, as a part of the distance at which they would have `SAMPLE_NUMEL` coordinates. It is the golden
#: ratio, and not a simple fraction, so that runs do not have the same columns of all rows of a matrix.
SAMPLE_SPREAD = 0.618

#: Unfinished measurements on a GPU that are kept, at most; older ones are dropped. Under FSDP2, each module has up to
#: three in a step, and the host may be more than a step ahead of the GPU.
MAX_MEASURING = 4096

#: Tensors that a sum keeps before it adds them up.
MOST_TERMS = 64

#: Steps whose lengths are kept, at most: the latest ones.
STEPS_KEPT = 256

#: A point in time: seconds of the host's clock, or a timing event on a GPU.
Moment = float | torch.cuda.Event


def moment(device: torch.device) -> Moment:
    """Returns the current time; on a GPU, the time when the current stream reaches this point."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def span(name: str) -> AbstractContextManager[object]:
    """Returns a context whose work has a name in traces of torch.profiler. Without a profiler, it takes less than a
    microsecond."""
    return _RecordFunctionFast(f"gqsgd: {name}")


def wait_for_stream(stream: torch.cuda.Stream | None, tensors: Sequence[Tensor]) -> None:
    """Make the current stream wait for the stream that computes some tensors. None means that they are on the CPU."""
    if stream is None:
        return
    now = torch.cuda.current_stream(tensors[0].device)
    if now != stream:
        now.wait_stream(stream)
        for tensor in tensors:
            tensor.record_stream(now)


class Tally:
    """A sum of numbers and of tensors of one shape, on the tensors' device.

    Each stream has its own terms, so that no stream waits for another before the sum is read. Terms are added up only
    once there are many, because an addition is a kernel launch, which takes longer than keeping a term.
    """

    def __init__(self) -> None:
        self._number: float = 0
        self._terms: dict[torch.cuda.Stream | None, list[Tensor]] = {}

    def add(self, value: float | Tensor) -> None:
        """Add a number, or a tensor that the current stream computes."""
        if not isinstance(value, Tensor):
            self._number += value
            return
        stream = torch.cuda.current_stream(value.device) if value.is_cuda else None
        terms = self._terms.setdefault(stream, [])
        terms.append(value)
        if len(terms) >= MOST_TERMS:
            self._terms[stream] = [torch.stack(terms).sum(0)]

    def total(self) -> float | Tensor:
        """Returns the sum: a tensor if a tensor was added. The current stream waits for the others."""
        total: float | Tensor = self._number
        for stream, terms in list(self._terms.items()):
            kept = list(terms)
            wait_for_stream(stream, kept)
            total = sum(kept, total)
        return total


@dataclass
class BucketCounters:
    """Totals of one bucket index since the start.

    On a GPU, ``encode_s``, ``decode_s`` and ``latency_s`` are the times in which the host issues the work, not the
    times in which the GPU does it.

    Attributes:
        calls: number of times that the bucket was reduced.
        numel: coordinates reduced.
        message_bytes: bytes of one rank's messages (see `reducers.base.Reducer`).
        bytes_sent: bytes sent by this rank.
        encode_s: seconds in stages before the last exchange.
        decode_s: seconds in stages after the last exchange.
        latency_s: seconds from the hook's call to the result.
    """

    calls: int = 0
    numel: int = 0
    message_bytes: int = 0
    bytes_sent: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    latency_s: float = 0.0
    _nonfinite: Tally = field(default_factory=Tally, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add_sent(self, bytes_sent: int, message_bytes: int) -> None:
        """Count the bytes of a piece. Several threads may call this at once."""
        with self._lock:
            self.bytes_sent += bytes_sent
            self.message_bytes += message_bytes

    def add_nonfinite(self, blocks: Count) -> None:
        """Count blocks whose mean is NaN or infinite."""
        self._nonfinite.add(blocks)

    @property
    def nonfinite_blocks(self) -> int:
        """Blocks whose mean is NaN or infinite. Waits for a GPU."""
        return int(self._nonfinite.total())


@dataclass
class Telemetry:
    """Counters of one process. All of them are totals since the start.

    Reading ``error``, ``reference``, ``last_rel_l2`` or `totals` waits for a GPU; nothing else does.

    Attributes:
        steps: number of reduced steps, including those that plain DDP has reduced.
        plain_steps: number of steps that plain DDP has reduced, see `adaptive.plain`.
        wait_s: seconds in which pieces were on the wire and the processor had nothing to do for them.
        exposed_s: seconds from the last bucket's arrival to the last result, which is how long the backward pass
            waited. On a GPU, this counts the steps that the GPU has finished. Under FSDP2, this counts all collectives;
            on a GPU, they run on FSDP's own streams, and the computation may hide them.
        buckets: counters by bucket index (buckets are rebuilt once after the first step).
        choice: if bits are chosen during the training, the values of the latest step from
            `adaptive.steering.Steering.choice`: ``bits``; ``trying``, 1 while candidates or plain DDP are tried and 0
            otherwise; ``plain``, 1 while plain DDP reduces the gradients and 0 otherwise; ``noise_scale`` and
            ``predicted_step_s``, if they are known. Otherwise empty.
    """

    steps: int = 0
    plain_steps: int = 0
    wait_s: float = 0.0
    exposed_s: float = 0.0
    buckets: dict[int, BucketCounters] = field(default_factory=dict)
    choice: dict[str, float] = field(default_factory=dict)
    # For the ends of the latest backward passes: the host's clock, ``exposed_s`` and ``plain_steps``.
    _ends: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT + 1), repr=False)
    _measuring: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = field(
        default_factory=lambda: deque(maxlen=MAX_MEASURING), repr=False
    )
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)  # readers collect, too
    # Sums of squares, [2]: of (estimate - mean) and of the mean.
    _of_step: Tally = field(default_factory=Tally, repr=False)
    _of_last: Tally = field(default_factory=Tally, repr=False)  # one term: the latest sampled step
    _of_all: Tally = field(default_factory=Tally, repr=False)

    def bucket(self, index: int) -> BucketCounters:
        """Returns the counters of a bucket, which are created on first use."""
        counters = self.buckets.get(index)
        return self.buckets.setdefault(index, BucketCounters()) if counters is None else counters

    def add_sample(self, error: Tensor, reference: Tensor) -> None:
        """Add the sums of squares of one sample, 0-d tensors; a non-finite sample is ignored."""
        sums = torch.stack([error, reference]).double()
        sums = torch.where(sums.isfinite().all(), sums, 0.0)
        with self._lock:  # several threads may add samples at once
            self._of_step.add(sums)

    def expose(self, since: Moment, until: Moment) -> None:
        """Count time in which the backward pass waited for a result. Two moments on a GPU are counted once both have
        passed."""
        if isinstance(since, float) and isinstance(until, float):
            self.exposed_s += until - since
        elif not isinstance(since, float) and not isinstance(until, float):
            self._measuring.append((since, until))
        self.collect()

    def collect(self) -> None:
        """Count the measurements that a GPU has finished, without waiting for it."""
        with self._lock:
            while self._measuring and self._measuring[0][1].query():
                since, until = self._measuring.popleft()
                self.exposed_s += since.elapsed_time(until) / 1e3

    def end_backward(self) -> None:
        """Note that a backward pass has filled its last bucket."""
        self._ends.append((time.perf_counter(), self.exposed_s, self.plain_steps))

    def median_step(self) -> tuple[float, float]:
        """Returns the median duration of the latest steps and the median wait for gradients in them, in seconds; NaN
        before the second step.

        A median ignores a validation or a checkpoint between two steps. Intervals that contain steps of plain DDP are
        left out, because nothing measures those steps.
        """
        pairs = [(before, now) for before, now in pairwise(self._ends) if before[2] == now[2]]
        if not pairs:
            return math.nan, math.nan
        lengths = [now[0] - before[0] for before, now in pairs]
        return statistics.median(lengths), statistics.median(now[1] - before[1] for before, now in pairs)

    def end_step(self) -> None:
        """Close a step."""
        self.steps += 1
        self.collect()
        sums = self._of_step.total()
        self._of_step = Tally()
        if isinstance(sums, Tensor):  # it was sampled
            last = Tally()
            last.add(torch.where(sums[1] > 0, sums, self._of_last.total()))
            self._of_last = last
            self._of_all.add(torch.where(sums[1] > 0, sums, 0.0))

    def add_plain_step(self, numel: int, message_bytes: int, bytes_sent: int) -> None:
        """Count a step that plain DDP has reduced. Its waiting time is unknown.

        Args:
            numel: coordinates of all gradients.
            message_bytes: bytes of all gradients.
            bytes_sent: bytes that a ring all-reduce of them makes this rank send.
        """
        counters = self.bucket(0)
        counters.calls += 1
        counters.numel += numel
        counters.add_sent(bytes_sent, message_bytes)
        self.plain_steps += 1
        self.steps += 1

    @property
    def error(self) -> float:
        """Sum of squares of (estimate - mean) over all sampled coordinates."""
        return _sums(self._of_all)[0]

    @property
    def reference(self) -> float:
        """Sum of squares of the mean over all sampled coordinates."""
        return _sums(self._of_all)[1]

    @property
    def last_rel_l2(self) -> float:
        """Relative L2 error of the latest sampled step; NaN before the first."""
        error, reference = _sums(self._of_last)
        return math.sqrt(error / reference) if reference > 0 else math.nan

    def totals(self) -> dict[str, float]:
        """Returns all counters as plain numbers: totals over buckets, bits per coordinate, relative L2 error."""
        self.collect()
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
            "plain_steps": self.plain_steps,
        }


def _sums(tally: Tally) -> list[float]:
    """Returns the two sums of squares in a tally; zeros if it is empty."""
    total = tally.total()
    return total.tolist() if isinstance(total, Tensor) else [0.0, 0.0]


class Meter:
    """Reads counters for a logger, starting from the counts at its creation.

    ``bytes_sent`` (by this rank) and ``nonfinite_blocks`` are totals since the start. ``encode_s``, ``wait_s``,
    ``decode_s`` and ``exposed_s`` are means since the last reading, in seconds per step. They do not count steps that
    plain DDP has reduced, because the times of those steps are not known, and they are missing if there are no other
    steps. ``bits_per_coordinate`` is a mean since the start. ``rel_l2`` is the error of the latest sampled step, and
    NaN before the first one. If bits are chosen during the training, there are also the entries of `Telemetry.choice`,
    for the latest step.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._before = telemetry.totals()

    def read(self) -> dict[str, float]:
        """Returns the values by name, prefixed with ``gqsgd/``; empty if no step was reduced since the last reading."""
        before = self._before
        totals = self._telemetry.totals()
        steps = totals["steps"] - before["steps"]
        if not steps:
            return {}
        self._before = totals
        values = {name: totals[name] for name in ("bytes_sent", "nonfinite_blocks", "bits_per_coordinate", "rel_l2")}
        timed = steps - (totals["plain_steps"] - before["plain_steps"])
        for name in ("encode_s", "wait_s", "decode_s", "exposed_s") if timed else ():
            values[name] = (totals[name] - before[name]) / timed
        values |= self._telemetry.choice
        return {f"gqsgd/{name}": float(value) for name, value in values.items()}


def sampled(steps: Steps, piece: Tensor, result: slice, ranks: int, telemetry: Telemetry) -> Steps:
    """Returns the same steps, which also measure the error of some coordinates against their exact mean.

    Args:
        steps: the steps of a piece.
        piece: a view of the coordinates that the steps change, [parts, coordinates of a part].
        result: the parts in which the steps leave the mean.
        ranks: number of ranks.
        telemetry: the counters that get the error.
    """
    sample = sample_of(piece)
    weight = piece.numel() / sample.numel()
    exact = (sample.to(torch.promote_types(sample.dtype, torch.float32)) / ranks).contiguous()
    first: Sequence[Exchange] = next(steps)
    yield (*first, Exchange.in_place("sum", exact))
    bad = yield from steps
    mean = exact[result]
    error = (sample[result].to(mean.dtype) - mean).square().sum()
    telemetry.add_sample(weight * error, weight * mean.square().sum())
    return bad


def sample_of(piece: Tensor) -> Tensor:
    """Returns a view of the coordinates to sample of a piece, [parts, coordinates of a part]: runs that are spread over
    each part, [parts, runs, coordinates of a run]."""
    parts, numel = piece.shape
    most = max(1, SAMPLE_NUMEL // parts)
    if numel <= most:
        return piece[:, None]
    size = min(SAMPLE_RUN, most)
    distance = int(SAMPLE_SPREAD * numel * size / most) | 1  # odd, because rows often have an even length
    return piece.unfold(1, size, max(size, distance))
