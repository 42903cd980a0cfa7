"""Threads that encode and decode, in addition to the thread that starts collectives.

One thread encodes and decodes about as fast as a link of 10 Gbit/s carries codes of 4 bits. If a rank has spare
processors, several threads encode and decode different pieces of a bucket at once. They start no collectives, so
neither the order of collectives nor the results depend on them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.wire.node import local_ranks
from lightning_gqsgd.wire.processors import Place, share_of

#: Environment variable that sets how many threads of a rank encode and decode, instead of `spare_threads`.
VARIABLE = "GQSGD_THREADS"
#: Threads at most. With more threads, memory bandwidth limits the kernels of one socket.
MOST = 16
#: Threads at most if the variable is unset: enough for 25 Gbit/s at 4 bits.
MOST_BY_ITSELF = 4


def codec_threads(ranks: int, places: Sequence[Place] = ()) -> int:
    """Returns the number of threads of this rank that encode and decode, 1 to `MOST`.

    Args:
        ranks: number of all ranks. All are assumed to be on this machine, unless ``LOCAL_WORLD_SIZE`` or ``places``
            say how many are, or srun how many processors each has.
        places: the places of this rank and of others, as far as they are known.

    Raises:
        ConfigError: if the variable ``GQSGD_THREADS`` is not such a number; see also `node.local_ranks`.
    """
    said = os.environ.get(VARIABLE, "").strip()
    if not said:
        # Ranks of which nothing is known may share this machine. Too few threads cost little; too many slow all ranks
        # down.
        return spare_threads(share_of(ranks, local_ranks(), places=places), torch.get_num_threads())
    if not said.isdecimal() or not 1 <= int(said) <= MOST:
        raise ConfigError(f"{VARIABLE}={said!r} is not a number of threads; give 1 to {MOST}, or unset it")
    return int(said)


def spare_threads(share: int, compute_threads: int) -> int:
    """Returns how many threads fit on a rank's share of the processors in addition to those that compute gradients.

    It is at least 1.

    Args:
        share: number of processors of the rank, see `processors.share_of`.
        compute_threads: number of threads that compute gradients in the rank.
    """
    return max(1, min(MOST_BY_ITSELF, share - compute_threads))


class Workers:
    """Runs tasks on up to `MOST` threads, which are created when they are first needed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MOST, thread_name_prefix="gqsgd-codec", initializer=self._join)
        self._own: set[int] = set()

    def submit(self, task: Callable[[], None]) -> Future[None]:
        """Start a task. The task must not raise."""
        return self._pool.submit(task)

    def has_this_thread(self) -> bool:
        """Returns whether the calling thread is one of these."""
        return threading.get_ident() in self._own

    def stop(self) -> None:
        """End the threads, once they have finished their tasks."""
        # A worker may call this, if garbage collection of a model runs on it. It cannot wait for itself.
        self._pool.shutdown(wait=not self.has_this_thread())

    def _join(self) -> None:
        self._own.add(threading.get_ident())
