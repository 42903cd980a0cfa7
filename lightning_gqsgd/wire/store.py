"""The store of torch.distributed, with a timeout for every wait."""

from __future__ import annotations

import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from copy import copy
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

#: Seconds beyond the timeout of a request in which its answer may still arrive.
_MARGIN_S = 2.0
#: Seconds of one attempt to reach a store, and between two attempts.
_ATTEMPT_S, _PAUSE_S = 5.0, 0.2


def wait_for_store(address: str, port: int, within_s: float) -> None:
    """Wait until the store of rank 0 listens, before torch connects to it.

    At each of its own attempts, torch prints a stack of C++, and its error does not say why the last one has failed.

    Args:
        address: name or address of the host of rank 0.
        port: port of the store.
        within_s: seconds in which the store has to be there.

    Raises:
        DistNetworkError: if it is not, or if the address is no valid name; the text says why the last attempt has
            failed.
    """
    if not 0 < port < 65536:
        raise dist.DistNetworkError(f"{port} is not a port, 1 to 65535")
    end = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection((address, port), _ATTEMPT_S).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise dist.DistNetworkError(error.strerror or str(error)) from error
        except UnicodeError as error:
            raise dist.DistNetworkError(f"{address!r:.100} is not the name of a host") from error
        time.sleep(_PAUSE_S)


def _make_all(asked: SimpleQueue[Callable[[], None] | None]) -> None:
    """Make requests, one after the other, until None comes."""
    while True:
        ask = asked.get()
        if ask is None:
            return
        ask()
        del ask  # it refers to the store, and this thread ends with the store


class Requests:
    """Requests to one store, each of which ends in bounded time.

    The client of a TCPStore waits for its server without a limit, and the server usually runs in another process. If
    that process is stopped, or the connection to it is cut, a request would wait for ever. So another thread makes the
    requests, and the caller leaves a request behind if no answer comes. While such a request waits, other requests fail
    at once, because the client has one connection.

    Args:
        within_s: seconds that a request may take.
    """

    def __init__(self, within_s: float) -> None:
        self.within_s = within_s
        self._left_behind: list[threading.Event] = []  # the ends of those requests
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def make(self, request: Callable[[], T]) -> T:
        """Make a request, and return its answer.

        Raises:
            DistStoreError, DistNetworkError: if the store is gone, or does not answer.
        """
        answers: list[T] = []
        errors: list[Exception] = []
        ended = threading.Event()

        def ask() -> None:
            try:
                answers.append(request())
            except Exception as error:
                errors.append(error)
            finally:
                ended.set()

        self._left_behind[:] = [other for other in self._left_behind if not other.is_set()]
        if not self._left_behind:
            if self._thread is None or not self._thread.is_alive():  # none was started yet, or only in a parent process
                self._start_thread()
            self._asked.put(ask)
            try:
                ended.wait(self.within_s)
            finally:  # an interrupt also leaves it behind
                if not ended.is_set():
                    self._left_behind.append(ended)
        if errors:
            raise errors[0]
        if not answers:
            raise dist.DistStoreError(f"it has not answered for {self.within_s:.0f} s")
        return answers[0]

    def close(self) -> None:
        """End the thread. If a request was left behind, the thread ends with it."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._asked.put(None)
            self._thread.join(0 if self._left_behind else _MARGIN_S)

    def _start_thread(self) -> None:
        self._asked = SimpleQueue()  # a new one: a parent process's thread may have held the old one's lock
        weakref.finalize(self, self._asked.put, None)
        self._thread = threading.Thread(target=_make_all, args=(self._asked,), name="gqsgd-store", daemon=True)
        self._thread.start()


class Store:
    """A store of text whose requests end in bounded time, see `Requests`.

    Args:
        store: the store that holds the values, all of them text.
        within_s: seconds that a request may take.
    """

    def __init__(self, store: dist.Store, within_s: float) -> None:
        self._store = store
        self._requests = Requests(within_s)

    def under(self, prefix: str) -> Store:
        """Returns the part of the store whose keys begin with a prefix."""
        part = copy(self)  # with the same requests
        part._store = dist.PrefixStore(prefix, self._store)
        return part

    def get(self, key: str) -> str:
        """Returns a value; empty if the key has none. torch's `get` waits for a missing key, so keys are checked first,
        and never deleted.

        Raises:
            DistStoreError, DistNetworkError: if the store is gone, or does not answer.
        """
        return self._requests.make(lambda: self._read(key))

    def get_all(self, keys: Sequence[str]) -> list[str]:
        """Returns values as `get` does. If all keys have one, the store is asked twice, however many keys there are."""
        return self._requests.make(lambda: self._read_all(list(keys)))

    def set(self, key: str, value: str) -> None:
        """Set the value of a key, which may have a value already; raises as `get` does."""
        self._requests.make(lambda: self._store.set(key, value))

    def count(self, key: str) -> None:
        """Add 1 to a counter, which is 0 at first; raises as `get` does."""
        self._requests.make(lambda: self._store.add(key, 1))

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _read_all(self, keys: list[str]) -> list[str]:
        if self._store.check(keys):
            return [value.decode() for value in self._store.multi_get(keys)]
        return [self._read(key) for key in keys]


class EndingStore(dist.Store):
    """A store for torch's process groups whose requests end in bounded time, see `Requests`.

    Args:
        store: the store that holds the values.
        timeout: timeout of one request. Waits for keys also have it, whatever the process group asks for: Gloo, which
            connects with a shorter one, would wait too briefly for a rank that comes late.
    """

    def __init__(self, store: dist.Store, timeout: timedelta) -> None:
        super().__init__()
        self._store = store
        self._timeout = timeout
        self._requests = Requests(timeout.total_seconds() + _MARGIN_S)

    def set(self, key: str, value: Any) -> None:
        """Set the value of a key, which may have a value already."""
        self._requests.make(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """Returns a value, and waits until it is set."""
        return self._requests.make(lambda: self._store.get(key))

    def add(self, key: str, value: int) -> int:
        """Add to a number, which is 0 at first, and return it."""
        return self._requests.make(lambda: self._store.add(key, value))

    def check(self, keys: list[str]) -> bool:
        """Returns whether all keys have values."""
        return self._requests.make(lambda: self._store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        self._requests.make(lambda: self._store.wait(keys, self._timeout))

    def close(self) -> None:
        """End the thread that makes the requests; see `Requests.close`. Later requests start another one."""
        self._requests.close()
