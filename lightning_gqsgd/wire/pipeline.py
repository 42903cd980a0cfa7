"""Jobs and their runners: over Gloo, one thread that orders all steps; over NCCL, separate streams.

A job replaces a flat tensor by its mean over ranks. It has a future that completes with the mean. Its pieces are the
steps of reducers.

Gloo: if a callback of one collective starts another collective, the process aborts or ranks get mixed up, because
callbacks run on several threads in no fixed order. So one thread per process starts every collective, and callbacks
only wake it. Pieces are started in the order in which they were submitted, stage by stage, so each group sees the same
order on every rank. Within that order, the thread does all work that is ready, so encoding, exchange and decoding of
different pieces overlap.

NCCL: the thread that submits a bucket issues all its work at once and does not wait. No collective is issued from a
callback. For CUDA tensors over Gloo, the sequencing thread issues the work on its own stream (see `staging`).

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import NamedTuple, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.protocol import Count
from lightning_gqsgd.reducers.base import Exchange, Steps
from lightning_gqsgd.wire.communicator import Communicator
from lightning_gqsgd.wire.shared_memory import holds_a_lock
from lightning_gqsgd.wire.staging import make_current
from lightning_gqsgd.wire.telemetry import BucketCounters, Telemetry, moment, span
from lightning_gqsgd.wire.workers import Workers

logger = logging.getLogger(__name__)

#: Pieces under way at once, per communicator: enough to fill the wire, few enough to bound scratch memory.
MAX_UNDER_WAY = 8

#: Number of streams that jobs use in turns over NCCL.
STREAMS = 2
#: Pieces under way at once on one stream of a GPU: one is encoded or decoded while the other is sent. More pieces would
#: only take more memory, see `communicator.NCCL_PIECE_NUMEL`.
MAX_ON_STREAM = 2
#: Priority of our streams: their kernels run before those of the backward pass, which has priority 0. A GPU runs lower
#: numbers first.
HIGH_PRIORITY = -1

#: Seconds that `close` waits for the thread, which itself waits for the network no longer than `REFUSAL_S`.
CLOSE_TIMEOUT_S = 60.0
#: Seconds that an exchange that has failed leaves to an agreement that is under way.
REFUSAL_S = 1.0

#: The context of most work on the CPU. It may be entered by several threads at once.
_NO_CONTEXT = nullcontext()

#: A function that starts the steps of a piece.
Start = Callable[[], Steps]


@dataclass(eq=False)
class Job:
    """A flat tensor to be replaced by its mean over ranks.

    Attributes:
        tensor: the tensor; after an error it is all NaN, unless ``kept_if_refused`` says otherwise.
        pieces: for each piece, a function that starts its steps.
        name: for errors.
        counters: counters of the bucket, to which times are added.
        telemetry: counters of the process, to which times are added.
        ends_step: whether the tensor is the last one of its step.
        agreement: a function that starts the steps of an agreement, which compare a card or a stamp. The job does not
            complete before them. None if there is nothing to agree on.
        agreement_blocks: whether these steps have to end before the first piece starts.
        watch: a function that is called with the tensor once it is the mean, before the job completes; None if there is
            none.
        kept_if_refused: whether the tensor stays unchanged if ranks do not agree, which ends the job before anything is
            sent.
        threads: how many pieces may be encoded and decoded at once. More than 1 only if pieces have nothing in common
            that they change, such as a memory.
        connections: number of connections that the pieces use in turns.
        is_direct: whether the calling thread starts the job's only exchange, which needs no codec; see `wire.direct`.
        is_held: whether the caller calls `wait`, and keeps the tensor until then. On a GPU, PyTorch is not told then
            that the job's stream uses the tensor's memory. It would give that memory to nobody before the GPU has
            caught up with the host.
        error: the error, once complete.
    """

    tensor: Tensor
    pieces: Sequence[Start]
    name: str
    counters: BucketCounters
    telemetry: Telemetry
    ends_step: bool
    agreement: Start | None = None
    agreement_blocks: bool = True
    watch: Callable[[Tensor], None] | None = None
    kept_if_refused: bool = False
    threads: int = 1
    connections: int = 1
    is_direct: bool = False
    is_held: bool = False

    def __post_init__(self) -> None:
        # The future of a CUDA tensor has to know the device, so that `wait` synchronises streams and not the host. It
        # also tells PyTorch which streams use the tensor's memory.
        knows = self.tensor.is_cuda and not self.is_held
        devices: list[int | str | torch.device] | None = [self.tensor.device] if knows else None
        self._done: torch.futures.Future[Tensor | None] = torch.futures.Future(devices=devices)
        self.error: BaseException | None = None
        self._submitted = time.perf_counter()
        self._arrived = moment(self.tensor.device)
        self._ended = self._arrived
        self._stream: torch.cuda.Stream | None = None
        self.left = len(self.pieces) + (self.agreement is not None)

    @property
    def future(self) -> torch.futures.Future[Tensor]:
        """The future that completes with the tensor, or with the error. If ``is_held``, it has no tensor."""
        # An error that is raised in a `then` reaches C++ as an error; `Future.set_exception` would pass it as a value.
        succeeded = self._done.done() and self.error is None
        done = self._done if succeeded else self._done.then(self._result)
        return cast("torch.futures.Future[Tensor]", done)

    @property
    def is_over(self) -> bool:
        """Whether the job has a result or an error. Unlike `future`, this adds no callback each time."""
        return self._done.done()

    def take(self, stream: torch.cuda.Stream | None) -> None:
        """Do all work on ``stream``, after the work that the current stream had when the job was created. None stands
        for the CPU."""
        self._stream = stream
        if stream is not None:
            stream.wait_event(cast("torch.cuda.Event", self._arrived))
            # Otherwise, the caching allocator could reuse the memory of the freed tensor while this stream still uses
            # it.
            if not self.is_held:
                self.tensor.record_stream(stream)

    def wait(self) -> Tensor:
        """Wait for the tensor and return it. On a GPU, the current stream waits.

        Raises:
            ConfigError: if the ranks do not agree.
            CollectiveError: if a collective failed. The tensor is then all NaN.
        """
        try:
            self.future.wait()
        except Exception:
            if self._stream is not None:  # a future with an error lets no stream wait
                torch.cuda.current_stream(self.tensor.device).wait_stream(self._stream)
                if self.is_held:
                    self.tensor.record_stream(self._stream)  # the caller may let go of the tensor at once
            if self.error is None:
                raise
            raise self.error from None
        if self.is_held and self._stream is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(cast("torch.cuda.Event", self._ended))
        return self.tensor

    def context(self) -> AbstractContextManager[object]:
        """Returns the context in which the job's work is done: the job's stream, and inference mode if the tensor was
        created in it, because PyTorch lets no other code change such tensors."""
        stream = self._stream
        if not self.tensor.is_inference():
            return _NO_CONTEXT if stream is None else torch.cuda.stream(stream)
        context = ExitStack()
        context.enter_context(torch.inference_mode())
        if stream is not None:
            context.enter_context(torch.cuda.stream(stream))
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
                self._count()
                # On a GPU, the tensor is complete when the job's stream reaches this point.
                if self.is_held:
                    self._ended = moment(self.tensor.device)
                self._done.set_result(self._value)
        except Exception as cause:  # e.g. the GPU has failed, so that a future cannot hold its tensors any more
            self.error = error or cause
            logger.critical("gqsgd: %s: the result on %s cannot be written: %s", self.name, self.tensor.device, cause)
            if not self._done.done():
                self._done.set_result(None)

    def _count(self) -> None:
        self.counters.latency_s += time.perf_counter() - self._submitted
        if self.ends_step:
            self.telemetry.expose(self._arrived, moment(self.tensor.device))
            self.telemetry.end_step()

    @property
    def _value(self) -> Tensor | None:
        """The value of the future: the tensor, or None if nobody but `wait` asks for it."""
        return None if self.is_held else self.tensor

    def _result(self, _: object) -> Tensor | None:
        if self.error is not None:
            raise self.error
        return self._value


class _Piece:
    """One piece of a job under way.

    Attributes:
        job: the job that it belongs to.
        stage: stage of the next exchange.
        is_agreement: whether it is the job's agreement.
        blocks: whether the piece is the agreement, and the job's other pieces wait for it.
        works: the collectives of the latest stage.
        waiting_for: how many of them are still under way, or 1 while a worker computes.
        is_through: whether the piece has ended.
        is_computing: whether a worker computes for the piece.
        task: the latest task of a worker for the piece. It may end shortly after ``is_computing`` has become False.
    """

    def __init__(self, job: Job, start: Start, stage: int) -> None:
        self.job = job
        self.stage = stage
        self.is_agreement = stage == 0
        self.blocks = self.is_agreement and job.agreement_blocks
        self.works: list[dist.Work] = []
        self.waiting_for = 0
        self.is_through = False
        self.is_computing = False
        self.task: Future[None] | None = None
        self._start = start
        self._steps: Steps | None = None
        self._computed: _Outcome | None = None
        # Number of the connection that its exchanges use; None until it starts, if there are several.
        self._turn = 0 if self.is_agreement or job.connections == 1 else None

    def resume(self, communicator: Communicator) -> bool:
        """Compute up to the next exchange and start it. Returns False if there is none, because the piece has ended.

        Call it in the job's context.
        """
        if self._turn is None:
            # Pieces start in the same order on all ranks, and not at all if an agreement has ended their job.
            self._turn = communicator.next_turn(self.job.connections)
        for work in self.works:
            work.wait()  # over Gloo, the work has ended, and this raises its error; over NCCL, the stream waits
        self.works = []
        outcome = self._computed or self._compute()
        self._computed = None
        self._count(outcome)
        if outcome.error is not None:
            raise outcome.error
        if outcome.exchanges is None:
            self.is_through = True
            return False
        # Empty messages need no collective. If parts are unequal, all ranks have to take part if one of them sends.
        self.works = [
            communicator.start(exchange, self.stage, self._turn)
            for exchange in outcome.exchanges
            if exchange.input.numel() or exchange.splits
        ]
        self.waiting_for = len(self.works)
        self.stage += 1
        return True

    def compute(self) -> None:
        """Encode or decode, as `resume` does before it starts an exchange. It may run on any thread, and raises
        nothing.

        If an exchange has failed, this computes nonsense, and `resume` raises the exchange's error.
        """
        with self.job.context():
            self._computed = self._compute()

    @property
    def wants_computing(self) -> bool:
        """Returns whether a worker may compute for the piece: if no exchange is under way and no result is waiting."""
        return not self.waiting_for and self._computed is None

    @property
    def can_resume(self) -> bool:
        """Returns whether `resume` may be called now, because it would do no computation that is left to workers."""
        return self.job.threads == 1 or self.is_agreement or self._computed is not None

    def _compute(self) -> _Outcome:
        begun = time.perf_counter()
        try:
            with span("agreement" if self.is_agreement else f"stage {self.stage}"):
                self._steps = self._steps or self._start()
                exchanges = next(self._steps)
        except StopIteration as end:
            return _Outcome(time.perf_counter() - begun, nonfinite=end.value)
        except Exception as error:  # raised by the thread that asks for it
            return _Outcome(time.perf_counter() - begun, error=error)
        return _Outcome(time.perf_counter() - begun, exchanges)

    def _count(self, outcome: _Outcome) -> None:
        counters = self.job.counters
        if outcome.exchanges is not None:
            counters.encode_s += outcome.seconds
        elif outcome.error is None:
            counters.decode_s += outcome.seconds
            counters.add_nonfinite(outcome.nonfinite)


class _Outcome(NamedTuple):
    """The result of one computation of a piece.

    Attributes:
        seconds: duration of the computation.
        exchanges: the exchanges that follow; None if the piece has ended or failed.
        nonfinite: number of non-finite blocks, if the piece has ended.
        error: the error, if the piece has failed.
    """

    seconds: float
    exchanges: Sequence[Exchange] | None = None
    nonfinite: Count = 0
    error: Exception | None = None


def _pieces_of(job: Job) -> list[_Piece]:
    """Returns the agreement, at stage 0, and the pieces, from stage 1 on."""
    agreement = [] if job.agreement is None else [_Piece(job, job.agreement, 0)]
    return agreement + [_Piece(job, start, 1) for start in job.pieces]


class Runner(Protocol):
    """The interface of the runners of jobs."""

    def submit(self, communicator: Communicator, job: Job) -> None:
        """Start a job. The jobs of a communicator have to be submitted in the same order on every rank."""
        ...

    def error_of(self, communicator: Communicator) -> BaseException | None:
        """Returns the error after which a communicator can run no more jobs, because ranks do not know the state of
        others; None if there is none."""
        ...

    def close(self, communicator: Communicator) -> None:
        """Fail all jobs that are under way on a communicator, and forget it."""
        ...


class StreamRunner:
    """Runs jobs at once in the caller's thread. On a GPU, it has its own streams, and the host does not wait.

    Jobs use the streams in turns, so that a bucket is encoded while the previous bucket is sent or decoded. Pieces of a
    job take turns for the same reason: `MAX_ON_STREAM` pieces issue a stage before any of them issues the next.
    Agreements that do not block have their own stream, and run at the same time as the first encoding. On the CPU (for
    tests), the runner waits for every exchange.

    Args:
        streams: the streams on which work is issued; None stands for the CPU.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream | None]) -> None:
        self._streams = cycle(streams)
        self._beside: torch.cuda.Stream | None = None
        self._broken: dict[Communicator, BaseException] = {}

    def submit(self, communicator: Communicator, job: Job) -> None:
        refuse_capture(job)
        stream = next(self._streams)
        job.take(stream)
        broken = self._broken.get(communicator)
        if broken is not None:
            job.finish(communicator.describe(broken, f"{job.name}, after an earlier failure,"))
            return
        pieces = _pieces_of(job)
        piece = pieces[0]
        error = None
        try:
            # The agreement runs alone, before any piece starts: ranks that do not agree must not have sent messages of
            # different sizes, and all ranks need the same order of collectives.
            if job.agreement is not None:
                with self._context_beside(job):
                    while piece.resume(communicator):
                        pass
                del pieces[0]
            with job.context():
                for piece in by_stages(pieces):
                    piece.resume(communicator)
        except Exception as cause:  # reported through the future
            if not (piece.blocks and isinstance(cause, ConfigError)):
                self._broken[communicator] = cause  # the order of collectives is lost
            error = communicator.describe(cause, f"{job.name}, stage {piece.stage},")
        job.finish(error)

    def _context_beside(self, job: Job) -> AbstractContextManager[object]:
        """Returns the context of an agreement: its own stream, unless all work of the job waits for it."""
        if job.agreement_blocks or not job.tensor.is_cuda:
            return job.context()
        self._beside = self._beside or torch.cuda.Stream(job.tensor.device, HIGH_PRIORITY)
        # A stamp has weights that the caller's stream has read.
        self._beside.wait_event(cast("torch.cuda.Event", job._arrived))
        return torch.cuda.stream(self._beside)

    def error_of(self, communicator: Communicator) -> BaseException | None:
        return self._broken.get(communicator)

    def close(self, communicator: Communicator) -> None:
        self._broken.pop(communicator, None)  # no job is under way between calls, so none has to fail


class Sequencer:
    """The thread that runs jobs over Gloo; one per process, see `runner_for`."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lanes: dict[Communicator, deque[_Piece]] = {}
        self._broken: dict[Communicator, BaseException] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._workers = Workers()
        self._uses_workers = False  # whether a job has ever allowed more than one thread
        self._thread = threading.Thread(target=self._run, name="gqsgd-sequencer", daemon=True)
        self._thread.start()

    def submit(self, communicator: Communicator, job: Job) -> None:
        refuse_capture(job)
        self._events.put(lambda: self._add(communicator, job))

    def error_of(self, communicator: Communicator) -> BaseException | None:
        return self._broken.get(communicator)

    def close(self, communicator: Communicator) -> None:
        closed = threading.Event()

        def forget() -> None:
            self._fail(communicator, RuntimeError("it was closed"), None)
            del self._broken[communicator]
            closed.set()

        self._events.put(forget)
        if not self._may_be_waited_for():
            return
        if not closed.wait(CLOSE_TIMEOUT_S):
            raise RuntimeError(f"gqsgd: the sequencing thread did not answer within {CLOSE_TIMEOUT_S:.0f} s")

    def stop(self) -> None:
        """End the thread."""
        self._events.put(None)
        if self._may_be_waited_for():
            self._thread.join(CLOSE_TIMEOUT_S)
        self._workers.stop()

    def _may_be_waited_for(self) -> bool:
        """Returns whether the calling thread may wait for the sequencing thread.

        Garbage collection of a model may close it on any thread: on this one, or on one that this one waits for.
        """
        is_own = threading.current_thread() is self._thread or self._workers.has_this_thread()
        return not (is_own or holds_a_lock())

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Wait for an event and handle it. Returns False after the last one.

        A function of its own, because the variables of a loop would keep the last job and its tensor until the next
        event.
        """
        begun = time.perf_counter()
        event = self._events.get()
        # The time in `get` counts as waiting for the network only if the oldest piece waits for an exchange, not for a
        # worker.
        for lane in self._lanes.values():
            if lane and lane[0].waiting_for and not lane[0].is_computing:
                lane[0].job.telemetry.wait_s += time.perf_counter() - begun
        if event is None:
            return False
        try:
            event()
        except Exception as error:  # a bug; without this thread, all callers would wait for ever
            logger.exception("gqsgd: the sequencing thread failed")
            for communicator in list(self._lanes):
                self._fail(communicator, error, None)
        return True

    def _add(self, communicator: Communicator, job: Job) -> None:
        try:
            job.take(self._stream_of(job.tensor.device))
        except Exception as error:  # of a GPU that has failed
            self._broken.setdefault(communicator, error)
        cause = self._broken.get(communicator)
        if cause is not None:
            job.finish(communicator.describe(cause, f"{job.name}, after an earlier failure,"))
            return
        self._uses_workers = self._uses_workers or job.threads > 1
        # A lane keeps the order of submission, which is the same on every rank.
        self._lanes.setdefault(communicator, deque()).extend(_pieces_of(job))
        self._advance(communicator)

    def _stream_of(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type == "cuda" and device not in self._streams:
            make_current(device)
            self._streams[device] = torch.cuda.Stream(device, HIGH_PRIORITY)
        return self._streams.get(device)

    def _advance(self, communicator: Communicator) -> None:
        """Resume every piece whose exchanges have ended and whose turn it is."""
        lane = self._lanes.get(communicator, deque())
        while piece := self._next(communicator, lane):
            try:
                with piece.job.context():
                    goes_on = piece.resume(communicator)
                if goes_on:
                    for work in piece.works:
                        work.get_future().add_done_callback(self._waker(communicator, piece))
                else:
                    lane.remove(piece)
                    piece.job.left -= 1
                    if not piece.job.left:
                        piece.job.finish()
            except Exception as error:
                if piece.blocks and isinstance(error, ConfigError):
                    # All ranks have the same error, and none has started the job's pieces, so other jobs can continue.
                    self._lanes[communicator] = lane = deque(other for other in lane if other.job is not piece.job)
                    piece.job.finish(error)
                    continue
                self._fail(communicator, error, piece)  # reported through the futures of all jobs under way
                return

    def _next(self, communicator: Communicator, lane: deque[_Piece]) -> _Piece | None:
        """Returns the piece to be resumed, after giving workers the pieces that they can compute meanwhile."""
        if self._uses_workers:
            self._compute_ahead(communicator, lane)
        return next((piece for piece in ready(lane) if piece.can_resume), None)

    def _compute_ahead(self, communicator: Communicator, lane: deque[_Piece]) -> None:
        """Let workers compute for the pieces whose exchanges have ended, even if it is another piece's turn.

        If a job has one thread, because its pieces share a memory or because it is on a GPU, this thread computes for
        it.
        """
        for piece in computable(lane):
            # Counts as an exchange, so that the piece is not resumed before the worker is done.
            piece.waiting_for = 1
            piece.is_computing = True
            piece.task = self._workers.submit(partial(self._compute, communicator, piece))

    def _compute(self, communicator: Communicator, piece: _Piece) -> None:
        """Compute for a piece and wake the sequencing thread. Called on a worker's thread."""

        def computed() -> None:
            piece.is_computing = False
            self._arrived(communicator, piece)

        piece.compute()
        self._events.put(computed)

    def _waker(self, communicator: Communicator, piece: _Piece) -> Callable[[object], None]:
        """Returns a callback for a backend's thread. It only wakes the sequencing thread."""
        return lambda _: self._events.put(partial(self._arrived, communicator, piece))

    def _arrived(self, communicator: Communicator, piece: _Piece) -> None:
        """Note that an exchange of a piece has ended, or that a worker has computed for it."""
        piece.waiting_for -= 1
        if not piece.waiting_for:
            self._advance(communicator)

    def _fail(self, communicator: Communicator, error: BaseException, failed: _Piece | None) -> None:
        """Fail all jobs that are under way on a communicator, and all later ones."""
        pieces = self._lanes.pop(communicator, ())
        if failed is not None and not isinstance(error, ConfigError):
            error = _refusal(communicator, pieces) or error
        self._broken[communicator] = error
        wait([piece.task for piece in pieces if piece.task is not None])  # before tensors are set to NaN
        for job in dict.fromkeys(piece.job for piece in pieces):
            where = f"{job.name}, stage {failed.stage}," if failed and failed.job is job else f"{job.name}, behind it,"
            job.finish(communicator.describe(error, where))


def _refusal(communicator: Communicator, pieces: Iterable[_Piece]) -> ConfigError | None:
    """Returns the error of an agreement that is still under way although an exchange has failed; None if ranks agree,
    or if no agreement ends within `REFUSAL_S`.

    A rank that refuses an agreement closes its connections. Its peers may notice that before they have read what it
    has sent for the agreement, and would name the lost connection as the cause.
    """
    until = time.monotonic() + REFUSAL_S
    for piece in pieces:
        if not piece.is_agreement or not piece.waiting_for:
            continue
        futures = [work.get_future() for work in piece.works]
        while not all(future.done() for future in futures):
            if time.monotonic() > until:
                return None
            time.sleep(0.001)
        try:
            with piece.job.context():
                piece.resume(communicator)
        except ConfigError as refusal:
            return refusal
        except Exception:  # noqa: S112  # the agreement's connection was lost, too
            continue
    return None


def refuse_capture(job: Job) -> None:
    """Raise ConfigError for a job that would become part of a CUDA graph."""
    if job.tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            f"{job.name} would be reduced while a CUDA graph is captured, and each replay would send what the captured "
            "step did: the dither changes from step to step, and other threads and streams take part. Capture forward "
            "and backward passes under no_sync() and reduce after the replay, or leave graphs out, e.g. "
            "torch.compile(mode='default') in place of 'reduce-overhead'"
        )


def computable(lane: deque[_Piece]) -> list[_Piece]:
    """Returns the pieces that workers may compute for now, oldest first."""
    # Only pieces that may be under way, because each encoded piece holds scratch memory until it ends.
    window = list(lane)[:MAX_UNDER_WAY]
    busy = sum(piece.is_computing for piece in window)
    found: list[_Piece] = []
    for piece in window:
        if piece.blocks:
            break  # the agreement decides whether the pieces after it are computed at all
        may_compute = not piece.is_agreement and piece.job.threads > busy + len(found)
        if may_compute and piece.job.threads > 1 and piece.wants_computing:
            found.append(piece)
    return found


class Underway(Protocol):
    """The attributes of a piece that determine its turn; see `_Piece`.

    The performance model's clock (`predict.runners`) orders its pieces with the same two functions, `by_stages` and
    `ready`.
    """

    stage: int
    waiting_for: int
    is_through: bool
    is_agreement: bool
    blocks: bool


P = TypeVar("P", bound=Underway)


def by_stages(pieces: Iterable[P]) -> Iterator[P]:
    """Yield the piece whose next stage is to be issued: `MAX_ON_STREAM` pieces issue a stage before any of them issues
    the next."""
    waiting = deque(pieces)
    under_way: deque[P] = deque()
    while waiting or under_way:
        # Only as many as may be under way, so that the scratch memory of a large job is bounded.
        while waiting and len(under_way) < MAX_ON_STREAM:
            under_way.append(waiting.popleft())
        piece = under_way.popleft()
        yield piece
        if not piece.is_through:
            under_way.append(piece)


def ready(lane: deque[P]) -> Iterator[P]:
    """Yield the pieces whose exchanges have ended and whose predecessor is a stage ahead, oldest first."""
    ahead: P | None = None
    for number, piece in enumerate(lane):
        if number == MAX_UNDER_WAY:
            return
        waits_for_nobody = piece.is_agreement and not piece.blocks
        if not piece.waiting_for and (waits_for_nobody or ahead is None or ahead.stage > piece.stage):
            yield piece
        if not waits_for_nobody:  # nor does another piece wait for it
            ahead = piece


_shared: Sequencer | None = None
_users = 0
_lock = threading.RLock()  # garbage collection within `runner_for` may call `release`


def runner_for(communicator: Communicator, streams: int = STREAMS) -> Runner:
    """Returns the runner for the jobs of a communicator. Return it with `release`.

    Args:
        communicator: the communicator; over Gloo, the process's sequencing thread runs its jobs.
        streams: over NCCL, number of streams; 1 if other communicators also use the runner, because two of their
            collectives that run at once might deadlock.
    """
    global _shared, _users
    # NCCL keeps the order of collectives on the device, so no thread is needed for it.
    if communicator.backend == "nccl":
        return StreamRunner([torch.cuda.Stream(communicator.device, HIGH_PRIORITY) for _ in range(streams)])
    with _lock:
        _shared = _shared or Sequencer()
        _users += 1
        return _shared


def release(runner: Runner) -> None:
    """Stop the sequencing thread after its last user."""
    global _shared, _users
    with _lock:
        if runner is not _shared:  # another runner, or the thread of a parent process before a fork
            return
        _users -= 1
        last = None if _users else _shared
        _shared = _shared if _users else None
    if last:
        last.stop()


def _forget_after_fork() -> None:
    """Reset the state in a forked child, because threads do not survive a fork, and one of them may have held the
    lock."""
    global _shared, _users, _lock
    _shared = None
    _users = 0
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_after_fork)
