"""A flat tensor on its way to the mean over ranks, and the future that completes with it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.reducers.base import Steps
from lightning_gqsgd.wire.telemetry import BucketCounters, Moment, Telemetry, moment

logger = logging.getLogger(__name__)

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
        threads: how many pieces may be encoded and decoded at once. More than 1 only if pieces have nothing in common
            that they change, such as a memory.
        connections: how many connections the pieces take in turns.
        is_direct: whether the calling thread starts its only exchange, which needs no codec; see `wire.direct`.
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
    threads: int = 1
    connections: int = 1
    is_direct: bool = False

    def __post_init__(self) -> None:
        # A future of a CUDA tensor has to know its device: `wait` then synchronises streams, not the host.
        devices: list[int | str | torch.device] | None = [self.tensor.device] if self.tensor.is_cuda else None
        self._done: torch.futures.Future[Tensor | None] = torch.futures.Future(devices=devices)
        self.error: BaseException | None = None
        self._submitted = time.perf_counter()
        self._arrived = moment(self.tensor.device)
        self._stream: torch.cuda.Stream | None = None
        self.left = len(self.pieces) + (self.preface is not None)

    @cached_property
    def future(self) -> torch.futures.Future[Tensor]:
        """The future that completes with the tensor, or with the error."""
        # An error raised in a `then` reaches C++ as an error; `Future.set_exception` would hand it over as a value.
        succeeded = self._done.done() and self.error is None
        return cast("torch.futures.Future[Tensor]", self._done) if succeeded else self._done.then(self._result)

    def take(self, stream: torch.cuda.Stream | None) -> None:
        """Do all work on ``stream``, behind the current stream's work when the job was made; None: on the CPU."""
        self._stream = stream
        if stream is not None:
            stream.wait_event(cast("torch.cuda.Event", self._arrived))
            # The caching allocator would reuse the memory once the tensor is freed, although this stream may not be
            # done with it.
            self.tensor.record_stream(stream)

    def wait(self) -> Tensor:
        """Wait for the tensor and return it. On a GPU, the current stream waits.

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
        """Returns the context in which the job's work is done: its stream, if it has one.

        It is in inference mode if the tensor was made there, because PyTorch lets nobody else change such tensors.
        """
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
