"""Running one command as every rank of a lab."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from netlab.lab import GRACE_S, NetLab

#: Exit code of a command that ran past its time limit, as of the shell's ``timeout``.
TIMED_OUT = 124


def run_everywhere(
    lab: NetLab, command: Sequence[str], timeout: float | None = None, plain_rank: int | None = None
) -> int:
    """Run a command as every rank, and copy the output of all ranks line by line to standard output.

    When one rank fails, the others are stopped after `GRACE_S` seconds.

    Args:
        lab: the hosts, inside its ``with``.
        command: program and arguments; every rank gets torchrun's environment variables.
        timeout: seconds after which all ranks are stopped; None: no limit.
        plain_rank: rank whose lines are copied as they are; the lines of all others begin with their host's name.

    Returns:
        The exit code of the rank that failed first, 0 if none failed, or `TIMED_OUT`.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    places = [(host, local_rank) for host in range(lab.hosts) for local_rank in range(lab.ranks_per_host)]
    processes = [lab.popen(host, command, local_rank, **pipes) for host, local_rank in places]
    names = [f"host{host}" + f".{local_rank}" * (lab.ranks_per_host > 1) for host, local_rank in places]
    prefixes = ["" if rank == plain_rank else f"[{name}] " for rank, name in enumerate(names)]
    readers = [
        threading.Thread(target=_copy_lines, args=(prefix, process), daemon=True)
        for prefix, process in zip(prefixes, processes, strict=True)
    ]
    for reader in readers:
        reader.start()
    code = _wait(lab, processes, timeout)
    for reader in readers:
        reader.join(GRACE_S)
    return code


def _wait(lab: NetLab, processes: Sequence[subprocess.Popen[str]], timeout: float | None) -> int:
    """Wait until all ranks have ended, or stop them; returns the exit code of `run_everywhere`."""
    deadline = time.monotonic() + timeout if timeout else float("inf")
    code, failed_at = 0, float("inf")
    while None in (codes := [process.poll() for process in processes]):
        now = time.monotonic()
        if not code and (code := _first_failure(codes)):
            failed_at = now
        if now > deadline:
            lab.stop()
            print(f"netlab: stopped after {timeout:.0f} s", flush=True)
            return code or TIMED_OUT
        if now > failed_at + GRACE_S:
            lab.stop()
            return code
        time.sleep(0.05)
    return code or _first_failure(codes)


def _first_failure(codes: Sequence[int | None]) -> int:
    return next((code for code in codes if code), 0)


def _copy_lines(prefix: str, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(f"{prefix}{line}")
        sys.stdout.flush()
