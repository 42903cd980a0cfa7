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

#: "0" in this environment variable keeps ranks of one machine on Gloo.
VARIABLE = "GQSGD_SHARED_MEMORY"
#: Bytes of memory of a rank, for one process group: a stage of eight pieces has as many under way at 8 bits.
MEMORY_BYTES = 1 << 22
#: Seconds that ranks wait for each other while they connect, at most. After that, they stay on Gloo.
PATIENCE_S = 10.0

#: Bytes in which a rank says which node it is on.
_NODE_BYTES = 8
_TOKEN_BYTES = 16
#: The token of a rank without memory to share.
_NO_TOKEN = bytes(_TOKEN_BYTES)
#: Bytes in which a rank tells the others why it could not connect; all zero: it could.
_PROBLEM_BYTES = 200
_GREETING = struct.Struct(f"<{_TOKEN_BYTES}sI")
_CREDENTIALS = struct.Struct("3i")  # process, user and group, as SO_PEERCRED gives them

#: Tells bytes to all ranks of a process group, the same number on each, and returns those of all, in rank order.
Gather = Callable[[bytes], list[bytes]]


@dataclass(frozen=True, eq=False)
class Neighbour:
    """Another rank of the same machine.

    Attributes:
        rank: its number in the process group.
        socket: the connection to it, which keeps the limits of packets, and does not wait.
        memory: its memory, uint8 [MEMORY_BYTES], which can be read only.
    """

    rank: int
    socket: socket.socket
    memory: np.ndarray


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The ranks of a process group that is on one machine, as one of them sees them.

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
        """Close the connections. The memory is given back with the last reference to it."""
        for other in self.others.values():
            other.socket.close()


def is_wanted() -> bool:
    """Returns whether the environment allows shared memory.

    Raises:
        ConfigError: ``GQSGD_SHARED_MEMORY`` has another value than 0 or 1.
    """
    said = os.environ.get(VARIABLE, "").strip()
    if said not in ("", "0", "1"):
        raise ConfigError(
            f"{VARIABLE}={said!r} is neither 0 nor 1; give 0 to keep ranks of one machine on Gloo, or unset it"
        )
    return said != "0"


def connect(gather: Gather, rank: int, number: int, timeout_s: float) -> Neighbours | None:
    """Connect the ranks of a process group, if all of them run on one node and can share memory. A collective.

    Args:
        gather: see `Gather`; over the process group.
        rank: this process's number in the process group.
        number: its number among all processes.
        timeout_s: seconds that ranks wait for each other, at most.

    Returns:
        The ranks; None, on all ranks, if one of them cannot be reached in this way.

    Raises:
        RuntimeError: ``gather`` has failed.
        ConfigError: see `is_wanted`.
    """
    is_possible = is_wanted() and sys.platform == "linux"
    # First of all, because memory takes milliseconds to reserve, and ranks of several nodes do not need it.
    nodes = gather(_node(number) if is_possible else secrets.token_bytes(_NODE_BYTES))
    if len(set(nodes)) > 1:
        return None
    with ExitStack() as undo:
        own = _Offer.make(undo)
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
            first = min(found)
            if rank == first:
                logger.warning(
                    "gqsgd: the ranks of this node exchange over Gloo, not through shared memory: %s", found[first]
                )
            return None
        own.put_away()
        undo.pop_all()
        return neighbours


def _node(number: int) -> bytes:
    """Returns a digest of the node's name; one that no other rank has where the environment names it wrongly."""
    try:
        return digest_of(this_node(number)).to_bytes(_NODE_BYTES, "little")
    except ConfigError:  # is raised where the number of nodes counts
        return secrets.token_bytes(_NODE_BYTES)


class _Offer:
    """The offer of a rank to others: memory, and a socket on which they ask for it.

    Attributes:
        token: the name of the socket.
    """

    def __init__(self, token: bytes, memory: int, listener: socket.socket) -> None:
        self.token = token
        self._memory = memory
        self._listener = listener

    @classmethod
    def make(cls, undo: ExitStack) -> _Offer | None:
        """Returns an offer, which ends with ``undo``; None if the system has no such memory or sockets, or no more."""
        with ExitStack() as failed, suppress(OSError, AttributeError):
            memory = os.memfd_create("gqsgd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            failed.callback(os.close, memory)
            os.posix_fallocate(memory, 0, MEMORY_BYTES)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            listener = failed.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            token = secrets.token_bytes(_TOKEN_BYTES)
            listener.bind(_address(token))
            listener.listen(socket.SOMAXCONN)
            undo.push(failed.pop_all())
            return cls(token, memory, listener)
        return None

    def put_away(self) -> None:
        """End the offer, once everybody has taken it."""
        self._listener.close()
        os.close(self._memory)

    def meet(self, tokens: Sequence[bytes], rank: int, timeout_s: float) -> Neighbours:
        """Connect to all other ranks, and take their memory.

        Args:
            tokens: of all ranks.
            rank: this process's number.
            timeout_s: seconds to wait for each rank.

        Raises:
            OSError: a rank cannot be reached, or did not come in time.
            ValueError: a rank's memory is not what it should be.
        """
        with ExitStack() as undo:
            # Nothing here waits for what another rank does later: greetings are kept by the system, first of all. So
            # ranks may come in any order.
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
        """Send this rank's number and its memory; ``token``: of the other rank, which no third one knows."""
        socket.send_fds(connection, [_GREETING.pack(token, rank)], [self._memory])


def _greeted(connection: socket.socket, token: bytes) -> tuple[int, np.ndarray]:
    """Returns the number of the rank at the other end, and its memory; ``token``: of this rank."""
    greeting, descriptors, _, _ = socket.recv_fds(connection, _GREETING.size, 1)
    try:
        if len(greeting) != _GREETING.size or len(descriptors) != 1 or _GREETING.unpack(greeting)[0] != token:
            raise ValueError("another process than a rank has connected")
        return _GREETING.unpack(greeting)[1], _mapped(descriptors[0])
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _mapped(descriptor: int, *, writes: bool = False) -> np.ndarray:
    """Returns memory as uint8 [MEMORY_BYTES].

    Raises:
        ValueError: it has another size, or may become smaller.
    """
    size = os.fstat(descriptor).st_size
    if size != MEMORY_BYTES or not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError(f"memory of {size} bytes, in place of {MEMORY_BYTES} that are sealed")
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
    # All pages are mapped at once, so that the first step does not fault on each of them.
    return np.frombuffer(mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, access), np.uint8)


def _check_user(connection: socket.socket) -> None:
    """Raise ValueError if the process at the other end belongs to another user: anybody on this machine may connect."""
    size = _CREDENTIALS.size
    user = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]
    if user != os.geteuid():
        raise ValueError(f"a process of user {user} has connected, and this one is of user {os.geteuid()}")


def _address(token: bytes) -> Any:
    """Returns the name of a socket, in the system's own table of names: it has no file."""
    return b"\0gqsgd-" + token.hex().encode()
