"""Native all-reduces over Gloo without a thread in between: as cheap as those that DDP issues itself.

A native bucket needs no codec. So the thread that hands the bucket over starts the all-reduce, and the backend's thread
completes the job. The order of collectives is that of the hook's calls, which is the same on every rank, on groups of
our own. The sequencing thread uses the same groups in other steps. By then DDP has waited for all buckets of this step,
so that at most its stamp is still under way, which all ranks have started before.

A stamp (see `agreement`) is compared in every step, and no job waits for it. That is safe. A rank on which a state was
loaded compares its stamp before it sends anything else, so the other ranks cannot complete a bucket of that step before
they have read its stamp.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch

from lightning_gqsgd.reducers.base import Steps
from lightning_gqsgd.wire.agreement import Stamp, StampCheck
from lightning_gqsgd.wire.communicator import Communicator
from lightning_gqsgd.wire.job import Job


class DirectRunner:
    """Runs native jobs of one communicator over Gloo, on tensors in the host's memory.

    Args:
        communicator: the ranks.

    Attributes:
        error: the error after which nothing can be run any more; None: there was none.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._lock = threading.Lock()
        self._under_way: list[Job] = []
        self._comparing: dict[int, threading.Event] = {}  # by step: when its stamps have been read
        self.error: BaseException | None = None

    def compare(self, stamps: StampCheck, stamp: Stamp) -> None:
        """Start to compare a stamp over all ranks. If stamps differ, all jobs fail."""
        exchange = stamps.exchange(stamp)
        work = self._communicator.start(exchange, stage=0)
        read = threading.Event()
        self._comparing[stamp.step] = read

        def arrived(future: torch.futures.Future[Any]) -> None:
            try:
                future.value()
                stamps.read(exchange.output)
            except Exception as error:
                self.fail(error, "the comparison of stamps")
            # Also after an error, or `settle` would wait for the timeout.
            read.set()

        work.get_future().add_done_callback(arrived)

    def settle(self, until_step: int) -> None:
        """Wait until the stamps of all steps up to ``until_step`` have been read; after the timeout, all jobs fail."""
        timeout_s = self._communicator.timeout.total_seconds()
        for step in [step for step in self._comparing if step <= until_step]:
            # The backend ends the comparison at its own timeout, so that this wait runs out only where it does not.
            if not self._comparing.pop(step).wait(timeout_s):
                self.fail(TimeoutError(f"no answer within {timeout_s:g} s"), f"the comparison of step {step}")

    def submit(self, job: Job, steps: Steps) -> None:
        """Start a job's only piece, which has one exchange."""
        with self._lock:
            # The lock makes the check and the entry one step: a backend's thread may fail all jobs at any time.
            error = self.error
            if error is None:
                self._under_way.append(job)
        if error is not None:
            job.finish(self._communicator.describe(error, f"{job.name}, after an earlier failure,"))
            return
        try:
            (exchange,) = next(steps)
            future = self._communicator.start(exchange, stage=1).get_future()
        except Exception as cause:  # reported through the job's future
            self.fail(cause, job.name)
            return
        future.add_done_callback(partial(self._arrived, job, steps))

    def fail(self, error: BaseException, what: str) -> None:
        """Fail all jobs that are under way, and all that come after."""
        with self._lock:
            self.error = self.error or error
            # Jobs are finished outside the lock: callbacks of their futures run here, and may submit other jobs.
            jobs = self._under_way
            self._under_way = []
        for job in jobs:
            where = what if job.name == what else f"{job.name}, because of {what},"
            job.finish(self._communicator.describe(error, where))

    def _arrived(self, job: Job, steps: Steps, future: torch.futures.Future[Any]) -> None:
        """Complete a job; on a thread of the backend."""
        try:
            future.value()  # raises the collective's error
        except Exception as error:
            self.fail(error, job.name)
            return
        with self._lock:
            if job not in self._under_way:
                return  # it has failed
            self._under_way.remove(job)
        try:
            next(steps, None)  # counts its bytes
            job.finish()
        except Exception as error:  # a defect; DDP would wait for ever
            job.finish(error)
