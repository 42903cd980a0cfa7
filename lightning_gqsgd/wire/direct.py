"""Native all-reduces over Gloo without a thread in between, which cost no more than DDP's own all-reduces.

A native bucket needs no codec. So the thread that calls the hook starts the all-reduce, and the backend's thread
completes the job. Collectives are started on our own groups in the order of the hook's calls, which is the same on
every rank. The sequencing thread uses the same groups in other steps. By then, DDP has waited for all buckets of this
step, so at most the step's stamp is still under way, and all ranks have started that comparison before.

A stamp (see `agreement`) is compared in every step, and no job waits for it. This is safe: a rank on which a state was
loaded compares its stamp before it sends anything else, so the other ranks cannot complete a bucket of that step before
they have read its stamp.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch

from lightning_gqsgd.reducers.base import Steps
from lightning_gqsgd.wire.communicator import Communicator
from lightning_gqsgd.wire.pipeline import Job, Runner


class DirectRunner:
    """Runs the jobs of one communicator that have one exchange and no codec, on tensors in host memory.

    Either all jobs of a step are native or none is, because two threads would start their collectives in no fixed
    order.

    Args:
        communicator: the ranks.
        behind: the runner of all other jobs of the communicator.
    """

    def __init__(self, communicator: Communicator, behind: Runner) -> None:
        self._communicator = communicator
        self._behind = behind
        self._lock = threading.Lock()
        self._under_way: list[Job] = []
        self._error: BaseException | None = None

    def submit(self, communicator: Communicator, job: Job) -> None:
        error = self.error_of(communicator)
        if error is None and not job.is_direct:
            self._behind.submit(communicator, job)
            return
        if error is not None:  # it may be an error of the other runner, which uses the same groups
            self._fail(error, job.name)
        with self._lock:
            # The lock makes the check and the append atomic, because a backend's thread may fail all jobs at any time.
            error = self._error
            if error is None:
                self._under_way.append(job)
        if error is not None:
            job.finish(communicator.describe(error, f"{job.name}, after an earlier failure,"))
            return
        try:
            start = job.pieces[0] if job.pieces else job.agreement
            assert start is not None
            steps = start()
            (exchange,) = next(steps)
            future = self._communicator.start(exchange, stage=1 if job.pieces else 0).get_future()
        except Exception as cause:  # reported through the job's future
            self._fail(cause, job.name)
            return
        future.add_done_callback(partial(self._arrived, job, steps))

    def error_of(self, communicator: Communicator) -> BaseException | None:
        return self._error or self._behind.error_of(communicator)

    def close(self, communicator: Communicator) -> None:
        self._fail(RuntimeError("it was closed"), "its end")
        self._behind.close(communicator)

    def _arrived(self, job: Job, steps: Steps, future: torch.futures.Future[Any]) -> None:
        """Complete a job. Called on a thread of the backend."""
        try:
            future.value()  # raises the collective's error
            next(steps, None)  # counts its bytes, or compares the stamps of all ranks
        except Exception as error:
            self._fail(error, job.name)
            return
        with self._lock:
            if job not in self._under_way:
                return  # it has failed
            self._under_way.remove(job)
        job.finish()

    def _fail(self, error: BaseException, what: str) -> None:
        """Fail all jobs that are under way, and all later jobs."""
        with self._lock:
            self._error = self._error or error
            # Jobs are finished outside the lock: callbacks of their futures run here, and may submit other jobs.
            jobs = self._under_way
            self._under_way = []
        for job in jobs:
            where = what if job.name == what else f"{job.name}, because of {what},"
            job.finish(self._communicator.describe(error, where))
