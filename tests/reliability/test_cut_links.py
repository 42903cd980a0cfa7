"""Training on two hosts whose link is cut for a while, or for longer than anybody waits.

Needs root and iproute2, see `netlab.lab`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from netlab.lab import NetLab
from tests.marks import needs_root
from tests.reliability.chaos import BEYOND_S, RANKS, TrainingOnHosts
from tests.reliability.knobs import chance, scaled
from tests.reliability.test_chaos import check_checkpoints, check_error, check_results, check_survivor
from tests.reliability.trainings import STEPS, WAYS

#: Ways whose start is short enough for several runs.
CUT_WAYS = ("hook", "local steps", "Lightning")
#: Starts of a training at most after the first. Gloo may give up its connections before both ranks are there.
STARTS = 4


@pytest.fixture
def lab() -> Iterator[NetLab]:
    with NetLab(RANKS, "100mbit") as made:
        yield made


class CutLinks:
    """Events; each method is one, and returns what its report says."""

    def __init__(self, folder: Path, way: str, lab: NetLab) -> None:
        self._folder, self._way, self._lab = folder, way, lab
        self._expected: list[str] = []
        self.numbers = chance("links", way)

    def undisturbed(self) -> None:
        """Train without any event, for the bits to compare with."""
        self._expected = self._started("undisturbed").end()
        check_results(self._expected, self._expected, WAYS[self._way])

    def cut_shortly(self, name: str) -> str:
        """The link is cut for less than the timeout: nothing happens."""
        training, host = self._cut(name)
        time.sleep(training.way.timeout_s / 4)
        self._lab.mend(host)
        check_results(training.end(), self._expected, training.way)
        return f"host {host}: the bits of an undisturbed run"

    def cut_for_long(self, name: str) -> str:
        """The link is cut for longer than the timeout: all ranks say so, and a new start goes on."""
        training, host = self._cut(name)
        for rank in range(RANKS):
            check_error(training.until_error(rank, training.way.patience_s + BEYOND_S), rank, training.way)
        seconds = max(training.seconds_to_error(rank) for rank in range(RANKS))
        assert seconds <= training.way.patience_s + BEYOND_S
        self._lab.mend(host)
        training.end()
        return f"host {host}: errors on all ranks after {seconds:.1f} s; {self._again(training)}"

    def kill(self, name: str) -> str:
        """SIGKILL to a rank: the other one hears of it, and a new start goes on."""
        training, rank = self._started(name), self.numbers.randrange(RANKS)
        training.until_step(self.numbers.randrange(2, STEPS - 6))
        training.strike()
        training.signal(rank, signal.SIGKILL)
        training.until_error(1 - rank, training.way.patience_s + BEYOND_S)
        said = check_survivor(training, 1 - rank)
        training.end()
        return f"rank {rank}: {said}; {self._again(training)}"

    def _started(self, name: str, attempt: int = 0) -> TrainingOnHosts:
        return TrainingOnHosts(self._folder / name, self._way, self._lab, attempt)

    def _cut(self, name: str) -> tuple[TrainingOnHosts, int]:
        training, host = self._started(name), self.numbers.randrange(RANKS)
        training.until_step(self.numbers.randrange(2, STEPS - 6))
        training.strike()
        self._lab.cut(host)
        return training, host

    def _again(self, before: TrainingOnHosts) -> str:
        for attempt in range(1, STARTS):
            training = self._started(before.folder.name, attempt)
            results = training.end()
            if all(results):
                check_results(results, self._expected, training.way)
                step, checkpoints = training.check_resumed(), check_checkpoints(training)
                return f"from step {step}, the bits of an undisturbed run at start {attempt}; {checkpoints} checkpoints"
        raise AssertionError([file.read_text() for file in before.folder.glob("error-*")])


@needs_root
@pytest.mark.reliability
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", CUT_WAYS)
def test_cut_links_end_as_promised(tmp_path: Path, lab: NetLab, way: str) -> None:
    links = CutLinks(tmp_path, way, lab)
    links.undisturbed()
    for number in range(scaled(2)):
        for event in ("cut_shortly", "cut_for_long", "kill"):
            print(f"{way}, {event}: {getattr(links, event)(f'{event}-{number}')}", flush=True)
