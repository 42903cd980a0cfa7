"""Collectives between the ranks of one machine, through shared memory instead of Gloo over loopback.

A rank writes its messages into its own memory, tells the others on their sockets where each of them lies, and copies
theirs from their memory. A message takes two copies by the processor and one packet of 40 bytes, where loopback takes
two copies by the system as well, and all that TCP does for each segment of 64 KiB.

Sockets carry the notices, and no counters in the memory do, for four reasons:

* A rank that waits sleeps in `poll`, and takes no processor time from the ranks that it waits for. Ranks often have one
  core each.
* Packets order memory: what a rank has written before it sends a notice is what the reader of the notice sees, on every
  processor. Memory is used again only after a notice in the other direction.
* A process that dies closes its sockets, so that its peers notice at once.
* A wait can end at a deadline.

Every collective of a group has a number, the same on all ranks, because all ranks start them in the same order. Notices
carry it, so ranks may start them at different times. Long messages travel in chunks, which take the memory in turns.
The memory belongs to one group. So it never fills up with messages for which a rank is not ready because it waits for
a message of another group.

Sums and maxima of whole numbers do not depend on an order: each rank joins what all others send with its own numbers.
Nor does the sum of two floating-point numbers, so two ranks add gradients in the same way. Sums of more ranks stay with
Gloo, because their bits depend on the order and are to be plain DDP's.
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

#: Bytes of a long message that are written, and told, at once.
CHUNK_BYTES = 1 << 20
#: Messages begin at multiples of this: a line of the processor's cache.
ALIGNMENT = 64
#: Ranks beyond which sums stay with Gloo, whose ring adds each number once per rank.
MOST_TO_ADD = 4
#: Milliseconds between two looks at the deadlines.
PERIOD_MS = 500
#: Seconds to wait for the thread when closing; it never waits for another rank.
CLOSE_TIMEOUT_S = 60.0

_MESSAGE = struct.Struct("<BQQQII")
_IS_MESSAGE = 1
#: A list of places that were read and may be used again: this byte, and a number of 4 bytes for each.
_ARE_FREE = b"\x02\0\0\0"
#: Asks for such a list at once, or as soon as there is something to be listed.
_PLEASE = b"\x03"
#: Says that the sender has failed: this byte, and why.
_HAS_FAILED = b"\x04"
#: Bytes of the reason at most.
_REASON_BYTES = 300
_PACKET_BYTES = 1 << 16

_COMBINED_BY = {"sum": np.add, "max": np.maximum}
#: Floating-point numbers that two ranks add here. NumPy has no bf16, and adds fp16 one number at a time.
_ADDED_DTYPES = (torch.float32, torch.float64)


class _Notice(NamedTuple):
    """A notice that a chunk of a message lies in the sender's memory.

    Attributes:
        number: of the collective.
        position: of the chunk in the message, in bytes.
        total: bytes of the whole message.
        place: of the chunk in the sender's memory.
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


class SharedWork:
    """A collective under way, like torch's `Work`."""

    def __init__(self) -> None:
        self._future: torch.futures.Future[None] = torch.futures.Future()

    def get_future(self) -> torch.futures.Future[None]:
        """Completes when the collective is through or has failed; it then has the error."""
        return self._future

    def wait(self) -> None:
        """Wait for the result.

        Raises:
            RuntimeError: the collective failed.
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
    """The message of one rank: its target, and how many bytes of it were announced and have been received."""

    target: np.ndarray
    told: int = 0
    received: int = 0


@dataclass(eq=False)
class _Outgoing:
    """A message to some ranks, and how many bytes of it lie in the memory already."""

    number: int
    source: np.ndarray
    readers: frozenset[int]
    written: int = 0


@dataclass(eq=False)
class _Collective:
    """A collective under way.

    Attributes:
        number: see the module.
        deadline: when it fails, on the monotonic clock.
        incoming: the message of each other rank that sends something.
        outgoing: the messages that are not wholly written yet.
        combine: joins the numbers of a message with those that are there; None: the message takes their place.
        dtype: of the numbers that are combined.
        own_rank: number of this rank in the group.
        held: chunks that have to wait, because they would change numbers that this rank has not written yet.
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
        """Returns whether floating-point numbers are added, which a thread's mode of rounding changes."""
        return self.combine is not None and self.dtype.kind == "f"

    def can_take(self, notice: _Notice) -> bool:
        """Returns whether a chunk may change the numbers at its place."""
        return self.combine is None or all(part.written >= notice.position + notice.length for part in self.outgoing)

    def take(self, rank: int, chunk: np.ndarray, position: int) -> None:
        """Copy a chunk of a rank's message, or combine it with what is there."""
        part = self.incoming[rank]
        target = part.target[position : position + len(chunk)]
        if self.combine is None:
            target[:] = chunk
        else:
            numbers = target.view(self.dtype)
            terms = (numbers, chunk.view(self.dtype))
            # In rank order: where both numbers are NaN, the processor keeps the bits of the first one.
            with np.errstate(all="ignore"):  # infinities and overflows go to whoever looks at the gradient
                self.combine(*(terms if rank > self.own_rank else terms[::-1]), out=numbers)
        part.received += len(chunk)

    def missing(self) -> list[int]:
        """Returns the ranks that have not told all that they send."""
        return [rank for rank, part in self.incoming.items() if part.told < len(part.target)]


class _Ring:
    """The memory of a rank, which messages take in turns.

    Args:
        nbytes: its size.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._blocks: deque[tuple[int, int, set[int]]] = deque()  # place, end, and who has not read it
        self._readers: dict[int, set[int]] = {}  # by place

    def reserve(self, length: int, readers: frozenset[int]) -> int | None:
        """Returns a place for so many bytes; None as long as there is none."""
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
        if newest < oldest:  # messages go on at the start of the memory, before the oldest
            return end if end + size <= oldest else None
        if end + size <= self._nbytes:
            return end
        return 0 if size <= oldest else None

    def free(self, place: int, reader: int) -> None:
        """Note that a reader is done with what lies at a place."""
        readers = self._readers.get(place)
        if readers is not None:
            readers.discard(reader)
        self._shrink()

    def forget(self, reader: int) -> None:
        """Wait no longer for a reader."""
        for readers in self._readers.values():
            readers.discard(reader)
        self._shrink()

    def readers(self) -> set[int]:
        """Returns those who have not read everything."""
        return set().union(*self._readers.values())

    def _shrink(self) -> None:
        while self._blocks and not self._blocks[0][2]:
            del self._readers[self._blocks.popleft()[0]]


class _Line:
    """The connection to another rank, with packets that wait to be sent, and places that were read in its memory.

    Args:
        neighbour: the rank.
        most_unfreed: bytes that are read before the rank is told so; more bytes need fewer packets.
    """

    def __init__(self, neighbour: Neighbour, most_unfreed: int) -> None:
        self.rank = neighbour.rank
        self.memory = neighbour.memory
        self.socket = neighbour.socket
        self.is_lost = False
        self.has_asked = False  # for the places that the rank has read
        self.is_asked = False
        self.backlog: deque[bytes] = deque()
        self._most_unfreed = most_unfreed
        self._unfreed = array("I")
        self._unfreed_bytes = 0

    def send(self, packet: bytes) -> None:
        """Send a packet, or keep it until there is room; never waits. What is for a lost rank is dropped."""
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
        except OSError:  # the rank is gone, as `receive` will find once all that it has sent is read
            self.backlog.clear()

    def receive(self) -> Iterator[bytes]:
        """Yield the packets that have come; the last one is empty where the rank has closed the connection."""
        was_reset = False
        while not self.is_lost:
            try:
                packet = self.socket.recv(_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                # The rank has closed with packets of ours unread. The system says so once, before what the rank had
                # sent until then, which may be all that this one waits for.
                if not was_reset:
                    was_reset = True
                    continue
                packet = b""
            self.is_lost = not packet
            yield packet

    def ask(self) -> None:
        """Ask the rank to say what it has read, unless it was asked already."""
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
        """Say what was read, now or, if there is nothing, as soon as there is something."""
        self.is_asked = not self._unfreed
        if self._unfreed:
            self.send(_ARE_FREE + self._unfreed.tobytes())
            self._unfreed = array("I")
            self._unfreed_bytes = 0


class SharedGroup:
    """A process group of ranks that share memory.

    Args:
        neighbours: the ranks; the group closes the connections.
        numbers: the number that each rank has among all processes, for messages.
        timeout_s: seconds in which a collective has to be through.
    """

    def __init__(self, neighbours: Neighbours, numbers: Sequence[int], timeout_s: float) -> None:
        self._rank = neighbours.rank
        self._size = neighbours.size
        self._memory = neighbours.memory
        self._ring = _Ring(MEMORY_BYTES)
        # A rank that needs room asks for it. Usually it hears of it before.
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
        self._holder = 0  # thread that has the lock
        self._bell = _Bell()
        sockets = [line.socket for line in self._lines.values()]
        # The thread holds no reference to the group between two looks. So a group that nobody refers to any more, and
        # that was never closed, ends its thread.
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
        """Returns whether a collective runs through the memory; if not, it is for Gloo. The same on all ranks."""
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
            RuntimeError: an earlier one has failed, or the group is closed.
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
                # A rank that has failed meanwhile said so: nothing may be through here that is not there.
                for line in self._lines.values():
                    self._receive(line)
                self._write()
                for rank, notice in self._early.pop(collective.number, ()):
                    self._told(rank, notice)
                self._sweep(done)
            except Exception as error:  # as in `_look`: the work has it
                self._break(error, done)
            if any(line.backlog for line in self._lines.values()):
                self._bell.ring()  # the thread goes on when there is room
        _finish(done)
        return collective.work

    def close(self) -> None:
        """End the group. Not a collective. What is under way fails."""
        _alive.discard(self)
        self._is_closing = True
        if self._end.detach() is None:
            return  # it was closed before
        self._bell.ring()
        # A thread may come here while it collects garbage: it cannot wait for itself, nor for one that waits for it.
        if threading.get_ident() not in (self._thread.ident, self._holder):
            self._thread.join(CLOSE_TIMEOUT_S)

    def abandon(self) -> None:
        """Close what a forked child has inherited. The connections of the process that it was forked from stay."""
        if self._end.detach() is not None:
            os.close(self._bell.descriptor)  # not by its lock, which another thread may have had
            for line in self._lines.values():
                line.socket.close()

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._lock:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = 0

    def _made(self, exchange: Exchange) -> _Collective:
        """Returns a collective, with what this rank sends to itself in its place."""
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
        if coming[self._rank].ctypes.data != sent[self._rank].ctypes.data:  # a gathered message may lie there already
            coming[self._rank][:] = sent[self._rank]
        incoming = {rank: _Incoming(coming[rank]) for rank in self._lines if len(coming[rank])}
        return _Collective(number, deadline, incoming, outgoing)

    def _write(self) -> None:
        """Write what is to be sent, as far as there is room, and tell its readers."""
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
        """Note that a chunk lies in another rank's memory, and take it if this rank is ready."""
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
        """Take the chunks of a collective that had to wait, if they need not wait any longer."""
        held = collective.held
        collective.held = []
        for rank, notice in held:
            self._take(collective, rank, notice)

    def _take(self, collective: _Collective, rank: int, notice: _Notice) -> None:
        # The group's thread is alike on all ranks. A thread that starts collectives may flush denormal numbers to zero,
        # on one rank only, and ranks would hold different sums.
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
        """Complete the collectives that are through, and fail those that can never be."""
        # A packet that is still to be sent would be lost if the caller closed the group now.
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
        """Fail all that is under way, and all that comes after, also on the other ranks."""
        if self._error is None:
            for line in self._lines.values():
                line.send(_HAS_FAILED + str(error).encode()[:_REASON_BYTES])
        self._error = self._error or error
        done.extend((collective.work, error) for collective in self._under_way.values())
        self._under_way.clear()
        self._outgoing.clear()
        for line in self._lines.values():
            with suppress(OSError):
                line.socket.shutdown(socket.SHUT_RDWR)

    def _look(self, events: Sequence[tuple[int, int]]) -> dict[int, int]:
        """Handle what has come from other ranks, and look at the deadlines; on the group's thread.

        Returns:
            What to wait for next, for the descriptor of each connection that is not lost.
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
            except Exception as error:  # ranks do not fit together, or a defect
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
                # It may have sent all that is asked of it here. But this rank must not go on where that one has not.
                reason = packet[len(_HAS_FAILED) :].decode(errors="replace")
                raise RuntimeError(f"Connection closed by {self._in_words({line.rank})}, which has failed: {reason}")
            else:
                line.has_asked = False
                for place in memoryview(packet)[len(_ARE_FREE) :].cast("I"):
                    self._ring.free(place, line.rank)


class _Bell:
    """Wakes a thread that waits in `poll`; it may be rung after its end.

    Attributes:
        descriptor: what can be read when it was rung.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.RLock()  # a collection of garbage within `ring` may ring it
        self._is_over = False

    def ring(self) -> None:
        """Wake the thread."""
        with self._lock, suppress(BlockingIOError):
            if not self._is_over:
                os.eventfd_write(self.descriptor, 1)

    def hush(self) -> None:
        """Forget that it was rung."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """End it."""
        with self._lock:
            self._is_over = True
            os.close(self.descriptor)


def _watch(
    ref: weakref.ref[SharedGroup],
    bell: _Bell,
    sockets: Sequence[socket.socket],
    under_way: dict[int, _Collective],
) -> None:
    """Look after a group until it is closed, or nobody refers to it any more; then close its connections."""
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
    """Returns the part of each rank; ``sizes``: in elements of the tensor; none: all parts are equal."""
    if not sizes:
        return list(data.reshape(ranks, -1))
    ends = accumulate((size * tensor.element_size() for size in sizes), initial=0)
    return [data[start:end] for start, end in pairwise(ends)]


#: The groups of this process, whose connections a forked child must not keep.
_alive: weakref.WeakSet[SharedGroup] = weakref.WeakSet()


def _abandon_after_fork() -> None:
    """Close the connections in a forked child: as long as it has them, peers do not notice that its parent has died."""
    for group in list(_alive):
        group.abandon()
    _alive.clear()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_abandon_after_fork)
