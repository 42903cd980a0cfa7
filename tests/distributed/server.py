"""One server for all processes of pytest-xdist, from which the ranks of their tests are forked.

Python's own server belongs to the process that started it. With a server of its own, each process of pytest-xdist
would import Lightning, transformers and torch's compiler once more, which takes 15 seconds of CPU.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest

#: What the server imports before the first fork.
PRELOAD = "tests.distributed.preload"
#: Folders of tests that start ranks.
FOLDERS = ("tests/distributed/", "tests/integrations/", "tests/reliability/")
#: The environment variable with the path of a file, which holds the server's address.
_ADDRESS_FILE = "TESTS_FORKSERVER"


class SharedServer:
    """A plugin of pytest's main process under pytest-xdist: starts the server, which ends with this process."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forkserver-")
        self._file = Path(self._folder.name, "address")
        os.environ[_ADDRESS_FILE] = str(self._file)  # the processes that run tests inherit it

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Start the server when the first process has collected tests that need it."""
        if self._file.exists() or not any(test.startswith(FOLDERS) for test in ids):
            return
        forkserver.set_forkserver_preload([PRELOAD])
        forkserver.ensure_running()
        self._file.write_text(str(forkserver._forkserver._forkserver_address))

    def pytest_unconfigure(self) -> None:
        """Remove the file with the address."""
        self._folder.cleanup()


def fork_context() -> Any:
    """The multiprocessing context whose processes are forked from a server that has imported everything.

    The server is the one of pytest's main process, or this process's own where pytest runs in one process.
    """
    address = Path(os.environ.get(_ADDRESS_FILE, os.devnull))
    if address.is_file():
        _use(address.read_text())
    else:
        forkserver.set_forkserver_preload([PRELOAD])
    return multiprocessing.get_context("forkserver")


def _use(address: str) -> None:
    """Let this process ask the server at an address, instead of one of its own: Python has no public call for it."""
    server = forkserver._forkserver
    if server._forkserver_address is None:
        server._forkserver_address = address
        # A server ends when this end of a pipe is closed; pytest's main process holds the real one.
        server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)
        server.ensure_running = resource_tracker.ensure_running
