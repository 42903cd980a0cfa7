"""A switch that holds every packet for a time: the latency of a lab's links.

    python switch.py PORTS LATENCY_S JITTER_S

The switch stands where the kernel's bridge would stand, in a namespace with the interfaces p0, p1 and so on. It is a
process of its own because not every kernel can hold packets (netem). Packets come as the kernel hands them over, up to
64 KiB before segmentation, so that few of them make a fast link. They leave in the order in which their host sent them.

It imports only the standard library, and nothing of this package, so that it starts at once.
"""

from __future__ import annotations

import errno
import os
import random
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_ETH_P_ALL = 3
#: Bytes of the header of Linux's virtio_net before each packet: what is still to be done to it, such as segmentation.
_HEADER = 10
_BUFFER_BYTES = 1 << 28
#: More than the kernel's largest packet.
_PACKET_BYTES = 1 << 17
#: Packets that are read from one port before the others have their turn.
_BATCH = 64


class Switch:
    """Ports, and the packets that wait between them.

    Args:
        sockets: one packet socket for each port.
        latency_s: seconds between a packet's arrival and its departure.
        jitter_s: a packet's latency is uniform between so many seconds below and above.
    """

    def __init__(self, sockets: list[socket.socket], latency_s: float, jitter_s: float) -> None:
        self._sockets = sockets
        self._ports = {one.fileno(): port for port, one in enumerate(sockets)}
        self._latency_s, self._jitter_s = latency_s, jitter_s
        #: For each port, the packets that came in there: (when they leave, packet). Each is sorted by time.
        self._waiting: list[deque[tuple[float, bytes]]] = [deque() for _ in sockets]
        #: Ports of the hosts' hardware addresses.
        self._places: dict[bytes, int] = {}
        self._buffer = memoryview(bytearray(_PACKET_BYTES))

    def run(self) -> None:
        """Carry packets for ever."""
        while True:
            self._send(time.monotonic())
            first = min((queue[0][0] for queue in self._waiting if queue), default=None)
            timeout = None if first is None else max(0.0, first - time.monotonic())
            for ready in select.select(self._sockets, [], [], timeout)[0]:
                self._receive(self._ports[ready.fileno()], time.monotonic())

    def _receive(self, port: int, now: float) -> None:
        """Put what has come in at a port into its queue."""
        queue = self._waiting[port]
        latest = queue[-1][0] if queue else 0.0
        for packet in _packets(self._sockets[port], self._buffer):
            self._places[packet[_HEADER + 6 : _HEADER + 12]] = port
            delay_s = self._latency_s
            if self._jitter_s:
                delay_s += random.uniform(-self._jitter_s, self._jitter_s)  # noqa: S311
            latest = max(latest, now + delay_s)  # packets do not overtake each other
            queue.append((latest, packet))

    def _send(self, now: float) -> None:
        """Send all packets whose time has come."""
        for port, queue in enumerate(self._waiting):
            while queue and queue[0][0] <= now:
                packet = queue.popleft()[1]
                place = self._places.get(packet[_HEADER : _HEADER + 6])
                # A packet for everybody, or for a host that has not been heard yet.
                places = [one for one in range(len(self._sockets)) if one != port] if place is None else [place]
                for one in places:
                    with suppress(OSError):  # the port is down, or its queue is full: the packet is lost
                        self._sockets[one].send(packet)


def _packets(source: socket.socket, buffer: memoryview) -> Iterator[bytes]:
    """The packets that have come in, with their headers."""
    for _ in range(_BATCH):
        try:
            length = source.recv_into(buffer)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.ENETDOWN:  # said once when a port goes down; its packets come again when it is up
                return
            raise
        yield bytes(buffer[:length])


def _open(port: int) -> socket.socket:
    """A socket that gets and sends whole frames at a port of this namespace."""
    one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    one.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    one.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    one.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    one.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _BUFFER_BYTES)
    one.setblocking(False)
    one.bind((f"p{port}", _ETH_P_ALL))
    return one


def main() -> None:
    """Run the command line: say "ready" once packets are carried."""
    with suppress(OSError):  # before all others, so that packets leave in time on a busy machine
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    switch = Switch([_open(port) for port in range(int(sys.argv[1]))], float(sys.argv[2]), float(sys.argv[3]))
    print("ready", flush=True)
    switch.run()


if __name__ == "__main__":
    main()
