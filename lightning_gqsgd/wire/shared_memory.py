"""Collectives between the ranks of one machine, through shared memory instead of Gloo over loopback.

A rank writes its messages into its own memory, tells the others over sockets where each message lies, and copies the
messages of the others from their memory. A message takes two copies by the process and one packet of 40 bytes. Loopback
takes two more copies by the system, and TCP's work for each segment of 64 KiB.

Notices are sent over sockets, and not as counters in the memory, for four reasons:

* A rank that waits sleeps in `poll`, and takes no processor time from the ranks that it waits for. Ranks often have one
  core each.
* Packets order memory accesses: the reader of a notice sees everything that the sender wrote before it sent the notice,
  on every type of processor. Memory is reused only after a notice in the other direction.
* If a process dies, its sockets close, so the other ranks notice at once.
* A wait can end at a deadline.

Every collective of a group has a number, the same on all ranks, because all ranks start them in the same order. Notices
contain the number, so ranks may start a collective at different times. Long messages are sent in chunks, which use the
memory in turns. The memory belongs to one group. So it never fills up with messages that a rank cannot take yet because
it waits for a message of another group.

Sums and maxima of integers do not depend on the order: each rank combines the numbers of all others with its own. The
sum of two floating-point numbers does not depend on the order either, so two ranks also add gradients here. Sums over
more ranks are left to Gloo, because their bits depend on the order and have to equal plain DDP's.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.reducers.base import Exchange
from lightning_gqsgd.wire.agreement import ranks_in_words
from lightning_gqsgd.wire.neighbours import MEMORY_BYTES, Neighbour, Neighbours

#: Bytes of a chunk: the part of a long message that is written and announced at once.
CHUNK_BYTES = 1 << 20
#: Messages begin at multiples of this many bytes, the length of a cache line.
ALIGNMENT = 64
#: Number of ranks up to which integers are combined here. Beyond it, they are left to Gloo, whose ring adds each number
#: once per rank.
MOST_TO_ADD = 4
#: Milliseconds between two checks of the deadlines.
PERIOD_MS = 500
#: Seconds that `close` waits for the thread, which itself never waits for another rank.
CLOSE_TIMEOUT_S = 60.0

_MESSAGE = struct.Struct("<BQQQII")
_IS_MESSAGE = 1
#: A list of places that were read and may be reused: this header of 4 bytes, and 4 bytes for each place.
_ARE_FREE = b"\x02\0\0\0"
#: Asks for such a list, at once or as soon as there is a place to list.
_PLEASE = b"\x03"
#: Says that the sender has failed: this byte, and the reason.
_HAS_FAILED = b"\x04"
#: Bytes of the reason at most.
_REASON_BYTES = 300
_PACKET_BYTES = 1 << 16

_COMBINED_BY = {"sum": np.add, "max": np.maximum}
#: Floating-point dtypes that two ranks add here. NumPy has no bf16, and adds fp16 one number at a time.
_ADDED_DTYPES = (torch.float32, torch.float64)


class _Notice(NamedTuple):
    """A notice that a chunk of a message lies in the sender's memory.

    Attributes:
        number: number of the collective.
        position: position of the chunk in the message, in bytes.
        total: bytes of the whole message.
        place: position of the chunk in the sender's memory, in bytes.
        length: bytes of the chunk.
    """

    number: int
    position: int
    total: int
    place: int
    length: int

    def packed(self) -> bytes:
        """Returns the notice as a packet."""
        return _MESSAGE.pack(_IS_MESSAGE, *self)


class _HasFailed(RuntimeError):
    """The error on a rank that hears that another one has failed.

    Args:
        others: the rank that has said so, in words.
        reason: the error of the first rank that failed, which is passed on as it is. If each rank added its own words,
            the reason would be cut off after some ranks.
    """

    def __init__(self, others: str, reason: str) -> None:
        super().__init__(f"Connection closed by {others}, which has failed: {reason}")
        self.reason = reason


class SharedWork:
    """A collective under way, like torch's `Work`."""

    def __init__(self) -> None:
        self._future: torch.futures.Future[None] = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[None]:
        """Returns a future that completes when the collective has ended or failed. If it failed, the future has the
        error."""
        return self._future

    def wait(self) -> None:
        """Wait for the result.

        Raises:
            RuntimeError: if the collective failed.
        """
        self._future.wait()

    def finish(self, error: BaseException | None) -> None:
        """Complete the future, whose callbacks run in this thread."""
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(RuntimeError(str(error)))  # type: ignore[arg-type]  # of T in torch's stubs


@dataclass(eq=False)
class _Incoming:
    """The message of one rank: its target, and how many of its bytes were announced and received."""

    target: np.ndarray
    told: int = 0
    received: int = 0


@dataclass(eq=False)
class _Outgoing:
    """A message to some ranks, and how many of its bytes were written to the memory."""

    number: int
    source: np.ndarray
    readers: frozenset[int]
    written: int = 0


@dataclass(eq=False)
class _Collective:
    """A collective under way.

    Attributes:
        number: see the module's docstring.
        deadline: time at which it fails, on the monotonic clock.
        incoming: the message of each other rank that sends something.
        outgoing: the messages that are not completely written yet.
        combine: combines the numbers of a message with the numbers in the target; None if the message replaces them.
        dtype: dtype of the numbers that are combined.
        own_rank: number of this rank in the group.
        held: chunks that have to wait, because combining them would change numbers that this rank has not sent yet.
        work: the object that the caller waits for.
    """

    number: int
    deadline: float
    incoming: dict[int, _Incoming]
    outgoing: list[_Outgoing]
    combine: np.ufunc | None = None
    dtype: np.dtype = np.dtype(np.uint8)
    own_rank: int = 0
    held: list[tuple[int, _Notice]] = field(default_factory=list)
    work: SharedWork = field(default_factory=SharedWork)

    @property
    def is_through(self) -> bool:
        """Returns whether everything has been written and received."""
        return not self.outgoing and all(part.received == len(part.target) for part in self.incoming.values())

    @property
    def adds_floats(self) -> bool:
        """Returns whether floating-point numbers are added. The result of that depends on a thread's rounding mode."""
        return self.combine is not None and self.dtype.kind == "f"

    def can_take(self, notice: _Notice) -> bool:
        """Returns whether a chunk may change the numbers in its target now."""
        return self.combine is None or all(part.written >= notice.position + notice.length for part in self.outgoing)

    def take(self, rank: int, chunk: np.ndarray, position: int) -> None:
        """Copy a chunk of a rank's message, or combine it with the numbers in the target."""
        part = self.incoming[rank]
        target = part.target[position : position + len(chunk)]
        if self.combine is None:
            target[:] = chunk
        else:
            numbers = target.view(self.dtype)
            terms = (numbers, chunk.view(self.dtype))
            # In rank order: where both numbers are NaN, the processor keeps the bits of the first one.
            with np.errstate(all="ignore"):  # infinities and overflows are left to the code that checks gradients
                self.combine(*(terms if rank > self.own_rank else terms[::-1]), out=numbers)
        part.received += len(chunk)

    def missing(self) -> list[int]:
        """Returns the ranks that have not announced all of their message."""
        return [rank for rank, part in self.incoming.items() if part.told < len(part.target)]


class _Ring:
    """The memory of a rank, which messages use in turns as a ring buffer."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._blocks: deque[tuple[int, int, set[int]]] = deque()  # place, end, and ranks that have not read it
        self._readers: dict[int, set[int]] = {}  # by place

    def reserve(self, length: int, readers: frozenset[int]) -> int | None:
        """Returns a place for ``length`` bytes; None as long as there is no room."""
        size = -(-length // ALIGNMENT) * ALIGNMENT
        place = self._place_for(size)
        if place is not None:
            waiting = set(readers)
            self._blocks.append((place, place + size, waiting))
            self._readers[place] = waiting
        return place

    def _place_for(self, size: int) -> int | None:
        if not self._blocks:
            return 0
        oldest = self._blocks[0][0]
        newest, end, _ = self._blocks[-1]
        if newest < oldest:  # messages continue at the start of the memory, before the oldest
            return end if end + size <= oldest else None
        if end + size <= self._nbytes:
            return end
        return 0 if size <= oldest else None

    def free(self, place: int, reader: int) -> None:
        """Note that a reader has read the message at a place."""
        readers = self._readers.get(place)
        if readers is not None:
            readers.discard(reader)
        self._shrink()

    def forget(self, reader: int) -> None:
        """Stop waiting for a reader."""
        for readers in self._readers.values():
            readers.discard(reader)
        self._shrink()

    def readers(self) -> set[int]:
        """Returns the ranks that have not read everything."""
        return set().union(*self._readers.values())

    def _shrink(self) -> None:
        while self._blocks and not self._blocks[0][2]:
            del self._readers[self._blocks.popleft()[0]]


class _Line:
    """The connection to another rank, with the packets that wait to be sent, and the places that were read in its
    memory.

    Args:
        neighbour: the rank.
        most_unfreed: bytes that are read before the rank is told so. A larger value needs fewer packets.
    """

    def __init__(self, neighbour: Neighbour, most_unfreed: int) -> None:
        self.rank = neighbour.rank
        self.memory = neighbour.memory
        self.socket = neighbour.socket
        self.is_lost = False
        self.has_asked = False  # the rank for the places that it has read
        self.is_asked = False
        self.backlog: deque[bytes] = deque()
        self._most_unfreed = most_unfreed
        self._unfreed = array("I")
        self._unfreed_bytes = 0

    def send(self, packet: bytes) -> None:
        """Send a packet, or keep it until there is room. Never waits. Packets for a lost rank are dropped."""
        if not self.is_lost:
            self.backlog.append(packet)
            self.flush()

    def flush(self) -> None:
        """Send the packets that wait, as far as there is room."""
        try:
            while self.backlog:
                self.socket.send(self.backlog[0], socket.MSG_NOSIGNAL)
                self.backlog.popleft()
        except BlockingIOError:
            return
        except OSError:  # the rank is gone; `receive` will notice after it has read all that the rank sent
            self.backlog.clear()

    def receive(self) -> Iterator[bytes]:
        """Yield the packets that have arrived. If the rank has closed the connection, the last packet is empty."""
        was_reset = False
        while not self.is_lost:
            try:
                packet = self.socket.recv(_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                # The rank has closed the connection with packets of ours unread. The system reports this once, before
                # the packets that the rank had sent, which may be all that this rank waits for.
                if not was_reset:
                    was_reset = True
                    continue
                packet = b""
            self.is_lost = not packet
            yield packet

    def ask(self) -> None:
        """Ask the rank which places it has read, unless it was asked already."""
        if not self.has_asked:
            self.has_asked = True
            self.send(_PLEASE)

    def free(self, notice: _Notice) -> None:
        """Note that a chunk was read."""
        self._unfreed.append(notice.place)
        self._unfreed_bytes += notice.length
        if (
            self.is_asked
            or self._unfreed_bytes >= self._most_unfreed
            or self._unfreed.itemsize * len(self._unfreed) > _PACKET_BYTES // 2
        ):
            self.say_free()

    def say_free(self) -> None:
        """Tell the rank which places were read, now or, if there are none, as soon as there are some."""
        self.is_asked = not self._unfreed
        if self._unfreed:
            self.send(_ARE_FREE + self._unfreed.tobytes())
            self._unfreed = array("I")
            self._unfreed_bytes = 0


class SharedGroup:
    """A process group of ranks that share memory.

    Args:
        neighbours: the ranks. The group closes the connections to them.
        numbers: the number that each rank has among all processes, for errors.
        timeout_s: seconds within which a collective has to end.
    """

    def __init__(self, neighbours: Neighbours, numbers: Sequence[int], timeout_s: float) -> None:
        self._rank = neighbours.rank
        self._size = neighbours.size
        self._memory = neighbours.memory
        self._ring = _Ring(MEMORY_BYTES)
        # A rank that needs room asks for it. Usually it is told of free places before.
        most_unfreed = MEMORY_BYTES // (4 * len(neighbours.others))
        self._lines = {rank: _Line(other, most_unfreed) for rank, other in neighbours.others.items()}
        self._by_descriptor = {line.socket.fileno(): line for line in self._lines.values()}
        self._others = frozenset(self._lines)
        self._numbers = numbers
        self._timeout_s = timeout_s
        self._next = 0
        self._under_way: dict[int, _Collective] = {}  # oldest first
        self._early: dict[int, list[tuple[int, _Notice]]] = {}  # of collectives that this rank has not started
        self._outgoing: deque[_Outgoing] = deque()
        self._error: BaseException | None = None
        self._is_closing = False
        self._lock = threading.Lock()
        self._bell = _Bell()
        sockets = [line.socket for line in self._lines.values()]
        # The thread holds no reference to the group while it waits. So the thread ends when nothing refers to the group
        # any more, even if the group was never closed.
        self._end = weakref.finalize(self, self._bell.ring)
        self._end.atexit = False
        self._thread = threading.Thread(
            target=_watch,
            args=(weakref.ref(self), self._bell, sockets, self._under_way),
            name="gqsgd-shared-memory",
            daemon=True,
        )
        self._thread.start()
        _alive.add(self)

    def takes(self, exchange: Exchange) -> bool:
        """Returns whether a collective runs through the memory; otherwise Gloo runs it. The answer is the same on all
        ranks."""
        if exchange.kind not in _COMBINED_BY:
            return True
        dtype = exchange.output.dtype
        if dtype.is_floating_point or dtype.is_complex:
            return exchange.kind == "sum" and self.adds(dtype)
        return self._size <= MOST_TO_ADD

    def adds(self, dtype: torch.dtype) -> bool:
        """Returns whether sums of floating-point numbers of a dtype run through the memory."""
        return self._size == 2 and dtype in _ADDED_DTYPES

    def start(self, exchange: Exchange) -> SharedWork:
        """Start a collective.

        Raises:
            RuntimeError: if an earlier collective has failed, or if the group is closed.
        """
        done: list[tuple[SharedWork, BaseException | None]] = []
        with self._held():
            if self._error is not None or self._is_closing:
                raise RuntimeError(str(self._error or "the process group was closed"))
            collective = self._made(exchange)
            self._next += 1
            self._under_way[collective.number] = collective
            self._outgoing.extend(collective.outgoing)
            try:
                # First read whether another rank has failed: no collective may end on this rank that fails on that
                # rank.
                for line in self._lines.values():
                    self._receive(line)
                self._write()
                for rank, notice in self._early.pop(collective.number, ()):
                    self._told(rank, notice)
                self._sweep(done)
            except Exception as error:  # as in `_look`: the work raises it
                self._break(error, done)
            if any(line.backlog for line in self._lines.values()):
                self._bell.ring()  # the thread sends them when there is room
        _finish(done)
        return collective.work

    def close(self) -> None:
        """End the group. This is not a collective. Collectives that are under way fail."""
        _alive.discard(self)
        self._is_closing = True
        if self._end.detach() is None:
            return  # it was closed before
        self._bell.ring()
        # Garbage collection may call this on any thread. A thread cannot wait for itself, nor for a thread that waits
        # for it.
        if threading.current_thread() is not self._thread and not holds_a_lock():
            self._thread.join(CLOSE_TIMEOUT_S)

    def abandon(self) -> None:
        """Close the descriptors that a forked child has inherited. The connections of its parent process stay open."""
        if self._end.detach() is not None:
            os.close(self._bell.descriptor)  # not with its lock, which another thread may have held
            for line in self._lines.values():
                line.socket.close()

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._lock:
            _holders.add(threading.get_ident())
            try:
                yield
            finally:
                _holders.discard(threading.get_ident())

    def _made(self, exchange: Exchange) -> _Collective:
        """Create a collective, and copy what this rank sends to itself."""
        kind = exchange.kind
        source = _bytes_of(exchange.input)
        output = _bytes_of(exchange.output)
        number = self._next
        deadline = time.monotonic() + self._timeout_s
        if kind in _COMBINED_BY:
            incoming = {rank: _Incoming(output) for rank in self._lines if len(output)}
            outgoing = [_Outgoing(number, output, self._others)] if len(output) else []
            dtype = exchange.output.detach().view(-1)[:0].numpy().dtype
            return _Collective(number, deadline, incoming, outgoing, _COMBINED_BY[kind], dtype, self._rank)
        if kind == "all_gather":
            sent = [source] * self._size
            coming = list(output.reshape(self._size, -1))
            outgoing = [_Outgoing(number, source, self._others)] if len(source) else []
        else:
            sizes = exchange.splits or ([], [])
            coming = _parts(output, sizes[0], exchange.output, self._size)
            sent = _parts(source, sizes[1], exchange.input, self._size)
            outgoing = [_Outgoing(number, sent[rank], frozenset((rank,))) for rank in self._lines if len(sent[rank])]
        if len(sent[self._rank]) != len(coming[self._rank]):
            raise RuntimeError(
                f"{kind}: this rank sends itself {len(sent[self._rank])} bytes, and expects {len(coming[self._rank])}"
            )
        if coming[self._rank].ctypes.data != sent[self._rank].ctypes.data:  # a gathered message may be in place
            coming[self._rank][:] = sent[self._rank]
        incoming = {rank: _Incoming(coming[rank]) for rank in self._lines if len(coming[rank])}
        return _Collective(number, deadline, incoming, outgoing)

    def _write(self) -> None:
        """Write the outgoing messages, as far as there is room, and tell their readers."""
        while self._outgoing:
            part = self._outgoing[0]
            length = min(CHUNK_BYTES, len(part.source) - part.written)
            place = self._ring.reserve(length, part.readers)
            if place is None:
                for rank in self._ring.readers():
                    self._lines[rank].ask()
                return
            self._memory[place : place + length] = part.source[part.written : part.written + length]
            notice = _Notice(part.number, part.written, len(part.source), place, length)
            for rank in part.readers:
                line = self._lines[rank]
                line.send(notice.packed())
                if line.is_lost:
                    self._ring.free(place, rank)
            part.written += length
            collective = self._under_way[part.number]
            if part.written == len(part.source):
                self._outgoing.popleft()
                collective.outgoing.remove(part)
            self._take_held(collective)

    def _told(self, rank: int, notice: _Notice) -> None:
        """Note that a chunk lies in another rank's memory, and take it if this rank has started the collective."""
        collective = self._under_way.get(notice.number)
        if collective is None:
            self._early.setdefault(notice.number, []).append((rank, notice))
            return
        part = collective.incoming.get(rank)
        expected = 0 if part is None else len(part.target)
        if part is None or expected != notice.total:
            raise RuntimeError(
                f"global rank {self._numbers[rank]} sends {notice.total} bytes where {expected} are expected: ranks "
                "have other tensors, or exchange in another order"
            )
        part.told += notice.length
        self._take(collective, rank, notice)

    def _take_held(self, collective: _Collective) -> None:
        """Take the held chunks of a collective that need not wait any longer."""
        held = collective.held
        collective.held = []
        for rank, notice in held:
            self._take(collective, rank, notice)

    def _take(self, collective: _Collective, rank: int, notice: _Notice) -> None:
        # The group's thread has the same rounding mode on all ranks. A thread that starts collectives may flush
        # denormal numbers to zero on one rank only, and then sums would differ between ranks.
        is_for_thread = collective.adds_floats and threading.get_ident() != self._thread.ident
        if is_for_thread or not collective.can_take(notice):
            collective.held.append((rank, notice))
            if is_for_thread:
                self._bell.ring()
            return
        line = self._lines[rank]
        collective.take(rank, line.memory[notice.place : notice.place + notice.length], notice.position)
        line.free(notice)

    def _sweep(self, done: list[tuple[SharedWork, BaseException | None]]) -> None:
        """Complete the collectives that have ended, and fail those that can never end."""
        # If packets are still to be sent, nothing is completed, because the caller might close the group, and they
        # would be lost.
        is_sent = not any(line.backlog for line in self._lines.values())
        for collective in list(self._under_way.values()) if is_sent else ():
            if collective.is_through:
                del self._under_way[collective.number]
                done.append((collective.work, None))
        gone = {
            rank
            for collective in self._under_way.values()
            for rank in collective.missing()
            if self._lines[rank].is_lost
        }
        if gone:
            self._break(RuntimeError(f"Connection closed by {self._in_words(gone)}, which has ended or failed"), done)
        oldest = next(iter(self._under_way.values()), None)
        if oldest is not None and time.monotonic() > oldest.deadline:
            late = set(oldest.missing()) or self._ring.readers()
            self._break(RuntimeError(f"Timed out after {self._timeout_s:g} s waiting for {self._in_words(late)}"), done)

    def _in_words(self, ranks: set[int]) -> str:
        return f"global {ranks_in_words(sorted(self._numbers[rank] for rank in ranks))}"

    def _break(self, error: BaseException, done: list[tuple[SharedWork, BaseException | None]]) -> None:
        """Fail all collectives that are under way, and all later ones, also on the other ranks."""
        if self._error is None:
            reason = error.reason if isinstance(error, _HasFailed) else str(error)
            for line in self._lines.values():
                line.send(_HAS_FAILED + reason.encode()[:_REASON_BYTES])
        self._error = self._error or error
        done.extend((collective.work, error) for collective in self._under_way.values())
        self._under_way.clear()
        self._outgoing.clear()
        for line in self._lines.values():
            with suppress(OSError):
                line.socket.shutdown(socket.SHUT_RDWR)

    def _look(self, events: Sequence[tuple[int, int]]) -> dict[int, int]:
        """Handle the packets from other ranks, and check the deadlines. Called on the group's thread.

        Returns:
            The events to wait for next, by the descriptor of each connection that is not lost.
        """
        done: list[tuple[SharedWork, BaseException | None]] = []
        with self._held():
            try:
                for descriptor, _ in events:
                    if descriptor in self._by_descriptor:
                        self._receive(self._by_descriptor[descriptor])
                self._write()
                for collective in self._under_way.values():
                    if collective.adds_floats:
                        self._take_held(collective)
                self._sweep(done)
            except Exception as error:  # the ranks' calls do not match, or there is a bug
                self._break(error, done)
            interests = {
                descriptor: select.POLLIN | (select.POLLOUT if line.backlog else 0)
                for descriptor, line in self._by_descriptor.items()
                if not line.is_lost
            }
        _finish(done)
        return interests

    def _stop(self) -> None:
        """Mark the connections as lost, because they are about to be closed."""
        with self._held():
            for line in self._lines.values():
                line.is_lost = True
            self._error = self._error or RuntimeError("the process group was closed")

    def _receive(self, line: _Line) -> None:
        line.flush()
        for packet in line.receive():
            if not packet:
                self._ring.forget(line.rank)
            elif packet[0] == _IS_MESSAGE:
                self._told(line.rank, _Notice(*_MESSAGE.unpack(packet)[1:]))
            elif packet == _PLEASE:
                line.say_free()
            elif packet.startswith(_HAS_FAILED):
                # That rank may have sent everything that this rank needs. But this rank must not continue if that rank
                # has failed.
                reason = packet[len(_HAS_FAILED) :].decode(errors="replace")
                raise _HasFailed(self._in_words({line.rank}), reason)
            else:
                line.has_asked = False
                for place in memoryview(packet)[len(_ARE_FREE) :].cast("I"):
                    self._ring.free(place, line.rank)


class _Bell:
    """Wakes a thread that waits in `poll`. It may be rung after it was closed.

    Attributes:
        descriptor: file descriptor that is readable after a ring.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.RLock()  # garbage collection within `ring` may call `ring`
        self._is_over = False

    def ring(self) -> None:
        """Wake the thread."""
        with self._lock, suppress(BlockingIOError):
            if not self._is_over:
                os.eventfd_write(self.descriptor, 1)

    def hush(self) -> None:
        """Reset the bell after a ring."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            self._is_over = True
            os.close(self.descriptor)


def _watch(
    ref: weakref.ref[SharedGroup],
    bell: _Bell,
    sockets: Sequence[socket.socket],
    under_way: dict[int, _Collective],
) -> None:
    """Serve a group until it is closed, or until nothing refers to it any more. Then close its connections."""
    poll = select.poll()
    poll.register(bell.descriptor, select.POLLIN)
    watched: dict[int, int] = {}
    events: list[tuple[int, int]] = []
    while (group := ref()) is not None and not group._is_closing:
        interests = group._look(events)
        del group
        for descriptor in watched.keys() - interests.keys():
            poll.unregister(descriptor)
        for descriptor, flags in interests.items() - watched.items():
            poll.register(descriptor, flags)
        watched = interests
        events = poll.poll(PERIOD_MS)
        bell.hush()
    if group is not None:
        group._stop()
    for connection in sockets:
        connection.close()
    bell.close()
    _finish([(collective.work, RuntimeError("the process group was closed")) for collective in under_way.values()])


def _finish(done: Sequence[tuple[SharedWork, BaseException | None]]) -> None:
    for work, error in done:
        work.finish(error)


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """Returns the bytes of a contiguous tensor, uint8 [bytes], in the same memory."""
    array: np.ndarray = tensor.detach().view(-1).view(torch.uint8).numpy()
    return array


def _parts(data: np.ndarray, sizes: Sequence[int], tensor: Tensor, ranks: int) -> list[np.ndarray]:
    """Returns the part of each rank. ``sizes`` are in elements of the tensor; if empty, all parts are equal."""
    if not sizes:
        return list(data.reshape(ranks, -1))
    ends = accumulate((size * tensor.element_size() for size in sizes), initial=0)
    return [data[start:end] for start, end in pairwise(ends)]


#: The threads that have the lock of a group, by identifier.
_holders: set[int] = set()


def holds_a_lock() -> bool:
    """Returns whether this thread has the lock of a group, so that it must not wait for a thread that needs it."""
    return threading.get_ident() in _holders


#: The groups of this process. A forked child must not keep their connections.
_alive: weakref.WeakSet[SharedGroup] = weakref.WeakSet()


def _abandon_after_fork() -> None:
    """Close the connections in a forked child. While the child has them, other ranks cannot notice that its parent
    died."""
    for group in list(_alive):
        group.abandon()
    _alive.clear()


os.register_at_fork(after_in_child=_abandon_after_fork)
