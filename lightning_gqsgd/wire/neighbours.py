"""Connects the ranks of one machine: each rank has memory that the others map, and a socket to each other rank.

Whether ranks share memory is found out by trying. Each rank listens on a socket that only processes in the same network
namespace can reach, under a random name that it tells the others over their process group. On a connection, ranks hand
each other their memory as a file descriptor. That works between containers, too, and takes nothing of ``/dev/shm``. The
memory and the sockets have no name in a file system, so they are gone with the last process that holds them, however it
ends.

The memory is reserved as a whole before anybody maps it, and it is sealed against becoming smaller. So no access to it
can end a process by SIGBUS. If one rank has no such memory, or cannot connect, all of them hear of it, and none shares.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import resource
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.wire.agreement import digest_of
from lightning_gqsgd.wire.node import this_node

logger = logging.getLogger(__name__)

#: If this environment variable is "0", the ranks of one machine exchange over Gloo.
VARIABLE = "GQSGD_SHARED_MEMORY"
#: Bytes of a rank's memory for one process group. At 8 bits, the messages of a stage of eight pieces fill it.
MEMORY_BYTES = 1 << 22
#: Seconds that ranks wait for each other at most while they connect. After that, they use Gloo.
PATIENCE_S = 10.0

#: Bytes of the message that says which node a rank is on.
_NODE_BYTES = 8
_TOKEN_BYTES = 16
#: The token of a rank that has no memory to share.
_NO_TOKEN = bytes(_TOKEN_BYTES)
#: Bytes of the message that says why a rank could not connect; all zero if it could.
_PROBLEM_BYTES = 200
#: Beginnings of the errors that a rank also raises if another one has failed. Other reasons are reported before them.
_CONSEQUENCES = ("ConnectionResetError", "BrokenPipeError", "TimeoutError")
_GREETING = struct.Struct(f"<{_TOKEN_BYTES}sI")
_CREDENTIALS = struct.Struct("3i")  # process, user and group, as SO_PEERCRED gives them


@dataclass(frozen=True, eq=False)
class Neighbour:
    """Another rank of the same machine.

    Attributes:
        rank: its number in the process group.
        socket: the connection to it: a non-blocking socket that preserves the boundaries of packets.
        memory: its memory, uint8 [MEMORY_BYTES], read-only.
    """

    rank: int
    socket: socket.socket
    memory: np.ndarray


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The ranks of a process group on one machine, seen from one of them.

    Attributes:
        rank: this process's number in the process group.
        memory: its own memory, uint8 [MEMORY_BYTES].
        others: all other ranks, by number.
    """

    rank: int
    memory: np.ndarray
    others: dict[int, Neighbour]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.others) + 1

    def close(self) -> None:
        """Close the connections. The memory is freed with the last reference to it."""
        for other in self.others.values():
            other.socket.close()


def is_wanted() -> bool:
    """Returns whether the environment allows shared memory.

    Raises:
        ConfigError: if ``GQSGD_SHARED_MEMORY`` is neither 0 nor 1.
    """
    said = os.environ.get(VARIABLE, "").strip()
    if said not in ("", "0", "1"):
        raise ConfigError(
            f"{VARIABLE}={said!r} is neither 0 nor 1; give 0 to keep ranks of one machine on Gloo, or unset it"
        )
    return said != "0"


def connect(gather: Callable[[bytes], list[bytes]], rank: int, number: int, timeout_s: float) -> Neighbours | None:
    """Connect the ranks of a process group, if all of them run on one node and can share memory. A collective.

    Args:
        gather: sends bytes to all ranks of the process group, equally many from each rank, and returns the bytes of all
            ranks in rank order.
        rank: this process's number in the process group.
        number: its number among all processes.
        timeout_s: seconds that ranks wait for each other, at most.

    Returns:
        The ranks. If one of them cannot be reached in this way, None on all ranks.

    Raises:
        RuntimeError: if ``gather`` fails.
        ConfigError: see `is_wanted`.
    """
    is_possible = is_wanted() and sys.platform == "linux"
    # Nodes are compared first, because reserving memory takes milliseconds, and ranks on several nodes do not need it.
    nodes = gather(_node(number) if is_possible else secrets.token_bytes(_NODE_BYTES))
    if len(set(nodes)) > 1:
        return None
    with ExitStack() as offered, ExitStack() as undo:
        own = _Offer.make(offered)
        tokens = gather(_NO_TOKEN if own is None else own.token)
        if own is None or _NO_TOKEN in tokens:
            return None
        problem = ""
        neighbours = None
        try:
            neighbours = own.meet(tokens, rank, min(timeout_s, PATIENCE_S))
            undo.callback(neighbours.close)
        except (OSError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        problems = gather(problem.encode()[:_PROBLEM_BYTES].ljust(_PROBLEM_BYTES, b"\0"))
        found = {number: row.rstrip(b"\0").decode(errors="replace") for number, row in enumerate(problems) if any(row)}
        if found or neighbours is None:
            first = min(found, key=lambda number: (found[number].startswith(_CONSEQUENCES), number))
            if rank == first:
                logger.warning(
                    "gqsgd: the ranks of this node exchange over Gloo, not through shared memory: %s", found[first]
                )
            return None
        undo.pop_all()
        return neighbours


def _node(number: int) -> bytes:
    """Returns a digest of the node's name; if the environment names the node wrongly, random bytes."""
    try:
        return digest_of(this_node(number)).to_bytes(_NODE_BYTES, "little")
    except ConfigError:  # the code that counts nodes raises this error
        return secrets.token_bytes(_NODE_BYTES)


class _Offer:
    """A rank's offer to the others: its memory, and a socket on which they ask for it.

    Attributes:
        token: the name of the socket.
    """

    def __init__(self, token: bytes, memory: int, listener: socket.socket) -> None:
        self.token = token
        self._memory = memory
        self._listener = listener

    @classmethod
    def make(cls, offered: ExitStack) -> _Offer | None:
        """Returns an offer that ends with ``offered``; None if the system does not provide such memory or sockets, or
        has run out of them."""
        with ExitStack() as failed, suppress(OSError, AttributeError):
            memory = os.memfd_create("gqsgd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            failed.callback(os.close, memory)
            os.posix_fallocate(memory, 0, MEMORY_BYTES)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            listener = failed.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            token = secrets.token_bytes(_TOKEN_BYTES)
            listener.bind(_address(token))
            listener.listen(socket.SOMAXCONN)
            offered.push(failed.pop_all())
            return cls(token, memory, listener)
        return None

    def meet(self, tokens: Sequence[bytes], rank: int, timeout_s: float) -> Neighbours:
        """Connect to all other ranks, and take their memory.

        Args:
            tokens: the tokens of all ranks.
            rank: this process's number.
            timeout_s: seconds to wait for each rank.

        Raises:
            OSError: if a rank cannot be reached, or does not connect in time.
            ValueError: if a rank's memory has the wrong size or is not sealed, or if another process connects.
        """
        with ExitStack() as undo:
            # The system buffers connections and greetings, so nothing here waits for a later action of another rank. So
            # ranks may arrive in any order.
            called = {}
            for other in range(rank):
                connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                connection.settimeout(timeout_s)
                connection.connect(_address(tokens[other]))
                _check_user(connection)
                self._greet(connection, tokens[other], rank)
                called[other] = connection
            others: dict[int, Neighbour] = {}
            self._listener.settimeout(timeout_s)
            while len(others) < len(tokens) - 1 - rank:
                connection = undo.enter_context(self._listener.accept()[0])
                connection.settimeout(timeout_s)
                _check_user(connection)
                other, memory = _greeted(connection, self.token)
                self._greet(connection, tokens[other], rank)
                others[other] = Neighbour(other, connection, memory)
            for other, connection in called.items():
                others[other] = Neighbour(other, connection, _greeted(connection, self.token)[1])
            for neighbour in others.values():
                neighbour.socket.setblocking(False)
            neighbours = Neighbours(rank, _mapped(self._memory, writes=True), dict(sorted(others.items())))
            undo.pop_all()
            return neighbours

    def _greet(self, connection: socket.socket, token: bytes, rank: int) -> None:
        """Send this rank's number and its memory. ``token`` is the other rank's token, which only ranks know."""
        socket.send_fds(connection, [_GREETING.pack(token, rank)], [self._memory])


def _greeted(connection: socket.socket, token: bytes) -> tuple[int, np.ndarray]:
    """Returns the number of the rank at the other end, and its memory; ``token`` is this rank's token."""
    greeting, descriptors, flags, _ = socket.recv_fds(connection, _GREETING.size, 1)
    try:
        if flags & socket.MSG_CTRUNC:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise OSError(
                f"the system did not hand over a rank's memory; raise the limit of open files (ulimit -n, here {most}) "
                "or allow it in SELinux"
            )
        if not greeting:
            raise ConnectionResetError("a rank has closed the connection")
        if len(greeting) != _GREETING.size or len(descriptors) != 1 or _GREETING.unpack(greeting)[0] != token:
            raise ValueError("another process than a rank has connected")
        return _GREETING.unpack(greeting)[1], _mapped(descriptors[0])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _mapped(descriptor: int, *, writes: bool = False) -> np.ndarray:
    """Returns memory as uint8 [MEMORY_BYTES]; raises ValueError if it has another size, or may become smaller."""
    size = os.fstat(descriptor).st_size
    if size != MEMORY_BYTES or not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError(f"memory of {size} bytes, in place of {MEMORY_BYTES} that are sealed")
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
    # All pages are mapped at once, so that the first step causes no page faults.
    return np.frombuffer(mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, access), np.uint8)


def _check_user(connection: socket.socket) -> None:
    """Raise ValueError if the process at the other end belongs to another user: anybody on this machine may connect."""
    size = _CREDENTIALS.size
    user = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]
    if user != os.geteuid():
        raise ValueError(f"a process of user {user} has connected, and this one is of user {os.geteuid()}")


def _address(token: bytes) -> Any:
    """Returns a socket's name in the system's abstract namespace, so that the socket has no file."""
    return b"\0gqsgd-" + token.hex().encode()
