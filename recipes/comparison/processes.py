"""The processes of the runs of a comparison: fresh ones for each run, or copies of one that has its imports done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from recipes.comparison.plan import Cell
from recipes.launch.forking import PROGRAM, end_with_parent
from recipes.launch.processes import end_session, folder_argument, local_processes, run_command

#: Whether the kernel ends processes with their parents.
_CAN_FOLLOW = sys.platform == "linux"


class Running(Protocol):
    """A run under way."""

    def poll(self) -> int | None:
        """The exit code; None while the run goes on."""

    def end(self) -> None:
        """End what is left of the run; after a normal end nothing is left."""


def arguments_of(cell: Cell) -> list[str]:
    """Command line of one cell, without the script."""
    return [*cell.overrides, folder_argument(cell.folder)]


def command(cell: Cell) -> list[str]:
    """Command line of one cell in fresh processes."""
    return run_command(arguments_of(cell))


class FreshRun:
    """A run whose processes import everything themselves."""

    def __init__(self, cell: Cell, log: Path) -> None:
        with open(log, "wb") as output:
            # The run has a session of its own, so that an interrupt ends the run with all its processes.
            self._process = subprocess.Popen(
                command(cell),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A comparison that is killed takes its run along. With SIGTERM a run takes down its lab of hosts.
                preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM) if _CAN_FOLLOW else None,
            )

    def poll(self) -> int | None:
        """See `Running`."""
        return self._process.poll()

    def end(self) -> None:
        """See `Running`."""
        end_session(self._process)


class Starter:
    """Starts the runs of a comparison, each in processes that no other run has used."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._errors: Any = None

    def start(self, cell: Cell, log: Path) -> Running:
        """Start a run."""
        if not can_fork(cell):
            return FreshRun(cell, log)
        if self._server is None or self._server.poll() is not None:
            self.close()
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the server)
            self._server = subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
        return ForkedRun(cell, log, self._server, self._errors)

    def close(self) -> None:
        """End the process that forks runs."""
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
            self._server = None
            self._errors.close()


def can_fork(cell: Cell) -> bool:
    """Whether a run can have processes that were forked after the imports.

    CUDA does not survive a fork, a lab's hosts are namespaces that processes are started in, and libraries read the
    environment variables of a hardware profile when they are imported. Elsewhere than on Linux, system libraries do
    not allow a fork without exec.
    """
    hardware, trainer = cell.config["hardware"], cell.config["trainer"]
    return bool(
        sys.platform == "linux"
        and (hardware["name"], trainer["accelerator"], trainer["num_nodes"]) == ("cpu", "cpu", 1)
        and not any(value is not None for value in hardware["env"].values())
    )


class ForkedRun:
    """A run whose processes are copies of a server's, see `recipes.launch.forking`.

    Args:
        cell: the run.
        log: file that gets its output.
        server: the server.
        errors: file with what the server has written on standard error.
    """

    def __init__(self, cell: Cell, log: Path, server: subprocess.Popen[bytes], errors: Any) -> None:
        assert server.stdin is not None
        assert server.stdout is not None
        os.set_blocking(server.stdout.fileno(), False)
        self._server, self._log, self._errors = server, log, errors
        self._received = b""
        self._session: int | None = None
        self._code: int | None = None
        request = {
            "modules": modules_of(cell.config),
            "arguments": arguments_of(cell),
            "ranks": local_processes("cpu", cell.config["trainer"]["devices"]),
            "log": str(log),
        }
        log.touch()
        try:
            server.stdin.write(json.dumps(request).encode() + b"\n")
            server.stdin.flush()
        except BrokenPipeError:
            pass  # the server has ended; `poll` reads why

    def poll(self) -> int | None:
        """See `Running`."""
        if self._code is not None:
            return self._code
        assert self._server.stdout is not None
        self._received += self._server.stdout.read() or b""
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            answer = json.loads(line)
            self._session, self._code = answer.get("pid", self._session), answer.get("code")
        if self._code is None and not lines and self._server.poll() is not None:
            self._errors.seek(0)
            self._log.write_bytes(self._log.read_bytes() + self._errors.read())
            self._code = self._server.returncode or 1
        return self._code

    def end(self) -> None:
        """See `Running`."""
        if self.poll() is not None:
            return
        if self._session is not None:
            # Its processes may have ended since. An error here would hide the interrupt after which this is called.
            with suppress(ProcessLookupError):
                os.killpg(self._session, signal.SIGKILL)
        # What the server still says of this run must not be taken for the next run's.
        self._server.kill()
        self._server.wait()


def modules_of(config: dict[str, Any]) -> Sequence[str]:
    """The modules whose functions a configuration calls."""
    targets = (node["_target_"] for node in config.values() if isinstance(node, dict) and "_target_" in node)
    return sorted({target.rpartition(".")[0] for target in targets} | {"lightning_gqsgd.frameworks.trainer_lightning"})
