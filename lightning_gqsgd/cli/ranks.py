"""The ranks of ``gqsgd probe`` and ``gqsgd bench``: as their parent, which starts them, or as one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_gqsgd.cli.places import LAUNCHERS, launcher_of, number_in, torchruns_variables
from lightning_gqsgd.errors import ConfigError, counted, first_line
from lightning_gqsgd.wire.node import local_ranks
from lightning_gqsgd.wire.store import wait_for_store

#: Seconds that ranks wait for each other.
_TIMEOUT_S = 120
#: Most processes of one machine.
MOST_PROCS = 64


def is_rank() -> bool:
    """Returns whether a launcher has given this process a rank among others.

    Containers of Kubernetes and other services may have the variables of a launcher from their start. A single rank has
    nobody to send to, so such a process starts its own ranks.
    """
    launcher = launcher_of(os.environ)
    return launcher is not None and os.environ[LAUNCHERS[launcher][1]] != "1"


def run_ranks(procs: int, arguments: Sequence[str]) -> int:
    """Run a command as ranks on this machine. Returns 0, or the exit code of a rank that failed.

    Args:
        procs: number of ranks.
        arguments: the name of the command, and its arguments without ``--procs``.
    """
    if not 2 <= procs <= MOST_PROCS:
        raise ConfigError(f"--procs {procs} is out of range: 2 to {MOST_PROCS}")
    # The store is this process's, as under torchrun: it picks a free port itself, and holds the port from then on.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(procs),
        "LOCAL_WORLD_SIZE": str(procs),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    # Ranks import what this process has imported. `-m` would search the current folder first, which may have another
    # copy of the package, or files that are named like modules.
    program = f"import sys; sys.path[:] = {sys.path!r}; from lightning_gqsgd.cli.app import main; main()"
    command = [sys.executable, "-c", program, *arguments]
    ranks: list[subprocess.Popen[bytes]] = []
    # By itself, SIGTERM would end this process and leave its ranks.
    with _handling(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)):
        try:
            for rank in range(procs):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                # Also in the new process, which inherits that and is ended by this one.
                with _handling(signal.SIGINT, signal.SIG_IGN):
                    ranks.append(subprocess.Popen(command, env={**os.environ, **place, **own}))
            while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
                time.sleep(0.05)
            return next((code for code in codes if code), 0)
        finally:
            for started in ranks:
                started.kill()
                started.wait()


@contextmanager
def _handling(number: int, handler: Any) -> Iterator[None]:
    """Handle a signal in this context as given. In threads other than the main thread, do nothing: they get no
    signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def joined_ranks() -> Iterator[torch.device]:
    """Join the process group of a launcher's ranks, and leave it at the end of the context. Yields the device.

    Raises:
        ConfigError: a variable of the launcher has no number, there are fewer GPUs than ranks, or ranks do not connect.
    """
    os.environ.update(torchruns_variables(os.environ))
    for name in ("RANK", "WORLD_SIZE"):
        number_in(os.environ, name)  # torch reads them, and would say neither the name nor the remedy
    local = number_in(os.environ, "LOCAL_RANK") if "LOCAL_RANK" in os.environ else 0
    on_gpu = torch.cuda.is_available()
    ranks = local_ranks() or local + 1
    if on_gpu and torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"this machine has {counted(torch.cuda.device_count(), 'GPU')} for {counted(ranks, 'rank')}; start as many "
            "ranks as GPUs, or set CUDA_VISIBLE_DEVICES= (empty) to measure its processors"
        )
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    try:
        if os.environ["RANK"] != "0" and {"MASTER_ADDR", "MASTER_PORT"} <= {*os.environ}:
            wait_for_store(os.environ["MASTER_ADDR"], number_in(os.environ, "MASTER_PORT"), _TIMEOUT_S)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    except ConfigError:
        raise
    except (RuntimeError, ValueError) as error:
        chosen = os.environ.get("GLOO_SOCKET_IFNAME", "not set")
        raise ConfigError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} has no connection to the others "
            f"({first_line(error)}); correct MASTER_ADDR, MASTER_PORT or GLOO_SOCKET_IFNAME (here: {chosen}), or look "
            "for the reason with `gqsgd doctor --nodes` under the same launcher"
        ) from None
    try:
        yield device
    finally:
        dist.destroy_process_group()
