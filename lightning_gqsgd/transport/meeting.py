"""All ranks agree on what they are about to do, before they have a process group of their own to do it on.

A `Meeting` uses nothing but the store of torch.distributed. So a rank that calls something else, or dies, costs the
others a timeout and an error that names it, and never a collective that finds the wrong partner.

One round goes as follows. Every rank writes a card: what it is about to do, or why it refuses. Rank 0 of the process
group compares the cards and writes the minutes: the verdict, a token that was never used before, and the nonces of the
cards. The others acknowledge minutes that list their own nonce; when all have, rank 0 writes that the round is done,
and all leave with the verdict. Nonces and tokens are random. So cards of an earlier attempt, or of processes that have
died since, do no harm: nobody acknowledges minutes that list them, and rank 0 writes new minutes when a new card comes.

The token is what the process groups of the ranks are made under. No rank counts anything, so an attempt that failed on
some ranks, or a store that outlives its processes, leaves no trace.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

import torch.distributed as dist

from lightning_gqsgd.errors import CollectiveError, ConfigError
from lightning_gqsgd.transport.agreement import Card, ranks_in_words, verdict

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
            ...

    Threads of a process meet the same ranks one after another. On all ranks they have to do so in the same order.

    Args:
        purpose: the function that was called, for messages.
        groups: process groups. With several, every two ranks have to be connected by them: a rank's news go round the
            first group, then round the second, and then round the first again.
        timeout: how long to wait for other ranks in a round.
    """

    def __init__(self, purpose: str, groups: Sequence[dist.ProcessGroup], timeout: timedelta) -> None:
        self._purpose, self._timeout_s = purpose, timeout.total_seconds()
        self._circles = [_Circle(group) for group in groups]
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
        # An interrupt is not told: the process is about to end, and should not wait for anybody.
        if not isinstance(error, Exception) or self._told:
            return
        self._told = True
        try:
            self._hold([{}] * len(self._circles), str(error) or type(error).__name__, REFUSAL_PATIENCE_S)
        except CollectiveError as unheard:
            logger.warning("gqsgd: not all ranks have heard of the error: %s", unheard)

    def agree(self, facts: Sequence[Mapping[str, Any]], *, patience_s: float = 0.0) -> list[str]:
        """Hold a round: compare what each rank brings. A collective.

        Args:
            facts: for each group, what its ranks must have in common: plain values by name.
            patience_s: seconds to wait for others beyond the timeout, e.g. because they may still be compiling.

        Returns:
            For each group, a key that was never used before, the same on all its ranks.

        Raises:
            ConfigError: ranks differ, or one refuses; raised on every rank.
            CollectiveError: a rank did not come in time.
        """
        try:
            keys, problem = self._hold(facts, "", self._timeout_s + patience_s)
        except BaseException:
            self._told = True  # the other ranks see for themselves that this one has left
            raise
        if problem:
            self._told = True
            raise ConfigError(problem)
        return keys

    def _hold(self, facts: Sequence[Mapping[str, Any]], error: str, patience_s: float) -> tuple[list[str], str]:
        """Go round all groups, and back, so that a problem in the last group reaches all ranks."""
        keys: dict[int, str] = {}
        problem, is_own = error, bool(error)
        there = list(range(len(self._circles)))
        for index in [*there, *there[-2::-1]]:
            card = Card(self._purpose, facts[index], problem, is_own)
            key, news = self._circles[index].round(card, min(patience_s, self._patience_of(error)))
            keys.setdefault(index, key)
            if news and not problem:
                problem, is_own = news, False
        return [keys[index] for index in there], problem

    def _patience_of(self, error: str) -> float:
        return min(self._timeout_s, REFUSAL_PATIENCE_S) if error else float("inf")


class _Circle:
    """The rounds of one process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        members = "_".join(map(str, dist.get_process_group_ranks(group)))
        with _turns_lock:
            self.turn = _turns.setdefault(members, threading.RLock())
        name = hashlib.blake2b(members.encode(), digest_size=8).hexdigest()
        self._store = dist.PrefixStore(f"gqsgd/meeting/{name}", dist.distributed_c10d._get_default_store())

    def round(self, card: Card, patience_s: float) -> tuple[str, str]:
        """Hold a round; returns a key that was never used before, and what is wrong, if anything.

        Raises:
            CollectiveError: a rank did not come within ``patience_s`` seconds, or the store is gone.
        """
        nonce = secrets.token_hex(8)
        if self.size == 1:
            return nonce, verdict([card])
        try:
            self._set(f"card/{self.rank}", card.to_json())
            self._set(f"nonce/{self.rank}", nonce)
            waiting = _Waiting(card.purpose, self.rank, self.size, patience_s)
            try:
                return self._lead(waiting) if self.rank == 0 else self._follow(nonce, waiting)
            finally:  # a nonce in the store says that its rank has come and has not left; empty, that it has left
                self._set(f"nonce/{self.rank}", "")
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise CollectiveError(
                f"gqsgd: {card.purpose} on rank {self.rank} of {self.size}: the store of torch.distributed is gone "
                f"({error}); it ends with the process that holds it, usually that of rank 0: look at that rank's log"
            ) from error

    def _lead(self, waiting: _Waiting) -> tuple[str, str]:
        """Rank 0's part: write minutes, and new ones whenever a card is replaced, until all have acknowledged them."""
        ranks = range(self.size)
        listed: list[str] = []
        token = problem = ""
        while True:
            nonces = [self._get(f"nonce/{rank}") for rank in ranks]
            missing = [rank for rank in ranks if not nonces[rank]]
            if not missing and nonces != listed:
                listed, token = nonces, secrets.token_hex(8)
                problem = verdict([Card.from_json(self._get(f"card/{rank}")) for rank in ranks])
                self._set("minutes", json.dumps([token, listed, problem]))
            if not missing:
                missing = [rank for rank in ranks[1:] if self._get(f"acknowledged/{rank}") != token]
            if not missing:
                self._set(f"done/{token}", "1")
                return token, problem
            waiting.pause(partial(list, missing))

    def _follow(self, nonce: str, waiting: _Waiting) -> tuple[str, str]:
        """Any other rank's part: acknowledge the minutes that list its card, until a round with them is done."""
        token = problem = ""
        while True:
            minutes = self._get("minutes")
            if token and self._get(f"done/{token}"):
                return token, problem
            latest, listed, said = json.loads(minutes) if minutes else ("", [], "")
            if latest != token and len(listed) == self.size and listed[self.rank] == nonce:
                token, problem = latest, said
                self._set(f"acknowledged/{self.rank}", token)
            waiting.pause(self._absent)

    def _absent(self) -> list[int]:
        """The ranks that have not come, or have left."""
        return [rank for rank in range(self.size) if not self._get(f"nonce/{rank}")]

    def _set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def _get(self, key: str) -> str:
        """A value; empty if there is none. `Store.get` alone would wait for it, so no key is ever deleted."""
        return self._store.get(key).decode() if self._store.check([key]) else ""


class _Waiting:
    """Pauses of growing length, a log line when it takes long, and an error when it takes too long."""

    def __init__(self, purpose: str, rank: int, size: int, patience_s: float) -> None:
        self._purpose, self._rank, self._size, self._patience_s = purpose, rank, size, patience_s
        self._begun = time.monotonic()
        self._pause_s, self._said = PAUSES_S[0], False

    def pause(self, missing: Callable[[], list[int]]) -> None:
        """Sleep a little; ``missing``: the ranks that are waited for, if that is known.

        Raises:
            CollectiveError: the patience has run out.
        """
        waited = time.monotonic() - self._begun
        if waited > self._patience_s:
            raise CollectiveError(
                f"gqsgd: {self._purpose} on rank {self._rank} of {self._size} waited {waited:.0f} s for "
                f"{ranks_in_words(missing())}. Every rank of the process group has to call it, and all within the "
                "timeout: look for the first error among all ranks' logs, or give a longer timeout"
            )
        if waited > SAY_AFTER_S and not self._said:
            self._said = True
            logger.warning(
                "gqsgd: %s has been waiting for %s for %.0f s", self._purpose, ranks_in_words(missing()), waited
            )
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, PAUSES_S[1])


def _forget_after_fork() -> None:
    """A thread that does not exist in a forked child may have had its turn."""
    global _turns_lock
    _turns.clear()
    _turns_lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget_after_fork)
