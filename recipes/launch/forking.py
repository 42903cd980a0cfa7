"""A process that has imported torch and Lightning once, and forks the processes of one run after another.

A comparison has many runs, and the imports of one process take ten seconds of a core or more. Each run still has
processes of its own, which no other run has touched: they are copies of a process that has imported modules and has
done nothing else, neither computed, nor drawn a random number, nor started a thread of Python.

The protocol is a line of JSON each way. Requests: ``{"modules": [...], "arguments": [...], "ranks": 2, "log": "..."}``.
Answers: ``{"pid": 1}`` once the run has started, where the number is that of its session, and ``{"code": 0}`` at
its end.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.launch.processes import ROOT, run_command

#: The program of the server. A rank comes out of `serve` as well, so that it ends as every interpreter does.
PROGRAM = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    "from recipes.launch.forking import serve\n"
    "if serve():\n"
    "    from recipes.run import start\n"
    "    start()\n"
)
#: What every run imports.
MODULES = (
    "recipes.training.train",
    "recipes.launch.command_line",
    "sklearn.datasets",
    "lightning_gqsgd.kernels.cpu",
    "lightning_gqsgd.codecs.companded.cpu",
)
#: Seconds that the other ranks have to end by themselves after a rank has failed.
GRACE_S = 10
_PR_SET_PDEATHSIG = 1


def serve() -> bool:
    """Answer requests until standard input ends; returns whether this process is a rank, which is to train.

    A rank has its arguments in ``sys.argv`` and its place in the environment.
    """
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what modules print while they are imported is no answer
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector would write to, and so copy, pages that all ranks share
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        for name in request["modules"]:
            importlib.import_module(name)
        parent = os.getpid()
        leader = os.fork()
        if not leader:
            answers.close()
            return lead(request["arguments"], request["ranks"], Path(request["log"]), parent)
        print(json.dumps({"pid": leader}), file=answers)
        _, status = os.waitpid(leader, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), file=answers)
    return False


def lead(arguments: Sequence[str], ranks: int, log: Path, parent: int) -> bool:
    """Fork the ranks of a run and wait for them; returns True in each rank, and ends the process in the leader."""
    os.setsid()  # an interrupt ends the leader with all ranks
    end_with_parent(parent)
    _redirect(log)
    sys.argv = run_command(arguments)[1:]
    # The ranks come first, and the store of the rendezvous second: a process with threads is not forked.
    pipes = [os.pipe() for _ in range(ranks)]
    leader = os.getpid()
    children = []
    for rank, (reading, _) in enumerate(pipes):
        child = os.fork()
        if not child:
            end_with_parent(leader)
            gc.unfreeze()  # at its exit, a rank frees what it has, as every interpreter does
            for _, writing in pipes:
                os.close(writing)  # a leader that fails before it has a port ends the wait of its ranks
            port = os.read(reading, 16).decode()
            os.environ.update(_place(rank, ranks, port))
            return True
        children.append(child)
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _, writing in pipes:
        os.write(writing, str(store.port).encode())
        os.close(writing)
    code = _wait(children)
    del store
    os._exit(code)


def end_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Have the kernel send a signal to this process when its parent ends; a given parent may have ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def _redirect(log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)


def _place(rank: int, ranks: int, port: str) -> dict[str, str]:
    """The environment of a rank, as torchrun sets it: the store is the leader's, and no rank has to find a port."""
    return {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"},
    }


def _wait(children: Sequence[int]) -> int:
    """Wait for all ranks; returns 0, or the exit code of the rank that failed first, after the others have ended."""
    running, code, failed_at = set(children), 0, float("inf")
    while running:
        for child in sorted(running):
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended:
                continue
            running.remove(child)
            exit_code = os.waitstatus_to_exitcode(status)
            if exit_code and not code:
                code, failed_at = exit_code if exit_code > 0 else 128 - exit_code, time.monotonic()
        if time.monotonic() > failed_at + GRACE_S:
            for child in running:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return code
