"""Runs the steps of reducers: over Gloo on one thread that puts them in order, over NCCL on streams of our own.

Gloo: a collective that is started from the callback of another aborts the process or mixes up ranks, because callbacks
run on several threads in no order. Here one thread per process starts every collective; callbacks only wake it. Pieces
are started in the order in which they were submitted, stage by stage, so each group sees the same order on every rank;
within that, the thread does whatever is ready: encoding, the wire and decoding of different pieces overlap.

NCCL: the thread that hands a bucket over issues all its work at once and waits for none; no collective is issued from a
callback. CUDA tensors over Gloo take the thread, which issues their work on a stream of its own (see `staging`).

A future of a CUDA tensor completes on the host once all work is issued; whoever waits for it lets the current stream
wait for the work.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gqsgd.reducers.base import Steps
from lightning_gqsgd.telemetry import BucketCounters, Moment, Telemetry, moment
from lightning_gqsgd.transport.communicator import Communicator

logger = logging.getLogger(__name__)

#: Pieces under way at once, per communicator: enough to fill the wire, few enough to bound scratch memory.
MAX_UNDER_WAY = 8

#: How long to wait for the thread when closing; it never waits for the network itself.
CLOSE_TIMEOUT_S = 60.0


@dataclass(eq=False)
class Job:
    """A flat tensor to be replaced by its mean over ranks.

    Attributes:
        tensor: the tensor; after an error it is all NaN.
        pieces: for each piece, a function that starts its steps.
        name: for messages.
        counters, telemetry: where time is booked.
        last_of_step: True for the last bucket of a step.
        first_stage: 0 if the first piece begins with an agreement, otherwise 1; the same for all jobs of a
            communicator.
        error: the error, once complete.
    """

    tensor: Tensor
    pieces: Sequence[Callable[[], Steps]]
    name: str
    counters: BucketCounters
    telemetry: Telemetry
    last_of_step: bool
    first_stage: int = 1

    def __post_init__(self) -> None:
        devices: list[int | str | torch.device] | None = [self.tensor.device] if self.tensor.is_cuda else None
        self._done: torch.futures.Future[Tensor | None] = torch.futures.Future(devices=devices)
        self.error: BaseException | None = None
        self._submitted = time.perf_counter()
        self._arrived = moment(self.tensor.device)
        self._stream: torch.cuda.Stream | None = None
        self.left = len(self.pieces)

    @cached_property
    def future(self) -> torch.futures.Future[Tensor]:
        """Completes with the tensor, or with the error."""
        # An error raised in a `then` reaches C++ as an error; `Future.set_exception` would hand it over as a value.
        succeeded = self._done.done() and self.error is None
        return cast("torch.futures.Future[Tensor]", self._done) if succeeded else self._done.then(self._result)

    def take(self, stream: torch.cuda.Stream | None) -> None:
        """Do all work on this stream, behind what the current one had to do when the job was made; None: on the CPU."""
        self._stream = stream
        if stream is not None:
            stream.wait_event(cast("torch.cuda.Event", self._arrived))
            self.tensor.record_stream(stream)

    def join(self) -> None:
        """Let the current stream wait for all work that has been issued; a future with an error does not."""
        if self._stream is not None:
            torch.cuda.current_stream(self.tensor.device).wait_stream(self._stream)

    def on_stream(self) -> AbstractContextManager[object]:
        """Where the job's work is to be issued."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def finish(self, error: BaseException | None = None) -> None:
        """Complete the future."""
        self.error = error
        try:
            with self.on_stream():
                if error is not None:
                    self.tensor.fill_(torch.nan)  # never a mixture of averaged and local gradients
                self._book(moment(self.tensor.device))
        except Exception as cause:  # of a GPU that has failed: a future cannot take a tensor from there any more
            self.error = error or cause
            logger.critical("gqsgd: %s: the GPU has failed: %s", self.name, cause)
            self._done.set_result(None)
            return
        with self.on_stream():
            self._done.set_result(self.tensor)  # on a GPU, complete when the job's stream has come so far

    def _book(self, now: Moment) -> None:
        self.counters.latency_s += time.perf_counter() - self._submitted
        if self.last_of_step:
            self.telemetry.expose(self._arrived, now)
            self.telemetry.end_step()

    def _result(self, _: object) -> Tensor:
        if self.error is not None:
            raise self.error
        return self.tensor


class _Piece:
    """One piece of a job under way."""

    def __init__(self, job: Job, start: Callable[[], Steps], stage: int) -> None:
        self.job = job
        self.stage = stage  # of the next exchange
        self.works: list[dist.Work] = []
        self.waiting_for = 0
        self._start = start
        self._steps: Steps | None = None

    def resume(self, communicator: Communicator) -> bool:
        """Go on to the next exchange and start it; False if there is none and the piece is through."""
        with self.job.on_stream():
            return self._resume(communicator)

    def _resume(self, communicator: Communicator) -> bool:
        begun = time.perf_counter()
        for work in self.works:
            work.wait()  # of Gloo complete already, and raises its error; of NCCL, the stream waits
        try:
            self._steps = self._steps or self._start()
            exchanges = next(self._steps)
        except StopIteration as end:
            self.job.counters.decode_s += time.perf_counter() - begun
            self.job.counters.add_nonfinite(end.value)
            return False
        self.job.counters.encode_s += time.perf_counter() - begun
        # Empty messages need no collective; where parts are unequal, all ranks take part if one of them sends.
        some = [exchange for exchange in exchanges if exchange.input.numel() or exchange.splits]
        self.works = [communicator.start(exchange, self.stage) for exchange in some]
        self.waiting_for = len(self.works)
        self.stage += 1
        return True


def _pieces_of(job: Job) -> list[_Piece]:
    return [_Piece(job, start, 1 if number else job.first_stage) for number, start in enumerate(job.pieces)]


class Runner(Protocol):
    """What runs jobs."""

    def submit(self, communicator: Communicator, job: Job) -> None:
        """Start a job; jobs of a communicator are submitted in the same order on every rank."""
        ...

    def close(self, communicator: Communicator) -> None:
        """Fail what is under way on a communicator, and forget it."""
        ...


class StreamRunner:
    """Runs jobs at once in the caller's thread: on streams of its own on a GPU, where the host waits for nothing.

    Jobs take the streams in turns, so that a bucket is encoded while its predecessor is on the wire or decoded. All
    pieces of a job take one stage before any takes the next, for the same reason. On the CPU (for tests) it waits for
    every exchange.

    Args:
        streams: to issue work on; None stands for the CPU.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream | None]) -> None:
        self._streams = cycle(streams)
        self._broken: dict[Communicator, BaseException] = {}

    def submit(self, communicator: Communicator, job: Job) -> None:
        """See `Runner.submit`."""
        job.take(next(self._streams))
        broken = self._broken.get(communicator)
        if broken is not None:
            job.finish(communicator.describe(broken, f"{job.name}, after an earlier failure,"))
            return
        left = deque(_pieces_of(job))
        error = None
        try:
            if left and left[0].stage == 0:
                left[0].resume(communicator)
            while left:
                if left[0].resume(communicator):
                    left.rotate(-1)
                else:
                    left.popleft()
        except Exception as cause:  # reported through the future; the order of collectives is lost
            self._broken[communicator] = cause
            error = communicator.describe(cause, f"{job.name}, stage {left[0].stage},")
        job.finish(error)

    def close(self, communicator: Communicator) -> None:
        """See `Runner.close`: nothing is under way between calls."""
        self._broken.pop(communicator, None)


class Sequencer:
    """The thread that runs jobs over Gloo; one per process, see `runner_for`."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lanes: dict[Communicator, deque[_Piece]] = {}
        self._broken: dict[Communicator, BaseException] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread = threading.Thread(target=self._run, name="gqsgd-sequencer", daemon=True)
        self._thread.start()

    def submit(self, communicator: Communicator, job: Job) -> None:
        """See `Runner.submit`."""
        self._events.put(lambda: self._add(communicator, job))

    def close(self, communicator: Communicator) -> None:
        """See `Runner.close`."""
        closed = threading.Event()

        def forget() -> None:
            self._fail(communicator, RuntimeError("the hook was closed"), None)
            del self._broken[communicator]
            closed.set()

        self._events.put(forget)
        if threading.current_thread() is self._thread:  # it collected garbage, a model; it cannot wait for itself
            return
        if not closed.wait(CLOSE_TIMEOUT_S):
            raise RuntimeError(f"gqsgd: the sequencing thread did not answer within {CLOSE_TIMEOUT_S:.0f} s")

    def stop(self) -> None:
        """End the thread."""
        self._events.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            begun = time.perf_counter()
            event = self._events.get()
            for lane in self._lanes.values():
                if lane and lane[0].waiting_for:
                    lane[0].job.telemetry.wait_s += time.perf_counter() - begun
            if event is None:
                return
            event()

    def _add(self, communicator: Communicator, job: Job) -> None:
        try:
            job.take(self._stream_of(job.tensor.device))
        except Exception as error:  # of a GPU that has failed
            self._broken.setdefault(communicator, error)
        cause = self._broken.get(communicator)
        if cause is not None:
            job.finish(communicator.describe(cause, f"{job.name}, after an earlier failure,"))
            return
        self._lanes.setdefault(communicator, deque()).extend(_pieces_of(job))
        self._advance(communicator)

    def _stream_of(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type == "cuda" and device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams.get(device)

    def _advance(self, communicator: Communicator) -> None:
        """Resume every piece whose exchanges are through and whose turn it is."""
        lane = self._lanes.get(communicator)
        while lane and (piece := next(_ready(lane), None)):
            try:
                if piece.resume(communicator):
                    for work in piece.works:
                        work.get_future().add_done_callback(self._waker(communicator, piece))
                else:
                    lane.remove(piece)
                    piece.job.left -= 1
                    if not piece.job.left:
                        piece.job.finish()
            except Exception as error:  # reported through the futures of all that is under way
                self._fail(communicator, error, piece)
                return

    def _waker(self, communicator: Communicator, piece: _Piece) -> Callable[[object], None]:
        """A callback for a backend's thread: it only wakes ours."""

        def arrived() -> None:
            piece.waiting_for -= 1
            if not piece.waiting_for:
                self._advance(communicator)

        return lambda _: self._events.put(arrived)

    def _fail(self, communicator: Communicator, error: BaseException, piece: _Piece | None) -> None:
        """Fail all that is under way on a communicator, and all that comes after."""
        self._broken[communicator] = error
        for job in dict.fromkeys(one.job for one in self._lanes.pop(communicator, ())):
            where = f"{job.name}, stage {piece.stage}," if piece and piece.job is job else f"{job.name}, behind it,"
            job.finish(communicator.describe(error, where))


def _ready(lane: deque[_Piece]) -> Iterator[_Piece]:
    """Pieces whose exchanges are through and whose predecessor is a stage ahead, oldest first."""
    ahead: _Piece | None = None
    for number, piece in enumerate(lane):
        if number == MAX_UNDER_WAY:
            return
        if not piece.waiting_for and (ahead is None or ahead.stage > piece.stage):
            yield piece
        ahead = piece


_shared: Sequencer | None = None
_users = 0
_lock = threading.RLock()  # a collection of garbage within `runner_for` may call `release`


def runner_for(*communicators: Communicator) -> Runner:
    """What runs the jobs of communicators on one device; give it back with `release`.

    Over NCCL, on two streams; on one if there are several communicators, so that their collectives never run at once:
    they might wait for each other for ever.
    """
    global _shared, _users
    first = communicators[0]
    if first.backend == "nccl":
        return StreamRunner([torch.cuda.Stream(first.device) for _ in range(1 if len(communicators) > 1 else 2)])
    with _lock:
        _shared = _shared or Sequencer()
        _users += 1
        return _shared


def release(runner: Runner) -> None:
    """Stop the sequencing thread after its last user."""
    global _shared, _users
    with _lock:
        if runner is not _shared:  # no thread of this process: another runner, or one from before a fork
            return
        _users -= 1
        last = None if _users else _shared
        _shared = _shared if _users else None
    if last:
        last.stop()


def _forget_after_fork() -> None:
    """Threads do not survive a fork."""
    global _shared, _users
    _shared, _users = None, 0


os.register_at_fork(after_in_child=_forget_after_fork)
