"""Collectives of CUDA tensors over Gloo, through pinned copies in host memory, because Gloo needs host memory.

A collective is requested while a GPU still computes its input, and must not start before the input is complete. One
thread per communicator waits for inputs, and starts the collectives in the order of the requests, which is the same on
every rank. The thread that requests a collective does not wait.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_gqsgd.reducers.base import Exchange

#: How many seconds `close` waits for the thread, which may itself wait for a GPU.
CLOSE_TIMEOUT_S = 60.0

#: Seconds between two looks whether a GPU has copied an input.
LOOK_S = 1e-4

Start = Callable[[Exchange, int, int], Any]


class StagedWork:
    """A collective under way, like torch's `Work`.

    Args:
        exchange: the collective. The constructor starts to copy its input.
        patience: how long to wait for the GPU to compute the input; after that, the collective has its own timeout.
    """

    def __init__(self, exchange: Exchange, patience: timedelta) -> None:
        self._output = exchange.output
        self._patience = patience
        source = _to_host(exchange.input)
        # An all-reduce works in place, so the copy of its input is also its output.
        target = source if exchange.output is exchange.input else _host_like(exchange.output)
        self._host = exchange._replace(output=target, input=source)
        self._device = exchange.input.device
        self._copied = torch.cuda.Event() if exchange.input.is_cuda else None
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        self._begun = threading.Event()
        self._future: torch.futures.Future[None] = torch.futures.Future()
        self._work: Any = None
        self._error: BaseException | None = None

    def begin(self, start: Start, stage: int, turn: int) -> None:
        """Wait for the input and start the collective. Called on the staging thread."""
        try:
            self._wait_for_input()
            self._work = start(self._host, stage, turn)
            done = self._work.get_future()
        except Exception as error:  # raised by `wait`
            self.fail(error)
            return
        self._begun.set()
        done.add_done_callback(self._arrived)

    def _wait_for_input(self) -> None:
        """Wait until the GPU has copied the input; raises RuntimeError if it has not done so within the patience."""
        make_current(self._device)
        ends = time.monotonic() + self._patience.total_seconds()
        while self._copied is not None and not self._copied.query():
            if time.monotonic() > ends:
                raise self._late()
            time.sleep(LOOK_S)  # `synchronize` would wait without an end

    def _late(self) -> RuntimeError:
        return RuntimeError(
            f"a {self._host.kind} did not start within {self._patience.total_seconds():.0f} s, because the GPU has not "
            "computed its input; look for what the GPU waits for, or give a longer timeout"
        )

    def fail(self, error: BaseException) -> None:
        """Complete with an error instead of starting."""
        self._error = error
        self._begun.set()
        self._future.set_result(None)

    def get_future(self) -> torch.futures.Future[None]:
        """Returns a future that completes when the collective has ended or failed; `wait` raises the error."""
        return self._future

    def wait(self) -> None:
        """Wait for the result and start to copy it to the device, on the current stream.

        Raises:
            RuntimeError: if the collective failed, or if the GPU did not compute its input in time.
        """
        if not self._begun.wait(self._patience.total_seconds()):
            raise self._late()  # the thread still waits for an earlier input
        if self._error is not None:
            raise self._error
        # The collective has ended here. This raises its error, if there is one.
        self._work.wait()
        self._output.copy_(self._host.output, non_blocking=True)

    def _arrived(self, _: object) -> None:
        self._future.set_result(None)


class Staging:
    """The thread that starts a communicator's collectives; see the module's docstring.

    Args:
        start: function that starts a collective of a stage and a turn on host tensors, and returns torch's `Work`.
        patience: how long to wait for a GPU to compute the input of a collective.
    """

    def __init__(self, start: Start, patience: timedelta) -> None:
        self._start = start
        self._patience = patience
        self._asked: queue.SimpleQueue[tuple[StagedWork, int, int] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._lock = threading.Lock()  # nothing is put behind the end
        self._thread = threading.Thread(target=self._run, name="gqsgd-staging", daemon=True)
        self._thread.start()

    def start(self, exchange: Exchange, stage: int, turn: int = 0) -> StagedWork:
        """Copy the input on the current stream, and start the collective after the copy. Returns at once.

        Raises:
            RuntimeError: if this was closed.
        """
        work = StagedWork(exchange, self._patience)
        with self._lock:
            if self._closed.is_set():
                raise RuntimeError("the communicator was closed")
            self._asked.put((work, stage, turn))
        return work

    def close(self) -> None:
        """End the thread. Collectives that have not started fail."""
        with self._lock:
            self._closed.set()
            self._asked.put(None)
        # The thread itself may call this, if garbage collection of a model runs on it. It cannot wait for itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while self._begin_next():
            pass

    def _begin_next(self) -> bool:
        """Wait for a collective and start it. Returns False at the end.

        A function of its own, because the variables of a loop would keep the last collective's tensors until the next
        one.
        """
        asked = self._asked.get()
        if asked is None:
            return False
        work, stage, turn = asked
        if self._closed.is_set():
            work.fail(RuntimeError("the communicator was closed"))
        else:
            work.begin(self._start, stage, turn)
        return True


def make_current(device: torch.device) -> None:
    """Make a GPU the current device of a thread of our own. Does nothing for a CPU.

    A new thread has GPU 0 as its device. If it works for another GPU, the query of an event, or torch's return to the
    device before, makes CUDA create a context of hundreds of megabytes on GPU 0, in the process of each rank.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _to_host(tensor: Tensor) -> Tensor:
    return _host_like(tensor).copy_(tensor, non_blocking=True)


def _host_like(tensor: Tensor) -> Tensor:
    """Returns host memory for a tensor's elements, pinned if the tensor is on a GPU. PyTorch does not reuse pinned
    memory before the copies to and from it are complete."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
