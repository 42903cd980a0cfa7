"""Runs the steps of reducers: over Gloo on one thread that puts them in order, over NCCL on streams of our own.

Gloo: a collective that is started from the callback of another aborts the process or mixes up ranks, because callbacks
run on several threads in no order. Here one thread per process starts every collective, and callbacks only wake it.
Pieces are started in the order in which they were submitted, stage by stage, so each group sees the same order on every
rank. Within that order, the thread does whatever is ready: the encoding, the exchange and the decoding of different
pieces overlap.

NCCL: the thread that hands a bucket over issues all its work at once and waits for none; no collective is issued from a
callback. CUDA tensors over Gloo take the thread, which issues their work on a stream of its own (see `staging`).

A future of a CUDA tensor completes on the host once all work is issued. Code that waits for the future makes the
current stream wait for the work.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from typing import Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.reducers.base import Steps
from lightning_gqsgd.telemetry import BucketCounters, Moment, Telemetry, moment
from lightning_gqsgd.transport.communicator import Communicator

logger = logging.getLogger(__name__)

#: Pieces under way at once, per communicator: enough to fill the wire, few enough to bound scratch memory.
MAX_UNDER_WAY = 8

#: How long to wait for the thread when closing; it never waits for the network itself.
CLOSE_TIMEOUT_S = 60.0

#: What starts the steps of a piece.
Start = Callable[[], Steps]


@dataclass(eq=False)
class Job:
    """A flat tensor to be replaced by its mean over ranks.

    Attributes:
        tensor: the tensor; after an error it is all NaN, unless ``kept_if_refused`` says otherwise.
        pieces: for each piece, a function that starts its steps.
        name: for messages.
        counters: of the bucket; time is added there.
        telemetry: of the process; time is added there.
        last_of_step: True for the last bucket of a step.
        preface: a function that starts the steps of an agreement, without which the job does not complete; None: there
            is nothing to agree on.
        preface_blocks: whether the agreement is over before the first piece starts.
        watch: called with the tensor once the mean is there, before the job is complete; None: nothing.
        kept_if_refused: whether the tensor stays as it is where ranks do not agree, and nothing has been sent.
        error: the error, once complete.
    """

    tensor: Tensor
    pieces: Sequence[Start]
    name: str
    counters: BucketCounters
    telemetry: Telemetry
    last_of_step: bool
    preface: Start | None = None
    preface_blocks: bool = True
    watch: Callable[[Tensor], None] | None = None
    kept_if_refused: bool = False

    def __post_init__(self) -> None:
        devices: list[int | str | torch.device] | None = [self.tensor.device] if self.tensor.is_cuda else None
        self._done: torch.futures.Future[Tensor | None] = torch.futures.Future(devices=devices)
        self.error: BaseException | None = None
        self._submitted = time.perf_counter()
        self._arrived = moment(self.tensor.device)
        self._stream: torch.cuda.Stream | None = None
        self.left = len(self.pieces) + (self.preface is not None)

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

    def wait(self) -> Tensor:
        """The tensor; waits for it (on a GPU, the current stream does).

        Raises:
            ConfigError: the ranks do not agree.
            CollectiveError: a collective failed; the tensor is all NaN.
        """
        try:
            self.future.wait()
        except Exception:
            if self._stream is not None:  # a future with an error lets no stream wait
                torch.cuda.current_stream(self.tensor.device).wait_stream(self._stream)
            if self.error is None:
                raise
            raise self.error from None
        return self.tensor

    def context(self) -> ExitStack:
        """Where the job's work is to be done: on its stream; and in inference mode, if the tensor was made there,
        because PyTorch lets nobody else change such tensors."""
        context = ExitStack()
        if self.tensor.is_inference():
            context.enter_context(torch.inference_mode())
        if self._stream is not None:
            context.enter_context(torch.cuda.stream(self._stream))
        return context

    def finish(self, error: BaseException | None = None) -> None:
        """Complete the future."""
        self.error = error
        try:
            with self.context():
                if error is None and self.watch is not None:
                    self.watch(self.tensor)
                elif error is not None and not (self.kept_if_refused and isinstance(error, ConfigError)):
                    self.tensor.fill_(torch.nan)  # never a mixture of averaged and local gradients
                self._count(moment(self.tensor.device))
        except Exception as cause:  # e.g. the GPU has failed: then a future cannot take a tensor on it any more
            self.error = error or cause
            logger.critical("gqsgd: %s: the result on %s cannot be written: %s", self.name, self.tensor.device, cause)
            self._done.set_result(None)
            return
        with self.context():
            self._done.set_result(self.tensor)  # on a GPU, complete when the job's stream has come so far

    def _count(self, now: Moment) -> None:
        self.counters.latency_s += time.perf_counter() - self._submitted
        if self.last_of_step:
            self.telemetry.expose(self._arrived, now)
            self.telemetry.end_step()

    def _result(self, _: object) -> Tensor:
        if self.error is not None:
            raise self.error
        return self.tensor


class _Piece:
    """One piece of a job under way.

    Attributes:
        job: the job that it belongs to.
        stage: of the next exchange.
        is_preface: whether it is the job's agreement.
        blocks: whether the piece is the agreement, and the job's other pieces wait for it.
        works: the collectives of the latest stage.
        waiting_for: how many of them are still under way.
    """

    def __init__(self, job: Job, start: Start, stage: int) -> None:
        self.job = job
        self.stage = stage
        self.is_preface = stage == 0
        self.blocks = self.is_preface and job.preface_blocks
        self.works: list[dist.Work] = []
        self.waiting_for = 0
        self._start = start
        self._steps: Steps | None = None

    def resume(self, communicator: Communicator) -> bool:
        """Go on to the next exchange and start it; False if there is none and the piece is through."""
        with self.job.context():
            return self._resume(communicator)

    def _resume(self, communicator: Communicator) -> bool:
        begun = time.perf_counter()
        for work in self.works:
            work.wait()  # over Gloo, the work is complete, and this raises its error; over NCCL, the stream waits
        try:
            self._steps = self._steps or self._start()
            exchanges = next(self._steps)
        except StopIteration as end:
            self.job.counters.decode_s += time.perf_counter() - begun
            self.job.counters.add_nonfinite(end.value)
            return False
        self.job.counters.encode_s += time.perf_counter() - begun
        # Empty messages need no collective; where parts are unequal, all ranks take part if one of them sends.
        needed = [exchange for exchange in exchanges if exchange.input.numel() or exchange.splits]
        self.works = [communicator.start(exchange, self.stage) for exchange in needed]
        self.waiting_for = len(self.works)
        self.stage += 1
        return True


def _pieces_of(job: Job) -> list[_Piece]:
    """The preface, at stage 0, and the pieces, from stage 1 on."""
    preface = [] if job.preface is None else [_Piece(job, job.preface, 0)]
    return [*preface, *(_Piece(job, start, 1) for start in job.pieces)]


class Runner(Protocol):
    """What runs jobs."""

    def submit(self, communicator: Communicator, job: Job) -> None:
        """Start a job; jobs of a communicator are submitted in the same order on every rank."""
        ...

    def error_of(self, communicator: Communicator) -> BaseException | None:
        """The error after which nothing can be run on a communicator any more: ranks do not know where others are."""
        ...

    def close(self, communicator: Communicator) -> None:
        """Fail what is under way on a communicator, and forget it."""
        ...


class StreamRunner:
    """Runs jobs at once in the caller's thread: on streams of its own on a GPU, where the host waits for nothing.

    Jobs take the streams in turns, so that a bucket is encoded while its predecessor is on the wire or decoded. Pieces
    of a job take turns for the same reason: `MAX_UNDER_WAY` of them take a stage before any takes the next. On the CPU
    (for tests) the runner waits for every exchange.

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
        waiting = deque(_pieces_of(job))
        under_way: deque[_Piece] = deque()
        error = None
        try:
            if job.preface is not None:
                under_way.append(waiting.popleft())
                while under_way[0].resume(communicator):
                    pass
                under_way.clear()
            while waiting or under_way:
                # As many as may be under way, so that the scratch memory of a large job is bounded.
                while waiting and len(under_way) < MAX_UNDER_WAY:
                    under_way.append(waiting.popleft())
                if under_way[0].resume(communicator):
                    under_way.rotate(-1)
                else:
                    under_way.popleft()
        except Exception as cause:  # reported through the future
            if not (under_way[0].blocks and isinstance(cause, ConfigError)):
                self._broken[communicator] = cause  # the order of collectives is lost
            error = communicator.describe(cause, f"{job.name}, stage {under_way[0].stage},")
        job.finish(error)

    def error_of(self, communicator: Communicator) -> BaseException | None:
        """See `Runner.error_of`."""
        return self._broken.get(communicator)

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

    def error_of(self, communicator: Communicator) -> BaseException | None:
        """See `Runner.error_of`."""
        return self._broken.get(communicator)

    def close(self, communicator: Communicator) -> None:
        """See `Runner.close`."""
        closed = threading.Event()

        def forget() -> None:
            self._fail(communicator, RuntimeError("it was closed"), None)
            del self._broken[communicator]
            closed.set()

        self._events.put(forget)
        if threading.current_thread() is self._thread:
            return  # this thread has collected a model as garbage, and cannot wait for itself
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
            try:
                event()
            except Exception as error:  # a defect; without this thread, everybody would wait for ever
                logger.exception("gqsgd: the sequencing thread failed")
                for communicator in list(self._lanes):
                    self._fail(communicator, error, None)

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
        while lane and (piece := next(ready(lane), None)):
            try:
                if piece.resume(communicator):
                    for work in piece.works:
                        work.get_future().add_done_callback(self._waker(communicator, piece))
                else:
                    lane.remove(piece)
                    piece.job.left -= 1
                    if not piece.job.left:
                        piece.job.finish()
            except Exception as error:
                if piece.blocks and isinstance(error, ConfigError):
                    # All ranks have heard the same, and none has begun with the job: the others can go on.
                    self._lanes[communicator] = lane = deque(other for other in lane if other.job is not piece.job)
                    piece.job.finish(error)
                    continue
                self._fail(communicator, error, piece)  # reported through the futures of all that is under way
                return

    def _waker(self, communicator: Communicator, piece: _Piece) -> Callable[[object], None]:
        """A callback for a backend's thread: it only wakes ours."""

        def arrived() -> None:
            piece.waiting_for -= 1
            if not piece.waiting_for:
                self._advance(communicator)

        return lambda _: self._events.put(arrived)

    def _fail(self, communicator: Communicator, error: BaseException, failed: _Piece | None) -> None:
        """Fail all that is under way on a communicator, and all that comes after."""
        self._broken[communicator] = error
        for job in dict.fromkeys(piece.job for piece in self._lanes.pop(communicator, ())):
            where = f"{job.name}, stage {failed.stage}," if failed and failed.job is job else f"{job.name}, behind it,"
            job.finish(communicator.describe(error, where))


class Underway(Protocol):
    """A piece, as far as its turn is concerned; see `_Piece`."""

    stage: int
    waiting_for: int
    is_preface: bool
    blocks: bool


P = TypeVar("P", bound=Underway)


def ready(lane: deque[P]) -> Iterator[P]:
    """Pieces whose exchanges are through and whose predecessor is a stage ahead, oldest first."""
    ahead: P | None = None
    for number, piece in enumerate(lane):
        if number == MAX_UNDER_WAY:
            return
        waits_for_nobody = piece.is_preface and not piece.blocks
        if not piece.waiting_for and (waits_for_nobody or ahead is None or ahead.stage > piece.stage):
            yield piece
        if not waits_for_nobody:  # nor does anybody wait for it
            ahead = piece


_shared: Sequencer | None = None
_users = 0
_lock = threading.RLock()  # a collection of garbage within `runner_for` may call `release`


def runner_for(communicator: Communicator, streams: int = 2) -> Runner:
    """What runs the jobs of a communicator; give it back with `release`.

    Args:
        communicator: over Gloo, the process's thread runs its jobs.
        streams: over NCCL, number of streams; 1 where other communicators use the runner, too, because collectives of
            two that run at once might wait for each other for ever.
    """
    global _shared, _users
    if communicator.backend == "nccl":
        return StreamRunner([torch.cuda.Stream(communicator.device) for _ in range(streams)])
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
    """Threads do not survive a fork, and a lock may have been held by one of them."""
    global _shared, _users, _lock
    _shared, _users, _lock = None, 0, threading.RLock()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget_after_fork)
