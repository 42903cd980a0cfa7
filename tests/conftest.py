"""Settings that have to be made before anything is imported, options of slow tests, and what processes share."""

import gc
import os
import sys
from collections.abc import Generator

# Tests run in as many processes as there are cores, and most of them start more: threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from tests.distributed.server import SharedServer
from tests.touched import (  # noqa: F401
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_setup,
)

# Tests start some hundred processes. Where the environment has switched byte code off, each of them would compile the
# package anew, and each process of pytest-xdist would write its assertions into 240 files anew, for 15 seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Under `uv run`, Ray copies the working directory and installs its environment anew for the workers: minutes.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# Ray would report to its makers, and wait for them where they cannot be reached.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray's processes have the nice value 15: beside other tests they would get a twentieth of a core, and take minutes.
os.environ.setdefault("RAY_worker_niceness", "0")

# No test of wall-clock time: on a busy machine any example may take long.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# Without a GPU, Triton's kernels run in its interpreter; it decides when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_xdist_auto_num_workers() -> int:
    """A worker more than cores: many tests wait for processes of their own, and for timeouts."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Have the collector of garbage leave alone what was imported, and the tests themselves, which are never garbage.

    These are a million objects. A look at all of them takes a core for half a second, and one test in twenty would
    have to wait for one. After that, the collector looks at new objects once there are 10,000 of them, not 700.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let pytest-xdist's processes share the server that ranks are forked from."""
    if session.config.pluginmanager.hasplugin("dsession"):  # in the main process only
        session.config.pluginmanager.register(SharedServer())
