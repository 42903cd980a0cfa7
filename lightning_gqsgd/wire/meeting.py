"""All ranks agree on what they are about to do, before they have a process group of their own to do it on.

A `Meeting` uses nothing but the store of torch.distributed. So a rank that calls something else, or dies, costs the
others a timeout and an error that names it, and never a collective that finds the wrong partner.

One round goes as follows. Every rank writes a card: what it is about to do, or why it refuses. Rank 0 of the process
group compares the cards and writes the minutes: the verdict, a token that was never used before, and the nonces of the
cards. The others acknowledge minutes that list their own nonce; when all have, rank 0 writes that the round is done,
and all leave with the verdict. Nonces and tokens are random. So cards of an earlier attempt, or of processes that have
died since, do no harm: nobody acknowledges minutes that list them, and rank 0 writes new minutes when a new card comes.

The token is what the process groups of the ranks are made under. No rank counts anything, so an attempt that failed on
some ranks, or a store that outlives its processes, leaves no trace. Under it, ranks that prepare for long also show
that they are alive (see `heartbeat`).
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
from lightning_gqsgd.wire.agreement import Card, ranks_in_words, verdict
from lightning_gqsgd.wire.heartbeat import Heartbeat, Pulse
from lightning_gqsgd.wire.peers import Peers, peers_of
from lightning_gqsgd.wire.store import Store

logger = logging.getLogger(__name__)

#: How long a rank that refuses waits until the others have heard of it, at most, in seconds.
REFUSAL_PATIENCE_S = 60.0

#: After how many seconds of waiting a rank says whom it waits for.
SAY_AFTER_S = 10.0

#: Shortest and longest pause between two looks at the store, in seconds.
PAUSES_S = (0.001, 0.1)


#: For each set of ranks, whose turn it is among the threads of this process.
_turns: dict[str, Any] = {}
_turns_lock = threading.Lock()


class Meeting:
    """Rounds in which all ranks of some process groups agree, and in which an error of one rank becomes everyone's.

    Every rank of the groups opens the meeting and holds the same rounds. Where a rank leaves the ``with`` block by an
    exception, the others get a ConfigError that names the rank and its reason in the round that they are in::

        with Meeting("register_gqsgd", [group], timeout) as meeting:
            config = make_config(**fields)                  # an error in here is told to all ranks
            (key,) = meeting.agree([config.to_dict()])      # raises on all ranks if they differ
            with meeting.preparing(patience_s=600):
                ...                                         # may take so much longer on some ranks, while they live

    Threads of a process meet the same ranks one after another. On all ranks they have to do so in the same order.

    Args:
        purpose: the function that was called, for messages.
        groups: process groups. With several, every two ranks have to be connected by them: a rank's news go round the
            first group, then round the second, and then round the first again.
        timeout: how long to wait for other ranks in a round.
    """

    def __init__(self, purpose: str, groups: Sequence[dist.ProcessGroup | Peers], timeout: timedelta) -> None:
        self._purpose = purpose
        self._timeout_s = timeout.total_seconds()
        self._circles = [_Circle(group, self._timeout_s) for group in groups]
        self._keys: list[str] = []
        self._told = False
        self._turn = ExitStack()

    def __enter__(self) -> Meeting:
        # Two meetings of the same ranks at once, in threads, would take each other's cards.
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
        """Tell the other ranks of an error that they have not heard of."""
        if error is None or self._told:
            return
        self._told = True
        # An interrupt ends the process, which should not wait for anybody. Nor would it help to wait for dead ranks.
        if not isinstance(error, Exception) or isinstance(error, CollectiveError):
            self._say_last_words(error)
            return
        try:
            self._hold([{}] * len(self._circles), str(error) or type(error).__name__, REFUSAL_PATIENCE_S)
        except CollectiveError as unheard:
            logger.warning("gqsgd: not all ranks have heard of the error: %s", unheard)
            self._say_last_words(error)

    def _say_last_words(self, error: BaseException) -> None:
        """Tell the ranks that wait, or will wait, for this one to prepare."""
        with suppress(dist.DistNetworkError, dist.DistStoreError):
            for pulse in self._pulses():
                pulse.leave(str(error) or type(error).__name__)

    def _pulses(self) -> list[Pulse]:
        return [circle.pulse for circle in self._circles if circle.pulse is not None]

    def agree(self, facts: Sequence[Mapping[str, Any]]) -> list[str]:
        """Hold a round: compare what each rank brings. A collective.

        Args:
            facts: for each group, what its ranks must have in common: plain values by name.

        Returns:
            For each group, a key that was never used before, the same on all its ranks.

        Raises:
            ConfigError: ranks differ, or one refuses; raised on every rank.
            CollectiveError: a rank did not come in time.
        """
        self._keys = self._agree(facts, self._timeout_s)
        return self._keys

    @contextmanager
    def preparing(self, patience_s: float) -> Iterator[None]:
        """Show other ranks that this one is alive while the block runs, and then wait for them to come to its end. A
        collective, once, after `agree`.

        Args:
            patience_s: seconds to wait, beyond the timeout, for ranks that are alive.

        Raises:
            ConfigError: a rank refuses, e.g. because of an error in its block; raised on every rank.
            CollectiveError: a rank gave no sign of life for the timeout, has left, or did not come in time.
        """
        for circle, key in zip(self._circles, self._keys, strict=True):
            circle.show_life(key)
        pulses = self._pulses()
        if pulses:
            self._turn.callback(Heartbeat(pulses).stop)
        yield
        self._agree([{}] * len(self._circles), self._timeout_s + patience_s)

    def _agree(self, facts: Sequence[Mapping[str, Any]], patience_s: float) -> list[str]:
        try:
            keys, problem = self._hold(facts, "", patience_s)
        except BaseException as error:
            self._told = True  # the other ranks see for themselves that this one has left
            self._say_last_words(error)
            raise
        if problem:
            self._told = True
            raise ConfigError(problem)
        return keys

    def _hold(self, facts: Sequence[Mapping[str, Any]], error: str, patience_s: float) -> tuple[list[str], str]:
        """Go round all groups, and back, so that a problem in the last group reaches all ranks."""
        keys: dict[int, str] = {}
        problem = error
        is_own = bool(error)
        there = list(range(len(self._circles)))
        for index in [*there, *there[-2::-1]]:
            card = Card(self._purpose, facts[index], problem, is_own)
            key, news = self._circles[index].round(card, min(patience_s, self._patience_of(error)))
            keys.setdefault(index, key)
            # The first problem is what all ranks are told, on the way back as well.
            if news and not problem:
                problem = news
                is_own = False
        return [keys[index] for index in there], problem

    def _patience_of(self, error: str) -> float:
        return min(self._timeout_s, REFUSAL_PATIENCE_S) if error else float("inf")


class _Circle:
    """The rounds of one process group."""

    def __init__(self, group: dist.ProcessGroup | Peers, timeout_s: float) -> None:
        peers = peers_of(group)
        self.rank = peers.own
        self.size = peers.size()
        members = "_".join(map(str, peers.numbers))
        with _turns_lock:
            self.turn = peers.turn or _turns.setdefault(members, threading.RLock())
        name = hashlib.blake2b(members.encode(), digest_size=8).hexdigest()
        self._timeout_s = timeout_s
        self._store = Store(peers.store, timeout_s).under(f"gqsgd/meeting/{name}")
        self.pulse: Pulse | None = None

    def show_life(self, key: str) -> None:
        """From now on, watch whether the other ranks are alive; ``key``: that of a round."""
        if self.size > 1:
            self.pulse = Pulse(self._store.under(f"alive/{key}"), self.rank, self.size, self._timeout_s)

    def round(self, card: Card, patience_s: float) -> tuple[str, str]:
        """Hold a round; returns a key that was never used before, and what is wrong, if anything.

        Raises:
            CollectiveError: a rank did not come within ``patience_s`` seconds, or is not alive, or the store is gone.
        """
        nonce = secrets.token_hex(8)
        if self.size == 1:
            return nonce, verdict([card])
        try:
            self._store.set(f"card/{self.rank}", card.to_json())
            self._store.set(f"nonce/{self.rank}", nonce)
            waiting = _Waiting(card.purpose, self.rank, self.size, patience_s, self.pulse)
            try:
                return self._lead(waiting) if self.rank == 0 else self._follow(nonce, waiting)
            finally:  # a nonce in the store says that its rank has come and has not left; empty, that it has left
                self._store.set(f"nonce/{self.rank}", "")
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise CollectiveError(
                f"gqsgd: {card.purpose} on rank {self.rank} of {self.size}: the store of torch.distributed is gone "
                f"({error}); it needs the process that holds it, usually that of rank 0: look at that rank's log"
            ) from error

    def _lead(self, waiting: _Waiting) -> tuple[str, str]:
        """Rank 0's part: write minutes, and new ones whenever a card is replaced, until all have acknowledged them."""
        ranks = range(self.size)
        listed: list[str] = []
        token = problem = ""
        while True:
            nonces = [self._store.get(f"nonce/{rank}") for rank in ranks]
            missing = [rank for rank in ranks if not nonces[rank]]
            # A new nonce means a new card, so that the old verdict no longer counts.
            if not missing and nonces != listed:
                listed = nonces
                token = secrets.token_hex(8)
                problem = verdict([Card.from_json(self._store.get(f"card/{rank}")) for rank in ranks])
                self._store.set("minutes", json.dumps([token, listed, problem]))
            if not missing:
                missing = [rank for rank in ranks[1:] if self._store.get(f"acknowledged/{rank}") != token]
            if not missing:
                self._store.set(f"done/{token}", "1")
                return token, problem
            waiting.pause(partial(list, missing))

    def _follow(self, nonce: str, waiting: _Waiting) -> tuple[str, str]:
        """Any other rank's part: acknowledge the minutes that list its card, until a round with them is done."""
        token = problem = ""
        while True:
            minutes = self._store.get("minutes")
            if token and self._store.get(f"done/{token}"):
                return token, problem
            latest, listed, said = json.loads(minutes) if minutes else ("", [], "")
            if latest != token and len(listed) == self.size and listed[self.rank] == nonce:
                token = latest
                problem = said
                self._store.set(f"acknowledged/{self.rank}", token)
            waiting.pause(self._absent)

    def _absent(self) -> list[int]:
        """Returns the ranks that have not come, or have left."""
        return [rank for rank in range(self.size) if not self._store.get(f"nonce/{rank}")]


class _Waiting:
    """Pauses of growing length, a log line when it takes long, and an error when it takes too long."""

    def __init__(self, purpose: str, rank: int, size: int, patience_s: float, pulse: Pulse | None) -> None:
        self._who = f"gqsgd: {purpose} on rank {rank} of {size}"
        self._purpose = purpose
        self._patience_s = patience_s
        self._pulse = pulse
        self._begun = time.monotonic()
        self._pause_s = PAUSES_S[0]
        self._said = False

    def pause(self, missing: Callable[[], list[int]]) -> None:
        """Sleep a little; ``missing``: the ranks that are waited for, if that is known.

        Raises:
            CollectiveError: the patience has run out, or a rank is not alive.
        """
        problem = self._pulse.problem() if self._pulse is not None else ""
        if problem:
            raise CollectiveError(f"{self._who}: {problem}. Look for the first error among all ranks' logs")
        waited = time.monotonic() - self._begun
        if waited > self._patience_s:
            raise CollectiveError(
                f"{self._who} waited {waited:.0f} s for {ranks_in_words(missing())}. Every rank of the process group "
                "has to call it, and all within the timeout: look for the first error among all ranks' logs, or give "
                "a longer timeout"
            )
        if waited > SAY_AFTER_S and not self._said:
            self._said = True
            logger.warning(
                "gqsgd: %s has been waiting for %s for %.0f s", self._purpose, ranks_in_words(missing()), waited
            )
        time.sleep(self._pause_s)
        # Short pauses first, because ranks usually come together; longer ones later, to spare the store.
        self._pause_s = min(2 * self._pause_s, PAUSES_S[1])


def _forget_after_fork() -> None:
    """Forget whose turn it was: a thread that does not exist in a forked child may have had it."""
    global _turns_lock
    _turns.clear()
    _turns_lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget_after_fork)
