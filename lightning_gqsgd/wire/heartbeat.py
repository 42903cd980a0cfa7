"""Signs of life of ranks that prepare for what they have agreed on.

Ranks may compile kernels for minutes, so they wait for each other longer than the timeout there. Without signs of life,
a rank that has died would keep the others waiting for as long. So each rank has a thread that counts in the store of
torch.distributed. A rank whose number stands still for the timeout counts as dead.

Rank 0 watches all ranks, and the others watch rank 0. A rank that leaves by an error writes last words, which all ranks
read. So a look takes few requests, however many ranks there are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from lightning_gqsgd.wire.agreement import ERROR_LENGTH, ranks_in_words
from lightning_gqsgd.wire.store import Store

#: Seconds between two beats, and between two looks at those of others, at most.
PERIOD_S = 1.0

_LAST_WORDS = "last words"


class Pulse:
    """The signs of life that one rank shows to the ranks of a group, and sees of them.

    Args:
        store: a store of these ranks, in which nobody has written.
        rank: this rank's number in the group.
        size: number of ranks.
        timeout_s: seconds without a beat after which a rank counts as dead.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        # At least four beats in a timeout, so that one late beat is not taken for a death.
        self.period_s = min(PERIOD_S, timeout_s / 4)
        # If each rank watched all others, rank 0's store would have n² requests a second.
        self._watched = range(1, size) if rank == 0 else range(1)
        self._heard: dict[int, tuple[str, float]] = {}  # for each rank, its number, and since when it stands still
        self._next_look = 0.0

    def beat(self) -> None:
        """Give a sign of life."""
        self._store.count(f"beats/{self._rank}")

    def leave(self, reason: str) -> None:
        """Write last words, which end the waiting of the other ranks."""
        self._store.set(_LAST_WORDS, f"rank {self._rank} has left: {reason[:ERROR_LENGTH]}")

    def problem(self) -> str:
        """Returns what has become of a rank that this one watches; empty: all are alive, as far as is known."""
        now = time.monotonic()
        # The caller asks every few milliseconds, and each look is a request to the store.
        if now < self._next_look:
            return ""
        self._next_look = now + self.period_s
        words = self._store.get(_LAST_WORDS)
        if words:
            return words
        for rank in self._watched:
            beats = self._store.get(f"beats/{rank}")
            if self._heard.get(rank, ("", 0.0))[0] != beats or rank not in self._heard:
                self._heard[rank] = beats, now
        silent = [rank for rank, (_, since) in self._heard.items() if now - since > self._timeout_s]
        return f"no sign of life from {ranks_in_words(silent)} for {self._timeout_s:.0f} s" if silent else ""


class Heartbeat:
    """A thread that beats for a rank from now on, until it is stopped; one pulse for each group that the rank is in."""

    def __init__(self, pulses: Sequence[Pulse]) -> None:
        self._pulses = pulses
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="gqsgd-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for its end."""
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        with suppress(dist.DistNetworkError, dist.DistStoreError):  # the thread that waits for other ranks says so
            while True:
                for pulse in self._pulses:
                    pulse.beat()
                if self._over.wait(min(pulse.period_s for pulse in self._pulses)):
                    return
