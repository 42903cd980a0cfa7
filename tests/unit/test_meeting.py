"""Meetings of ranks that are threads of this process, over a store in memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_gqsgd.errors import CollectiveError, ConfigError
from lightning_gqsgd.wire import meeting
from lightning_gqsgd.wire.meeting import Meeting, Pulse
from lightning_gqsgd.wire.peers import Peers
from lightning_gqsgd.wire.store import Store

#: Groups of four ranks that connect every two of them.
PAIRS = [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]


def peers(rank: int, numbers: tuple[int, ...], store: dist.Store) -> Peers:
    """A rank's view of a group; threads need a lock each."""
    return Peers(numbers.index(rank), numbers, store, {}, turn=threading.RLock())


def held(rounds: list[list[tuple[int, ...]]], what: Callable[[int, Meeting], Any]) -> list[Any]:
    """What each rank returns from a meeting of such groups, or raises."""
    store = dist.HashStore()
    results: list[Any] = [None] * sum(map(len, rounds[0]))

    def attend(rank: int) -> None:
        groups = [peers(rank, numbers, store) for groups in rounds for numbers in groups if rank in numbers]
        try:
            with Meeting("f", groups, timedelta(seconds=20)) as one:
                results[rank] = what(rank, one)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=attend, args=(rank,)) for rank in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def meeting_of_one_of_two() -> Meeting:
    """A meeting to which the other rank does not come."""
    return Meeting("f", [peers(1, (0, 1), dist.HashStore())], timedelta(seconds=0.1))


def test_a_difference_in_the_last_group_is_an_error_of_all_in_the_same_words() -> None:
    found = held(PAIRS, lambda rank, one: one.agree([{}, {"bits": 8 if rank == 3 else 4}]))
    assert all(isinstance(error, ConfigError) for error in found)
    assert {str(error) for error in found} == {
        "global ranks 1 and 3 do not agree: bits: 4 != 8; give every rank the same"
    }


def test_an_error_without_words_is_told_by_its_name() -> None:
    def refuse(rank: int, one: Meeting) -> None:
        if rank == 1:
            raise AssertionError
        one.agree()

    first, second, third = held([[(0, 1, 2)]], refuse)
    assert isinstance(second, AssertionError)
    assert str(first) == str(third) == "rank 1 refused: AssertionError"


def test_news_come_in_the_order_of_ranks() -> None:
    def news(rank: int, one: Meeting) -> list[list[Mapping[str, Any]]]:
        one.agree(news={"rank": rank})
        return one.news

    found = held(PAIRS, news)
    told = [[[news["rank"] for news in group] for group in groups] for groups in found]
    assert told == [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), CollectiveError("gone")])
def test_who_is_interrupted_or_finds_others_dead_waits_for_nobody(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with pytest.raises(type(error)), meeting_of_one_of_two():
        raise error
    assert not caplog.records


def test_a_rank_that_nobody_waits_with_says_who_has_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="mine"), meeting_of_one_of_two():
        raise ValueError("mine")
    assert "not all ranks have heard of the error" in caplog.text
    assert "for rank 0" in caplog.text


def test_ranks_that_wait_learn_from_rank_0_who_has_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    numbers = tuple(range(6))
    asked: set[tuple[str, str]] = set()
    errors: list[str] = []
    get, get_all = Store.get, Store.get_all

    def noted(self: Store, key: str) -> str:
        asked.add((threading.current_thread().name, key))
        return get(self, key)

    def all_noted(self: Store, keys: Sequence[str]) -> list[str]:
        asked.update((threading.current_thread().name, key) for key in keys)
        return get_all(self, keys)

    def attend(rank: int) -> None:
        one = Meeting("f", [peers(rank, numbers, store)], timedelta(seconds=1))
        try:
            with one:
                one.agree()
        except CollectiveError as error:
            errors.append(str(error))

    monkeypatch.setattr(Store, "get", noted)
    monkeypatch.setattr(Store, "get_all", all_noted)
    threads = [threading.Thread(target=attend, args=(rank,), name=str(rank)) for rank in numbers[:-1]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(errors) == 5
    assert all("waited 1 s for rank 5. " in error for error in errors), errors
    assert {name for name, key in asked if key == "nonce/5"} == {"0"}


def test_ranks_that_wait_do_not_read_the_minutes_of_all_ranks_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    get = Store.get

    def noted(self: Store, key: str) -> str:
        asked.append(key)
        return get(self, key)

    def come_late(rank: int, one: Meeting) -> None:
        one.agree()
        if rank == 3:
            time.sleep(1)
        one.agree()

    monkeypatch.setattr(Store, "get", noted)
    assert held([[(0, 1, 2, 3)]], come_late) == [None] * 4
    assert asked.count("token") > 30  # those that wait look many times
    assert asked.count("minutes") <= 15  # minutes may be written twice in a round, when ranks leave the one before


@pytest.mark.parametrize("patience_s", [8.0, 60.0])
def test_who_gives_up_last_names_the_rank_that_never_came(patience_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(meeting.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(meeting.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    waiting = meeting._Waiting("f", 1, range(4), patience_s, None)

    def absent() -> list[int]:
        """Ranks 0 and 3 came a little earlier than this one, and have left."""
        return [2] if now[0] < 100 + patience_s - 0.1 else [0, 2, 3]

    def wait() -> None:
        while True:
            waiting.pause(absent)

    with pytest.raises(CollectiveError, match=f"f on rank 1 of 4 waited {patience_s:.0f} s for rank 2. Every rank"):
        wait()


class Alive:
    """Three ranks, whose clock goes on from one look of a rank to the next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = Store(dist.HashStore(), 5)
        self.now = 100.0
        self.pulses = [Pulse(store, rank, range(3), timeout_s=8.0) for rank in range(3)]
        monkeypatch.setattr(meeting.time, "monotonic", lambda: self.now)

    def look(self, rank: int, *beating: int, times: int = 1) -> list[str]:
        """What a rank sees of the others, a second after each beat of some."""
        found = []
        for _ in range(times):
            for other in beating:
                self.pulses[other].beat()
            self.now += 1.01
            found.append(self.pulses[rank].problem())
        return found


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Alive:
    return Alive(monkeypatch)


def test_ranks_are_alive_for_as_long_as_they_beat(alive: Alive) -> None:
    assert alive.look(0, 0, 1, 2, times=30) == [""] * 30  # a compilation of 30 s
    assert alive.look(0, 0, 1, times=7) == [""] * 7
    assert alive.look(0, 0, 1, times=3)[-1] == "no sign of life from rank 2 for 8 s"
    assert alive.look(1, 0, times=20) == [""] * 20  # the others watch rank 0 only


def test_a_rank_that_never_beats_is_not_alive(alive: Alive) -> None:
    assert alive.look(1, times=9) == [""] * 8 + ["no sign of life from rank 0 for 8 s"]


def test_last_words_are_read_by_all(alive: Alive) -> None:
    alive.pulses[2].leave("why")
    assert alive.look(0) == alive.look(1) == ["rank 2 has left: why"]
