"""One training under torchrun's agent, or on the hosts of a lab; see `trainings`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from netlab.lab import NetLab
from tests.distributed.server import fork_context
from tests.reliability.trainings import WAYS, Run, Way, latest_step, train

RANKS = 2
#: Seconds beyond the timeout in which an event is to be over.
BEYOND_S = 10.0
#: Seconds that a whole run takes at most on a busy machine, with a restart.
RUN_S = 300.0


def launch(folder: Path, way: str, restarts: int, fault: dict[str, int | str]) -> None:
    """Train under torchrun's agent, in this process and its children."""
    # Without it, ranks that torchrun has started again find the addresses of those that have ended, and wait for them:
    # the agent keeps one store for all attempts (https://github.com/pytorch/pytorch/issues/135712).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=RANKS,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=folder.name,
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="fork",
    )
    try:
        elastic_launch(config, _under_agent)(folder, way, fault)
    except BaseException:
        (folder / "launcher-error").write_text(traceback.format_exc())
        raise


def _under_agent(folder: Path, way: str, fault: dict[str, int | str]) -> None:
    train(way, Run.of_environment(folder, int(os.environ["TORCHELASTIC_RESTART_COUNT"]), fault))


class Training:
    """A training, and what the files in its folder say about it.

    Args:
        folder: folder of the files.
        way: see `trainings.WAYS`.
    """

    def __init__(self, folder: Path, way: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.way_name = folder, way

    @property
    def way(self) -> Way:
        """How it trains."""
        return WAYS[self.way_name]

    def until_step(self, step: int) -> None:
        """Wait until rank 0 has done so many steps."""
        self.wait(lambda: self._number("progress-0") >= step, RUN_S, f"step {step}")

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank of the first attempt."""
        os.kill(self._number(f"pid-0-{rank}"), number)

    def strike(self) -> None:
        """Keep which checkpoint is there, and the time: a fault happens now."""
        (self.folder / "struck").write_text(str(latest_step(self.folder, RANKS)))

    def seconds_to_error(self, rank: int) -> float:
        """Seconds from the fault to the error of a rank of the first attempt."""
        return (self.folder / f"error-0-{rank}").stat().st_mtime - (self.folder / "struck").stat().st_mtime

    def words(self, rank: int) -> str:
        """What the exception says that a rank of the first attempt ended with; empty: it had none."""
        file = self.folder / f"words-0-{rank}"
        return file.read_text() if file.exists() and (self.folder / f"error-0-{rank}").exists() else ""

    def until_error(self, rank: int, within_s: float) -> str:
        """What the exception says that a rank of the first attempt ends with."""
        file = self.folder / f"error-0-{rank}"
        self.wait(lambda: file.exists() and bool(file.read_text()), within_s, f"the error of rank {rank}")
        return self.words(rank)

    def check_resumed(self) -> int:
        """Every new attempt began at the latest checkpoint that it found, and forgot none; returns the last one's step.

        Raises:
            AssertionError: one did not.
        """
        struck = self._number("struck")
        firsts = {file.name.removeprefix("first-"): int(file.read_text()) for file in self.folder.glob("first-*")}
        again = {name: step for name, step in firsts.items() if not name.startswith("0-")}
        for name, step in again.items():
            assert step == self._number(f"found-{name}"), (name, step, self._number(f"found-{name}"))
            assert step >= struck, (name, step, struck)
        last = max(int(name.split("-")[0]) for name in again)
        assert {f"{last}-{rank}" for rank in range(RANKS)} <= again.keys(), again
        return again[f"{last}-0"]

    def results(self) -> list[str]:
        """The results of all ranks; empty where a rank has none."""
        files = [self.folder / f"result-{rank}" for rank in range(RANKS)]
        return [file.read_text() if file.exists() else "" for file in files]

    def orphans(self) -> list[int]:
        """Processes of ranks that are still there, after those that are about to end."""
        deadline = time.monotonic() + BEYOND_S
        while left := [pid for pid in self.pids() if is_alive(pid)]:
            if time.monotonic() > deadline:
                return left
            time.sleep(0.1)
        return []

    def pids(self) -> list[int]:
        """The processes of all ranks and attempts."""
        return [int(text) for file in self.folder.glob("pid-*") if (text := file.read_text())]

    def wait(self, done: Callable[[], bool], within_s: float, what: str) -> None:
        """Wait until something is so.

        Raises:
            AssertionError: it took longer than ``within_s`` seconds.
        """
        deadline = time.monotonic() + within_s
        while not done():
            if time.monotonic() > deadline:
                errors = [file.read_text() for file in self.folder.glob("*error*")]
                raise AssertionError(f"waited {within_s:.0f} s for {what} in {self.folder}: {errors}")
            time.sleep(0.02)

    def _number(self, name: str) -> int:
        file = self.folder / name
        text = file.read_text() if file.exists() else ""
        return int(text or "0")


class LaunchedTraining(Training):
    """A training under torchrun's agent.

    Args:
        folder, way: see `Training`.
        restarts: how often the agent may start it again.
        fault: see `trainings.Run`.
    """

    def __init__(self, folder: Path, way: str, restarts: int, fault: dict[str, Any]) -> None:
        super().__init__(folder, way)
        self._launcher = fork_context().Process(target=launch, args=(folder, way, restarts, fault))
        self._launcher.start()

    def signal_launcher(self, number: signal.Signals) -> None:
        """Send a signal to the launcher."""
        assert self._launcher.pid is not None
        os.kill(self._launcher.pid, number)

    def end(self, within_s: float = RUN_S) -> list[str]:
        """Wait for the launcher; the results of all ranks."""
        self.wait(lambda: not self._launcher.is_alive(), within_s, "the launcher's end")
        return self.results()

    def kill(self) -> None:
        """End everything."""
        self._launcher.kill()
        for pid in self.pids():
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self._launcher.join()


class TrainingOnHosts(Training):
    """A training with one rank on each host of a lab.

    Args:
        folder, way: see `Training`.
        lab: the hosts.
        attempt: how often the training in this folder was started before.
    """

    def __init__(self, folder: Path, way: str, lab: NetLab, attempt: int) -> None:
        super().__init__(folder, way)
        command = [sys.executable, "-m", "tests.reliability.trainings", str(folder), way, str(attempt)]
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._ranks = [lab.popen(host, command, **streams) for host in range(lab.hosts)]

    def end(self, within_s: float = RUN_S) -> list[str]:
        """Wait for all ranks; their results."""
        self.wait(lambda: all(rank.poll() is not None for rank in self._ranks), within_s, "the end of all ranks")
        return self.results()


def is_alive(pid: int) -> bool:
    """Whether a process is there, and has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
