"""Processes that live for a whole test: the test sends each of them operations, and gets results or errors back."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.server import fork_context


@dataclass(frozen=True)
class Answer:
    """What an operation gave on one rank.

    Attributes:
        value: its result; None after an error.
        error: the name of the exception's class and its text; empty without an error.
        trace: the traceback of the error.
        seconds: how long the operation took.
    """

    value: Any
    error: str
    trace: str
    seconds: float


class NoAnswer(AssertionError):
    """A rank died, or did not answer in time."""


class Pool:
    """Ranks over Gloo, each with an object that operations are methods of.

    Args:
        make: makes a rank's object: ``make(rank, ranks, folder, timeout_s)``.
        ranks: number of ranks.
        folder: where ranks find each other.
        timeout_s: seconds, the timeout of the process group.
    """

    def __init__(self, make: Callable[..., Any], ranks: int, folder: Path, timeout_s: float) -> None:
        context = fork_context()
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(make, rank, ranks, folder, timeout_s, theirs))
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def call(self, operations: Sequence[tuple[str, dict[str, Any]] | None], within_s: float) -> list[Answer | None]:
        """Let each rank do an operation at the same time: the name of a method, and its arguments; None: nothing.

        Raises:
            NoAnswer: a rank died, or did not answer within ``within_s`` seconds.
        """
        for pipe, operation in zip(self._pipes, operations, strict=True):
            if operation is not None:
                pipe.send(operation)
        deadline = time.monotonic() + within_s
        return [
            None if operation is None else self._answer(rank, operation[0], deadline)
            for rank, operation in enumerate(operations)
        ]

    def close(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def _answer(self, rank: int, name: str, deadline: float) -> Answer:
        pipe = self._pipes[rank]
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            raise NoAnswer(f"rank {rank} did not answer to {name} in time")
        try:
            answer: Answer = pipe.recv()
        except EOFError:
            self.processes[rank].join(5)
            raise NoAnswer(f"rank {rank} died in {name} with exit code {self.processes[rank].exitcode}") from None
        return answer


def initialise(rank: int, ranks: int, folder: Path, number: int, timeout_s: float) -> None:
    """Make the default process group; ``number``: how many there were before."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store-{number}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def _serve(make: Callable[..., Any], rank: int, ranks: int, folder: Path, timeout_s: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), RANK=str(rank), LOCAL_RANK=str(rank))
    initialise(rank, ranks, folder, 0, timeout_s)
    subject = make(rank, ranks, folder, timeout_s)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        begun = time.monotonic()
        try:
            value, error, trace = getattr(subject, name)(**arguments), "", ""
        except Exception as cause:  # it is the answer
            value, error, trace = None, f"{type(cause).__name__}: {cause}", traceback.format_exc()
        pipe.send(Answer(value, error, trace, time.monotonic() - begun))
