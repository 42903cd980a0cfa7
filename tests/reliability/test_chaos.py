"""Real training under torchrun's agent, to which faults happen at random moments from a seed.

After each event, every process has ended or gone on within the hook's timeout and 10 seconds, an error names
rank and collective, no process is left over, every checkpoint can be read, and what torchrun restarts ends with the
bits of an undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.distributed.server import fork_context
from tests.reliability.chaos import SAVED_EVERY, STEPS, TIMEOUT_S, launch
from tests.reliability.knobs import CHAOS_SECONDS, chance

RANKS = 2
#: Restarts that torchrun may make. Its processes do not always find each other at the first attempt on a busy machine.
RESTARTS = 8
#: Seconds beyond the timeout in which an event is to be over.
BEYOND_S = 10.0
#: Seconds that a whole run takes at most on a busy machine, with a restart.
RUN_S = 300.0


class Training:
    """One training under a launcher, and what the files in its folder say about it."""

    def __init__(self, folder: Path, restarts: int, fault: dict[str, Any]) -> None:
        folder.mkdir()
        self.folder = folder
        self._launcher = fork_context().Process(target=launch, args=(folder, RANKS, restarts, fault))
        self._launcher.start()

    def until_step(self, step: int) -> None:
        """Wait until rank 0 has done so many steps."""
        self._wait(lambda: self._number("progress-0") >= step, RUN_S, f"step {step}")

    def pid(self, rank: int) -> int:
        """The process of a rank in the first attempt."""
        return self._number(f"pid-0-{rank}")

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank of the first attempt."""
        os.kill(self.pid(rank), number)

    def signal_launcher(self, number: signal.Signals) -> None:
        """Send a signal to the launcher."""
        assert self._launcher.pid is not None
        os.kill(self._launcher.pid, number)

    def until_error(self, rank: int, within_s: float) -> str:
        """The error that a rank of the first attempt ends with."""
        file = self.folder / f"error-0-{rank}"
        self._wait(lambda: file.exists() and bool(file.read_text()), within_s, f"the error of rank {rank}")
        return file.read_text()

    def end(self, within_s: float = RUN_S) -> list[str]:
        """Wait for the launcher; the results of all ranks."""
        self._wait(lambda: not self._launcher.is_alive(), within_s, "the launcher's end")
        files = [self.folder / f"result-{rank}" for rank in range(RANKS)]
        return [file.read_text() if file.exists() else "" for file in files]

    def orphans(self) -> list[int]:
        """Processes of ranks that are still there, after those that are about to end."""
        pids = [int(file.read_text()) for file in self.folder.glob("pid-*")]
        deadline = time.monotonic() + BEYOND_S
        while left := [pid for pid in pids if _is_alive(pid)]:
            if time.monotonic() > deadline:
                return left
            time.sleep(0.1)
        return []

    def kill(self) -> None:
        """End everything."""
        pids = [int(file.read_text()) for file in self.folder.glob("pid-*") if file.read_text()]
        self._launcher.kill()
        for pid in pids:
            if _is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self._launcher.join()

    def _number(self, name: str) -> int:
        file = self.folder / name
        text = file.read_text() if file.exists() else ""
        return int(text or "0")

    def _wait(self, done: Callable[[], bool], within_s: float, what: str) -> None:
        deadline = time.monotonic() + within_s
        while not done():
            if time.monotonic() > deadline:
                errors = [file.read_text() for file in self.folder.glob("*error*")]
                raise AssertionError(f"waited {within_s:.0f} s for {what} in {self.folder}: {errors}")
            time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def check_checkpoints(folder: Path) -> int:
    """Load every checkpoint; how many there are."""
    files = sorted(folder.glob("checkpoint-*.pt"))
    for file in files:
        assert f"{torch.load(file, weights_only=True)['step']:03d}" in file.name
    return len(files)


def check_error(text: str, rank: int) -> None:
    """An error of a rank whose peer has died or stands still."""
    assert "CollectiveError" in text, text
    assert f"on rank {rank} of {RANKS}" in text, text
    assert "bucket" in text or "waited" in text or "state_dict" in text, text


class Chaos:
    """Events; each method is one, and returns what the event's report says."""

    def __init__(self, folder: Path, numbers: random.Random) -> None:
        self._folder, self._numbers, self._count = folder, numbers, 0
        self._running: Training | None = None
        self.expected = self._start(0, {}).end()
        assert len(set(self.expected)) == 1
        assert self.expected[0]

    def close(self) -> None:
        """End what is still there."""
        if self._running is not None:
            self._running.kill()

    def event(self, name: str) -> str:
        """Do one event, and check what every event has to leave."""
        rank, step = self._numbers.randrange(RANKS), self._numbers.randrange(2, STEPS - 6)
        what: str = getattr(self, name)(rank, step)
        assert self._running is not None
        assert self._running.orphans() == []
        checkpoints = check_checkpoints(self._running.folder)
        return f"{name}, rank {rank}, step {step}: {what}; {checkpoints} checkpoints can be read"

    def kill(self, rank: int, step: int) -> str:
        """SIGKILL to a rank; torchrun restarts."""
        training = self._start(RESTARTS, {})
        training.until_step(step)
        training.signal(rank, signal.SIGKILL)
        return self._resumed(training)

    def kill_without_restart(self, rank: int, step: int) -> str:
        """SIGKILL to a rank; the other one says so, or is ended by torchrun."""
        training = self._start(0, {})
        training.until_step(step)
        training.signal(rank, signal.SIGKILL)
        training.end(TIMEOUT_S + BEYOND_S + 30)  # torchrun gives processes 30 seconds to end
        assert (training.folder / "launcher-error").exists()
        error = training.folder / f"error-0-{1 - rank}"
        text = error.read_text() if error.exists() else ""
        if "SignalException" in text or not text:
            return "torchrun ended the other rank"
        check_error(text, 1 - rank)
        return "the other rank raised CollectiveError"

    def stop_shortly(self, rank: int, step: int) -> str:
        """SIGSTOP for less than the timeout: nothing happens."""
        training = self._start(0, {})
        training.until_step(step)
        training.signal(rank, signal.SIGSTOP)
        time.sleep(TIMEOUT_S / 4)
        training.signal(rank, signal.SIGCONT)
        assert training.end() == self.expected
        return "the bits of an undisturbed run"

    def stop_for_long(self, rank: int, step: int) -> str:
        """SIGSTOP for longer than the timeout: the other rank raises in time, and torchrun restarts."""
        training = self._start(RESTARTS, {})
        training.until_step(step)
        training.signal(rank, signal.SIGSTOP)
        begun = time.monotonic()
        text = training.until_error(1 - rank, TIMEOUT_S + BEYOND_S)
        seconds = time.monotonic() - begun
        check_error(text, 1 - rank)
        training.signal(rank, signal.SIGCONT)
        return f"CollectiveError after {seconds:.1f} s; {self._resumed(training)}"

    def fail(self, rank: int, step: int) -> str:
        """An exception on one rank; torchrun restarts."""
        return self._resumed(self._start(RESTARTS, {"kind": "raise", "rank": rank, "step": step}))

    def slow(self, rank: int, step: int) -> str:
        """One rank takes ten times as long."""
        assert self._start(0, {"kind": "slow", "rank": rank, "step": step}).end() == self.expected
        return "the bits of an undisturbed run"

    def full_disk(self, rank: int, step: int) -> str:
        """The disk is full when a checkpoint is written; torchrun restarts on an empty one."""
        training = self._start(RESTARTS, {"kind": "full disk", "rank": 0, "step": step // SAVED_EVERY * SAVED_EVERY})
        return self._resumed(training)

    def interrupt_launcher(self, rank: int, step: int) -> str:
        """SIGINT or SIGTERM to the launcher: everything ends."""
        training = self._start(RESTARTS, {})
        training.until_step(step)
        number = self._numbers.choice([signal.SIGINT, signal.SIGTERM])
        training.signal_launcher(number)
        results = training.end(TIMEOUT_S + BEYOND_S + 30)
        assert results == [""] * RANKS
        return f"{number.name}, all processes ended"

    def _start(self, restarts: int, fault: dict[str, Any]) -> Training:
        self._count += 1
        self._running = Training(self._folder / f"run-{self._count}", restarts, fault)
        return self._running

    def _resumed(self, training: Training) -> str:
        assert training.end() == self.expected
        assert (training.folder / "pid-1-0").exists()
        return "restarted, and the bits of an undisturbed run"


EVENTS = ["kill", "kill_without_restart", "stop_shortly", "stop_for_long", "fail", "slow", "full_disk"]
EVENTS += ["interrupt_launcher"]


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[Chaos]:
    made = Chaos(tmp_path, chance("chaos"))
    yield made
    made.close()


@pytest.mark.reliability
@pytest.mark.timeout(24 * 3600)
def test_faults_at_random_moments_end_as_promised(chaos: Chaos) -> None:
    numbers, counts, begun = chance("events"), Counter[str](), time.monotonic()
    first = numbers.sample(EVENTS, len(EVENTS))
    while first or time.monotonic() - begun < CHAOS_SECONDS:
        name = first.pop() if first else numbers.choice(EVENTS)
        print(chaos.event(name), flush=True)
        counts[name] += 1
    print(json.dumps(counts))
