"""Real training under torchrun's agent, to which faults happen at random moments from a seed.

After each event, every process has ended or gone on within the timeout and 10 seconds, an error names rank and
collective, no process is left over, every checkpoint can be read, and what torchrun restarts begins at the latest
checkpoint and ends with the bits of an undisturbed run.
"""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.chaos import BEYOND_S, RANKS, LaunchedTraining, Training
from tests.reliability.knobs import CHAOS_SECONDS, chance
from tests.reliability.trainings import SAVED_EVERY, STEPS, WAYS, Way

#: Restarts that torchrun may make. Its processes do not always find each other at the first attempt on a busy machine.
RESTARTS = 8
#: Seconds that torchrun gives its processes to end.
AGENT_S = 30.0


def check_checkpoints(training: Training) -> int:
    """Load every checkpoint; how many there are."""
    steps = training.way.steps(training.folder)
    assert all(step % SAVED_EVERY == 0 for step in steps), steps
    return len(steps)


#: How our errors begin; a purpose is e.g. "gathering what ranks remember" or "average 3 (fragment 0, after step 9)".
OURS = (
    r"gqsgd: (bucket \d+ of step \d+|average \d+ \(.+\)|gathering .+|connecting to \d+ ranks)(, [a-z0-9 ]+,)* failed "
    r"on rank {rank} of {ranks} \(|gqsgd: [^.]+ on rank {rank} of {ranks}(: the store of| waited \d+ s for) "
)
#: What collectives of frameworks and of plain DDP say, e.g. a barrier before a checkpoint.
THEIRS = (
    r"gloo/transport/.+(Timed out waiting|Connection closed by peer|Connection reset by peer|Broken pipe|timeout)",
    r"(Timed out waiting|Application timeout|Read timeout|Connection (closed|reset) by).+",
    r"(monitoredBarrier|connectFullMesh failed|Broken pipe|Connection reset)",
)


def check_error(words: str, rank: int, way: Way) -> None:
    """What the error of a rank says whose peer has died or stands still: ours name the collective and the rank."""
    if way.is_ours or "gqsgd:" in words:
        assert re.search(OURS.format(rank=rank, ranks=RANKS), words), words
    else:
        assert any(re.search(pattern, words) for pattern in THEIRS), words


def check_survivor(training: Training, rank: int) -> str:
    """A rank whose peer was struck had such an error in time, or torchrun ended it first."""
    words = training.words(rank)
    if not words or any(name in words for name in ("SignalException", "SIGTERM")):
        return "torchrun ended the other rank"
    check_error(words, rank, training.way)
    seconds = training.seconds_to_error(rank)
    assert seconds <= training.way.patience_s + BEYOND_S, words
    return f"the other rank raised an error after {seconds:.1f} s"


def check_results(results: list[str], expected: list[str], way: Way) -> None:
    """All ranks have the same bits: those of an undisturbed run, where bits do not depend on times."""
    assert len(set(results)) == 1, results
    assert results[0]
    assert results == expected or not way.is_exact


class Chaos:
    """Events; each method but the last is one, and returns what the event's report says."""

    def __init__(self, folder: Path, numbers: random.Random) -> None:
        self._folder, self._numbers, self._count = folder, numbers, 0
        self._running: LaunchedTraining | None = None
        self._expected: dict[str, list[str]] = {}
        self._way = ""

    def close(self) -> None:
        """End what is still there."""
        if self._running is not None:
            self._running.kill()

    def event(self, name: str, way: str) -> str:
        """Do one event to a training of one way, and check what every event has to leave."""
        self._way = way
        if way not in self._expected:
            results = self._start(0, {}).end()
            check_results(results, results, WAYS[way])
            self._expected[way] = results
        rank, step = self._numbers.randrange(RANKS), self._numbers.randrange(2, STEPS - 6)
        what: str = getattr(self, name)(rank, step)
        assert self._running is not None
        assert self._running.orphans() == []
        return f"{way}, {name}, rank {rank}, step {step}: {what}; {check_checkpoints(self._running)} checkpoints read"

    def kill(self, rank: int, step: int) -> str:
        """SIGKILL to a rank; torchrun restarts."""
        training = self._start(RESTARTS, {})
        training.until_step(step)
        training.strike()
        training.signal(rank, signal.SIGKILL)
        return self._resumed(training, 1 - rank)

    def kill_without_restart(self, rank: int, step: int) -> str:
        """SIGKILL to a rank; the other one says so, or is ended by torchrun."""
        training = self._start(0, {})
        training.until_step(step)
        training.strike()
        training.signal(rank, signal.SIGKILL)
        training.end(training.way.patience_s + BEYOND_S + AGENT_S)
        assert (training.folder / "launcher-error").exists()
        return check_survivor(training, 1 - rank)

    def stop_shortly(self, rank: int, step: int) -> str:
        """SIGSTOP for less than the timeout: nothing happens."""
        training = self._start(0, {})
        training.until_step(step)
        training.signal(rank, signal.SIGSTOP)
        time.sleep(training.way.timeout_s / 4)
        training.signal(rank, signal.SIGCONT)
        return self._undisturbed(training)

    def stop_for_long(self, rank: int, step: int) -> str:
        """SIGSTOP for longer than the timeout: the other rank raises in time, and torchrun restarts."""
        training = self._start(RESTARTS, {})
        training.until_step(step)
        training.strike()
        training.signal(rank, signal.SIGSTOP)
        training.until_error(1 - rank, training.way.patience_s + BEYOND_S)
        training.signal(rank, signal.SIGCONT)
        return self._resumed(training, 1 - rank)

    def fail(self, rank: int, step: int) -> str:
        """An exception on one rank; torchrun restarts."""
        return self._resumed(self._start(RESTARTS, {"kind": "raise", "rank": rank, "step": step}), 1 - rank)

    def slow(self, rank: int, step: int) -> str:
        """One rank takes ten times as long."""
        return self._undisturbed(self._start(0, {"kind": "slow", "rank": rank, "step": step}))

    def full_disk(self, rank: int, step: int) -> str:
        """The disk is full when a checkpoint is written; torchrun restarts on an empty one."""
        training = self._start(RESTARTS, {"kind": "full disk", "rank": 0, "step": step // SAVED_EVERY * SAVED_EVERY})
        return self._resumed(training, 1)

    def interrupt_launcher(self, rank: int, step: int) -> str:
        """SIGINT or SIGTERM to the launcher: everything ends."""
        training = self._start(RESTARTS, {})
        training.until_step(step)
        number = self._numbers.choice([signal.SIGINT, signal.SIGTERM])
        training.signal_launcher(number)
        results = training.end(training.way.patience_s + BEYOND_S + AGENT_S)
        assert results == [""] * RANKS or not training.way.is_ours  # Lightning lets a script go on behind `fit`
        return f"{number.name}, all processes ended"

    def _start(self, restarts: int, fault: dict[str, Any]) -> LaunchedTraining:
        self._count += 1
        self._running = LaunchedTraining(self._folder / f"run-{self._count}", self._way, restarts, fault)
        return self._running

    def _undisturbed(self, training: LaunchedTraining) -> str:
        check_results(training.end(), self._expected[self._way], training.way)
        return "the bits of an undisturbed run" if training.way.is_exact else "equal bits on all ranks"

    def _resumed(self, training: LaunchedTraining, survivor: int) -> str:
        end = self._undisturbed(training)
        step = training.check_resumed()
        return f"{check_survivor(training, survivor)}; restarted at step {step}, and {end}"


EVENTS = ["kill", "kill_without_restart", "stop_shortly", "stop_for_long", "fail", "slow", "full_disk"]
EVENTS += ["interrupt_launcher"]


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[Chaos]:
    made = Chaos(tmp_path, chance("chaos"))
    yield made
    made.close()


@pytest.mark.reliability
@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("way", WAYS)
def test_faults_at_random_moments_end_as_promised(chaos: Chaos, way: str) -> None:
    numbers, counts, begun = chance("events", way), Counter[str](), time.monotonic()
    first = numbers.sample(EVENTS, len(EVENTS))
    while first or time.monotonic() - begun < CHAOS_SECONDS / len(WAYS):
        name = first.pop() if first else numbers.choice(EVENTS)
        print(chaos.event(name, way), flush=True)
        counts[name] += 1
    print(json.dumps(counts))


def test_a_rank_that_is_killed_is_restarted_at_the_latest_checkpoint(tmp_path: Path) -> None:
    training = LaunchedTraining(tmp_path / "run", "hook", RESTARTS, {})
    try:
        training.until_step(SAVED_EVERY + 2)
        training.strike()
        training.signal(1, signal.SIGKILL)
        results = training.end()
        check_results(results, results, training.way)
        assert training.check_resumed() >= SAVED_EVERY
        check_survivor(training, 0)
        assert training.orphans() == []
    finally:
        training.kill()
