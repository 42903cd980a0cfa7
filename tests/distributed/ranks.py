"""Real processes over Gloo for tests: `on_ranks` runs a test on every rank, and `run` calls a module-level function on
every rank and returns their results."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import multiprocessing
import os
import pickle
import queue
import reprlib
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from tests.distributed.server import fork_context
from tests.ports import free_port

#: New processes, which take seconds each: for a GPU, which a process cannot use if the one that it was forked from did.
SPAWN = multiprocessing.get_context("spawn")


def logged(name: str = "lightning_gqsgd", level: int = logging.NOTSET) -> list[str]:
    """A list that gets all that is logged from now on: pytest's `caplog` does not see the processes of `run`."""
    texts: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    return texts


class RankFailed(AssertionError):
    """A rank raised, died, or did not answer in time."""


def run(
    function: Callable[..., Any],
    ranks: int,
    tmp_path: Path,
    *args: Any,
    timeout: float = 120,
    collective_timeout: float = 60,
    dies: tuple[int, ...] = (),
    initialise: bool = True,
    torchrun: bool = True,
    context: Any = None,
) -> list[Any]:
    """Results of ``function(rank, *args)`` by rank; None for the ranks that are expected to die.

    The process group is initialised before, and destroyed after; ``collective_timeout`` is its timeout in seconds.
    Without ``initialise``, ranks find torchrun's environment instead; without ``torchrun``, they do not find it either,
    as in a process that no launcher started. ``context``: how processes are started. None: they are forked from a
    server that has imported everything and has no threads, which takes 10 ms instead of 3 s per process.

    ``timeout``: seconds that ranks may wait. What they compute is taken off: a rank that compiles kernels on a machine
    with much else to do is late, and does not hang.
    """
    context = context or fork_context()
    group = None
    if initialise:
        store = f"file://{tmp_path}/store-{time.monotonic_ns()}"
        group = {"init_method": store, "world_size": ranks, "timeout": timedelta(seconds=collective_timeout)}
    environment = _torchrun(ranks) if torchrun else {}
    answers: Any = context.Queue()
    processes = [
        context.Process(target=_main, args=(function, rank, environment, group, answers, args)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = dict.fromkeys(dies)
    begun = time.monotonic()
    try:
        while len(results) < ranks:
            try:
                rank, error, result = answers.get(timeout=0.2)
            except queue.Empty:
                _check(processes, results, begun + timeout)
                continue
            if error:
                raise RankFailed(f"rank {rank} of {ranks} raised:\n{error}")
            results[rank] = pickle.loads(result)  # noqa: S301  # from the test's own processes
        for process in processes:
            # An answer may come after the time to wait, see above, and the end of its process a moment later.
            process.join(max(10, begun + timeout - time.monotonic()))
            if process.is_alive():
                raise RankFailed("a rank answered but did not end")
        return [results[rank] for rank in range(ranks)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def run_alike(function: Callable[..., Any], ranks: int, tmp_path: Path, *args: Any, **options: Any) -> Any:
    """The result of `run`, with its arguments, that is the same on every rank."""
    first, *others = run(function, ranks, tmp_path, *args, **options)
    for rank, other in enumerate(others, start=1):
        assert other == first, f"rank 0 gave {first!r}, rank {rank} {other!r}"
    return first


def on_ranks(ranks: int | None = None, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Decorator of a test that each rank runs, and whose result has to be the same on all of them.

    The test gets its rank, and then its fixtures and parameters. Without ``ranks``, its parameter of this name is their
    number. ``options``: see `run`.
    """

    def on_all(test: Callable[..., Any]) -> Callable[..., None]:
        _, *given = inspect.signature(test).parameters.values()
        names = [one.name for one in given]

        @functools.wraps(test)
        def run_on_all(**values: Any) -> None:
            function = _Test(test.__module__, test.__name__)
            arguments = (values[name] for name in names)
            run_alike(function, ranks or values["ranks"], values["tmp_path"], *arguments, **options)

        folder = [] if "tmp_path" in names else [inspect.Parameter("tmp_path", inspect.Parameter.KEYWORD_ONLY)]
        run_on_all.__signature__ = inspect.Signature([*given, *folder])  # type: ignore[attr-defined]
        return run_on_all

    return on_all


class _Test(NamedTuple):
    """A test of `on_ranks` by its name, because a function that a decorator has replaced cannot be pickled."""

    module: str
    name: str

    def __call__(self, *arguments: Any) -> Any:
        return getattr(importlib.import_module(self.module), self.name).__wrapped__(*arguments)


def _check(processes: list[Any], results: dict[int, Any], deadline: float) -> None:
    for rank, process in enumerate(processes):
        if rank not in results and process.exitcode not in (None, 0):
            raise RankFailed(f"rank {rank} ended with exit code {process.exitcode}")
    if time.monotonic() > deadline + sum(map(_processor_seconds, processes)):
        raise RankFailed(f"ranks {sorted(set(range(len(processes))) - set(results))} did not answer in time")


def _processor_seconds(process: Any) -> float:
    """What a process has computed; 0 if it has ended."""
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _torchrun(ranks: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }


def _main(
    function: Callable[..., Any],
    rank: int,
    environment: dict[str, str],
    group: dict[str, Any] | None,
    answers: Any,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    if environment:
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    # A rank whose test needs no others may end while they still connect to it, which Gloo takes for a lost peer.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    try:
        if group is not None:
            dist.init_process_group("gloo", rank=rank, **group)
        result = function(rank, *args)
        # Pickled here, because a queue hands over tensors in memory of this process, which may end before they are
        # fetched.
        answers.put((rank, None, pickle.dumps(result)))
    except BaseException as error:
        answers.put((rank, traceback.format_exc() + _variables_at(error), None))
    finally:
        answers.close()
        answers.join_thread()
        if dist.is_initialized():
            dist.destroy_process_group()


def _variables_at(error: BaseException) -> str:
    """The variables where an error was raised; pytest says what is compared in its own process only."""
    shorten = reprlib.Repr()
    shorten.maxstring = shorten.maxother = 1000
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    variables = {} if trace is None else trace.tb_frame.f_locals
    return "".join(f"    {name} = {shorten.repr(value)}\n" for name, value in variables.items())
