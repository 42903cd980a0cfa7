"""Lets all ranks agree on a start over torch's store, before they have a process group of their own.

A `Meeting` uses only the store of torch.distributed. So if a rank calls something else, or dies, the other ranks get a
timeout and an error that names it. They never start a collective that meets the wrong partner.

One round goes as follows. Every rank writes a card: what it is about to do, or why it refuses. Rank 0 of the process
group compares the cards and writes the minutes: the verdict, a token that was never used before, the nonces of the
cards, and the news on them. The others acknowledge minutes that list their own nonce; when all have, rank 0 writes that
the round is done, and all leave with the verdict. Minutes grow with the number of ranks. So the token is also written
alone, and the others look at that, and read minutes only if they are new.

Nonces and tokens are random. So cards of an earlier attempt, or of processes that have died since, do no harm: no rank
acknowledges minutes that list them, and rank 0 writes new minutes when a new card arrives.

The ranks create their process groups under the token as a key. No rank counts attempts, so an attempt that failed on
some ranks does no harm, nor does a store that outlives its processes.

Ranks may compile kernels for minutes, so they then wait for each other longer than the timeout. Without signs of life,
the other ranks would wait as long for a rank that has died. So each rank has a thread that increments a counter in the
store. A rank whose counter does not change for the timeout is considered dead. Rank 0 watches all ranks, and the others
watch only rank 0, which keeps the number of requests small. A rank that leaves by an error writes last words, which all
ranks read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

import torch.distributed as dist

from lightning_gqsgd.errors import CollectiveError, ConfigError
from lightning_gqsgd.wire.agreement import ERROR_LENGTH, Card, named, one_of, verdict
from lightning_gqsgd.wire.peers import Peers, peers_of
from lightning_gqsgd.wire.store import Store

logger = logging.getLogger(__name__)

#: Seconds that a rank that refuses waits at most until the others know of its refusal.
REFUSAL_PATIENCE_S = 60.0

#: Seconds beyond the timeout that a rank waits for live ranks that may have to compile kernels.
COMPILE_PATIENCE_S = 600.0

#: Seconds of waiting after which a rank logs which ranks it waits for.
SAY_AFTER_S = 10.0

#: Shortest and longest pause between two reads of the store, in seconds. The longest one is longer with so many ranks
#: that they would keep the store's one thread busy.
PAUSES_S = (0.001, 0.1)
_PAUSE_OF_EACH_RANK_S = 1e-4

#: Seconds between two beats, and between two checks of the beats of others, at most.
PERIOD_S = 1.0
#: Seconds that the end of a meeting waits for the thread that gives signs of life.
STOP_S = 2.0
_LAST_WORDS = "last words"

#: For each set of ranks, the lock of the thread of this process that meets them.
_turns: dict[str, Any] = {}
_turns_lock = threading.Lock()


class Meeting:
    """Rounds in which all ranks of some process groups agree, and in which an error of one rank is raised on all ranks.

    Every rank of the groups opens the meeting and holds the same rounds. If a rank leaves the ``with`` block by an
    exception, the round of every other rank raises a ConfigError that names the rank and its reason::

        with Meeting("register_gqsgd", [group], timeout) as meeting:
            config = make_config(**fields)                  # an error in here is told to all ranks
            (key,) = meeting.agree([config.to_dict()])      # raises on all ranks if they differ
            with meeting.preparing():
                ...                                         # may take longer on some ranks, while they live

    Threads of one process meet the same ranks one after another, and have to do so in the same order on all ranks.

    Args:
        purpose: the function that was called, for errors.
        groups: process groups. If there are several, they have to connect every two ranks: news go round the first
            group, then round the second group, and then round the first group again.
        timeout: how long to wait for other ranks in a round.

    Attributes:
        groups: the process groups.
    """

    def __init__(self, purpose: str, groups: Sequence[dist.ProcessGroup | Peers], timeout: timedelta) -> None:
        self._purpose = purpose
        self._timeout_s = timeout.total_seconds()
        self.groups = groups
        self._circles = [_Circle(group, self._timeout_s) for group in groups]
        self._keys: list[str] = []
        self._told = False
        self._turn = ExitStack()

    def __enter__(self) -> Meeting:
        # If two threads held a meeting of the same ranks at once, each would read the cards of the other.
        for turn in sorted({circle.turn for circle in self._circles}, key=id):
            turn.acquire()
            self._turn.callback(turn.release)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._turn:
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """Tell the other ranks of an error that they do not know yet."""
        if error is None or self._told:
            return
        self._told = True
        # An interrupt ends the process, which should not wait for other ranks. Nor does it help to wait for dead ranks.
        if not isinstance(error, Exception) or isinstance(error, CollectiveError):
            self._say_last_words(error)
            return
        try:
            patience_s = min(self._timeout_s, REFUSAL_PATIENCE_S)
            self._hold((), str(error) or type(error).__name__, patience_s)
        except CollectiveError as unheard:
            logger.warning("gqsgd: not all ranks have heard of the error: %s", unheard)
            self._say_last_words(error)

    def _say_last_words(self, error: BaseException) -> None:
        """Tell the error to the ranks that wait, or will wait, until this rank is prepared."""
        with suppress(dist.DistNetworkError, dist.DistStoreError):
            for pulse in self._pulses():
                pulse.leave(str(error) or type(error).__name__)

    def _pulses(self) -> list[Pulse]:
        return [circle.pulse for circle in self._circles if circle.pulse is not None]

    def agree(self, facts: Sequence[Mapping[str, Any]] = (), news: Mapping[str, Any] | None = None) -> list[str]:
        """Hold a round in which the facts of all ranks are compared. A collective.

        Args:
            facts: for each group, the facts that its ranks must have in common: plain values by name; empty if there
                are none.
            news: what this rank tells the others, plain values by name, which need not be equal; see `news`.

        Returns:
            For each group, a key that was never used before, the same on all its ranks.

        Raises:
            ConfigError: if ranks differ, or if a rank refuses. It is raised on every rank.
            CollectiveError: if a rank did not arrive in time.
        """
        self._keys = self._agree(facts, self._timeout_s, news)
        return self._keys

    @property
    def news(self) -> list[list[Mapping[str, Any]]]:
        """The news of the latest round: for each group, those of its ranks, in the order of ranks."""
        return [circle.news for circle in self._circles]

    def news_by_rank(self) -> dict[int, Mapping[str, Any]]:
        """Returns the news of the latest round, by the ranks' numbers among all processes."""
        return {
            number: news for circle in self._circles for number, news in zip(circle.numbers, circle.news, strict=True)
        }

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Show other ranks that this rank is alive while the block runs, and then wait until they reach its end. A
        collective, to be called once, after `agree`.

        Raises:
            ConfigError: if a rank refuses, e.g. because of an error in its block. It is raised on every rank.
            CollectiveError: if a rank gave no sign of life for the timeout, has left, or did not arrive in time.
        """
        for circle, key in zip(self._circles, self._keys, strict=True):
            circle.show_life(key)
        pulses = self._pulses()
        if pulses:
            self._turn.callback(Heartbeat(pulses).stop)
        yield
        self._agree((), self._timeout_s + COMPILE_PATIENCE_S)

    def _agree(
        self, facts: Sequence[Mapping[str, Any]], patience_s: float, news: Mapping[str, Any] | None = None
    ) -> list[str]:
        try:
            keys, problem = self._hold(facts, "", patience_s, news)
        except BaseException as error:
            self._told = True  # the other ranks notice on their own that this rank has left
            self._say_last_words(error)
            raise
        if problem:
            self._told = True
            raise ConfigError(problem)
        return keys

    def _hold(
        self,
        facts: Sequence[Mapping[str, Any]],
        error: str,
        patience_s: float,
        news: Mapping[str, Any] | None = None,
    ) -> tuple[list[str], str]:
        """Hold a round in each group, and again in reverse order, so that a problem in the last group reaches all
        ranks."""
        keys: dict[int, str] = {}
        problem = error
        is_own = bool(error)
        there = list(range(len(self._circles)))
        for index in [*there, *there[-2::-1]]:
            card = Card(self._purpose, facts[index] if facts else {}, problem, is_own, news or {})
            key, heard = self._circles[index].round(card, patience_s)
            keys.setdefault(index, key)
            # The first problem is reported to all ranks, also on the way back.
            if heard and not problem:
                problem = heard
                is_own = False
        return [keys[index] for index in there], problem


class _Circle:
    """The rounds of one process group.

    Attributes:
        news: the news on the cards of the latest round, in the order of ranks.
    """

    def __init__(self, group: dist.ProcessGroup | Peers, timeout_s: float) -> None:
        peers = peers_of(group)
        self.rank = peers.own
        self.size = peers.size()
        self.numbers = peers.numbers
        members = "_".join(map(str, peers.numbers))
        with _turns_lock:
            self.turn = peers.turn or _turns.setdefault(members, threading.RLock())
        name = hashlib.blake2b(members.encode(), digest_size=8).hexdigest()
        self._timeout_s = timeout_s
        self._store = Store(peers.store, timeout_s).under(f"gqsgd/meeting/{name}")
        self._leader = ""  # the nonce of rank 0, as far as it is known
        self._seen = ""  # the token of the latest minutes that were read
        self.pulse: Pulse | None = None
        self.news: list[Mapping[str, Any]] = []

    def show_life(self, key: str) -> None:
        """Start to watch whether the other ranks are alive; ``key`` is the key of a round."""
        if self.size > 1:
            self.pulse = Pulse(self._store.under(f"alive/{key}"), self.rank, self.numbers, self._timeout_s)

    def round(self, card: Card, patience_s: float) -> tuple[str, str]:
        """Hold a round. Returns a key that was never used before, and the problem, which is empty if there is none.

        Raises:
            CollectiveError: if a rank did not arrive within ``patience_s`` seconds, if it is not alive, or if the store
                is gone.
        """
        nonce = secrets.token_hex(8)
        if self.size == 1:
            self.news = [card.news]
            return nonce, verdict([card], self.numbers)
        self._leader = ""
        try:
            self._store.set(f"card/{self.rank}", card.to_json())
            self._store.set(f"nonce/{self.rank}", nonce)
            waiting = _Waiting(card.purpose, self.rank, self.numbers, patience_s, self.pulse)
            try:
                return self._lead(waiting) if self.rank == 0 else self._follow(nonce, waiting)
            finally:  # a nonce in the store says that its rank is in the round; an empty one, that it has left
                with suppress(dist.DistNetworkError, dist.DistStoreError):  # an interrupt is not the store's error
                    self._store.set(f"nonce/{self.rank}", "")
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise CollectiveError(
                f"gqsgd: {card.purpose} on {one_of(self.rank, self.numbers)}: the store of torch.distributed is gone "
                f"({error}); it needs the process that holds it, usually that of rank 0: look at that rank's log"
            ) from error

    def _lead(self, waiting: _Waiting) -> tuple[str, str]:
        """Rank 0's part: write minutes, and new minutes whenever a card is replaced, until all ranks have acknowledged
        them."""
        ranks = range(self.size)
        listed: list[str] = []
        absent: list[int] | None = None
        token = problem = ""
        while True:
            nonces = self._store.get_all([f"nonce/{rank}" for rank in ranks])
            missing = [rank for rank in ranks if not nonces[rank]]
            if missing != absent:
                absent = missing
                self._store.set("absent", json.dumps([nonces[0], absent]))
            # A new nonce means a new card, so that the old verdict no longer counts.
            if not missing and nonces != listed:
                listed = nonces
                token = secrets.token_hex(8)
                cards = [Card.from_json(text) for text in self._store.get_all([f"card/{rank}" for rank in ranks])]
                problem = verdict(cards, self.numbers)
                self.news = [card.news for card in cards]
                self._store.set("minutes", json.dumps([token, listed, problem, self.news]))
                self._store.set("token", token)
            if not missing:
                known = self._store.get_all([f"acknowledged/{rank}" for rank in ranks[1:]])
                missing = [rank for rank, acknowledged in enumerate(known, start=1) if acknowledged != token]
            if not missing:
                self._store.set(f"done/{token}", "1")
                return token, problem
            waiting.pause(partial(list, missing))

    def _follow(self, nonce: str, waiting: _Waiting) -> tuple[str, str]:
        """The part of any other rank: acknowledge the minutes that list its card, until a round with these minutes is
        done."""
        token = problem = ""
        while True:
            latest = self._store.get("token")
            minutes = self._store.get("minutes") if latest != self._seen else ""
            if token and self._store.get(f"done/{token}"):
                return token, problem
            if minutes:
                self._seen, listed, said, news = json.loads(minutes)
                if self._seen != token and len(listed) == self.size and listed[self.rank] == nonce:
                    token = self._seen
                    problem = said
                    self.news = news
                    self._store.set(f"acknowledged/{self.rank}", token)
            waiting.pause(self._absent)

    def _absent(self) -> list[int]:
        """Returns the ranks that have not arrived, or have left, as rank 0 has noted; rank 0 if it has not come.

        If each rank asked for all others, there would be n² requests.
        """
        self._leader = self._store.get("nonce/0") or self._leader  # which stays known after rank 0 has left
        leader, absent = json.loads(self._store.get("absent") or '["", []]')
        return list(absent) if leader and leader == self._leader else [0]


class _Waiting:
    """Waits in pauses of growing length. Logs a line if the wait is long, and raises an error if it is too long."""

    def __init__(self, purpose: str, rank: int, numbers: Sequence[int], patience_s: float, pulse: Pulse | None) -> None:
        self._who = f"gqsgd: {purpose} on {one_of(rank, numbers)}"
        self._numbers = numbers
        self._purpose = purpose
        self._patience_s = patience_s
        self._pulse = pulse
        self._begun = time.monotonic()
        self._pause_s = PAUSES_S[0]
        self._longest_pause_s = max(PAUSES_S[1], _PAUSE_OF_EACH_RANK_S * len(numbers))
        self._said = False
        self._absent: list[int] | None = None  # at an earlier look

    def pause(self, missing: Callable[[], list[int]]) -> None:
        """Sleep a little; ``missing`` returns the ranks that are waited for, as far as they are known.

        Raises:
            CollectiveError: if the wait exceeds the patience, or if a rank is not alive.
        """
        problem = self._pulse.problem() if self._pulse is not None else ""
        if problem:
            raise CollectiveError(f"{self._who}: {problem}. Look for the first error among all ranks' logs")
        waited = time.monotonic() - self._begun
        if waited > self._patience_s:
            absent = missing()
            # Ranks that have waited for the same rank may have given up a moment ago. They are not the cause.
            never_there = [rank for rank in absent if rank in (self._absent or [])]
            raise CollectiveError(
                f"{self._who} waited {waited:.0f} s for {named(never_there or absent, self._numbers)}. Every rank of "
                "the process group has to call it, and all within the timeout: look for the first error among all "
                "ranks' logs, or give a longer timeout"
            )
        if waited > SAY_AFTER_S and not self._said:
            self._said = True
            self._absent = missing()
            logger.warning(
                "gqsgd: %s has been waiting for %s for %.0f s",
                self._purpose,
                named(self._absent, self._numbers),
                waited,
            )
        elif waited > self._patience_s / 2 and self._absent is None:
            self._absent = missing()
        time.sleep(self._pause_s)
        # Short pauses first, because ranks usually arrive together; longer pauses later, to send the store fewer
        # requests.
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)


class Pulse:
    """The signs of life that one rank gives to the ranks of a group, and those that it reads from them.

    Args:
        store: a store of these ranks, empty so far.
        rank: this rank's number in the group.
        numbers: the numbers of the ranks among all processes, see `agreement.named`.
        timeout_s: seconds without a beat after which a rank is considered dead.
    """

    def __init__(self, store: Store, rank: int, numbers: Sequence[int], timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._numbers = numbers
        self._timeout_s = timeout_s
        # At least four beats in a timeout, so that one late beat is not taken for a death.
        self.period_s = min(PERIOD_S, timeout_s / 4)
        # If each rank watched all others, rank 0's store would have n² requests a second.
        self._watched = range(1, len(numbers)) if rank == 0 else range(1)
        self._heard: dict[int, tuple[str, float]] = {}  # for each rank, its counter, and since when it has not changed
        self._next_look = 0.0

    def beat(self) -> None:
        """Give a sign of life."""
        self._store.count(f"beats/{self._rank}")

    def leave(self, reason: str) -> None:
        """Write last words, at which the other ranks stop waiting."""
        self._store.set(_LAST_WORDS, f"{named([self._rank], self._numbers)} has left: {reason[:ERROR_LENGTH]}")

    def problem(self) -> str:
        """Returns in words why a watched rank is considered gone; empty if all are alive, as far as is known."""
        now = time.monotonic()
        # The caller asks every few milliseconds, and each check makes requests to the store.
        if now < self._next_look:
            return ""
        self._next_look = now + self.period_s
        words = self._store.get(_LAST_WORDS)
        if words:
            return words
        every = self._store.get_all([f"beats/{rank}" for rank in self._watched])
        for rank, beats in zip(self._watched, every, strict=True):
            if self._heard.get(rank, ("", 0.0))[0] != beats or rank not in self._heard:
                self._heard[rank] = beats, now
        silent = [rank for rank, (_, since) in self._heard.items() if now - since > self._timeout_s]
        return f"no sign of life from {named(silent, self._numbers)} for {self._timeout_s:.0f} s" if silent else ""


class Heartbeat:
    """A thread that gives a rank's signs of life until it is stopped; ``pulses`` has one for each of the rank's
    groups."""

    def __init__(self, pulses: Sequence[Pulse]) -> None:
        self._pulses = pulses
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="gqsgd-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. If the store does not answer, the thread ends later."""
        self._over.set()
        self._thread.join(STOP_S)

    def _beat(self) -> None:
        with suppress(dist.DistNetworkError, dist.DistStoreError):  # the thread that waits for other ranks says so
            while True:
                for pulse in self._pulses:
                    pulse.beat()
                if self._over.wait(min(pulse.period_s for pulse in self._pulses)):
                    return


def _forget_after_fork() -> None:
    """Forget the locks: one may be held by a thread that does not exist in a forked child."""
    global _turns_lock
    _turns.clear()
    _turns_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
