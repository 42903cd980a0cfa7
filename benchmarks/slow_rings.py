"""Time that a ring of TCP sockets needs on slow links, over the time of its bytes at the link's rate.

    python -m benchmarks.slow_rings --save

NCCL cuts what a rank sends to the next one into slices of up to 1 MiB, has up to four of them under way on each of its
channels, and spreads each slice over the sockets of the channel. A slice is forwarded when all of its parts have
arrived. This benchmark does the same with sockets and no GPU, on hosts whose links are held at a rate: two channels of
16 sockets, which is what NCCL takes on AWS, or of one socket, which it takes elsewhere. Links are shaped at the sender,
as `tc` does on a rented machine, with a queue of 50 or 400 milliseconds. The congestion control is Linux's default,
cubic. It needs Linux, root and iproute2, see `netlab`.
"""

from __future__ import annotations

import argparse
import os
import queue
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks.hosts import begin, finish, in_lab, slowest, work_or_present
from benchmarks.report import Report, command_line, program
from netlab.lab import INTERFACE, NETWORK, NetLab, parse_rate

HOSTS = 4
CHANNELS = 2
#: Bytes that are averaged in each round.
NBYTES = 64 << 20
#: A channel's buffer towards the next rank in NCCL has 4 MiB: two chunks, of two slices each.
CHUNK = 2 << 20
SLICES = 2
UNDER_WAY = 4
#: The least bytes of a slice that one socket gets (``NCCL_SOCKET_MIN_TASKSIZE``).
PART = 1 << 16
#: Sockets of each channel, and milliseconds of a queue, that are compared.
CASES = ((16, 50), (16, 400), (1, 50))
RATES = ("50mbit", "100mbit", "200mbit", "500mbit", "1gbit")
ROUNDS = 3
PORT = 29700
MTU = 9000


def slices_of(nbytes: int, ranks: int) -> list[tuple[int, int]]:
    """Returns what a rank sends on one channel for a mean of so many bytes: for each slice, its step and its bytes.

    The mean goes around in loops of a chunk for each rank; each loop has 2 (ranks - 1) steps.
    """
    made = []
    while nbytes > 0:
        loop = min(nbytes, ranks * CHUNK)
        nbytes -= loop
        chunk = -(-loop // ranks)
        first = -(-chunk // SLICES)
        made += [(step, size) for step in range(2 * (ranks - 1)) for size in (first, chunk - first)]
    return made


def parts_of(sizes: list[int], sockets: int) -> list[list[tuple[int, int]]]:
    """Returns the parts of each slice: the socket that carries the part, and its bytes. Sockets take turns."""
    turn = 0
    several = []
    for size in sizes:
        parts = []
        largest = max(PART, -(-size // sockets))
        while size > 0:
            parts.append((turn % sockets, min(largest, size)))
            turn += 1
            size -= largest
        several.append(parts)
    return several


@dataclass
class Neighbours:
    """Sockets of one channel to the next rank and from the previous one."""

    outgoing: list[socket.socket]
    incoming: list[socket.socket]


class Channel:
    """One mean on one channel: threads that send and threads that receive, and `forward`.

    Args:
        neighbours: the channel's sockets.
        nbytes: bytes of the mean that the channel carries.
        ranks: number of ranks.
    """

    def __init__(self, neighbours: Neighbours, nbytes: int, ranks: int) -> None:
        self._neighbours = neighbours
        self._slices = slices_of(nbytes, ranks)
        self._last_step = 2 * (ranks - 1) - 1
        sockets = len(neighbours.outgoing)
        self._parts = parts_of([size for _, size in self._slices], sockets)
        self._lists: list[list[tuple[int, int]]] = [[] for _ in range(sockets)]
        for number, parts in enumerate(self._parts):
            for taker, size in parts:
                self._lists[taker].append((number, size))
        self._unsent = [len(parts) for parts in self._parts]
        self._missing = [len(parts) for parts in self._parts]
        self._has_come = [threading.Event() for _ in self._parts]
        self._to_send: list[queue.SimpleQueue[None]] = [queue.SimpleQueue() for _ in range(sockets)]
        self._free = threading.Semaphore(UNDER_WAY)
        self._taken = 0
        self._changed = threading.Condition()

    def start(self) -> list[threading.Thread]:
        """Returns the threads of the sockets, which wait for `forward`."""
        sockets = range(len(self._lists))
        targets = [(self._send, number) for number in sockets] + [(self._receive, number) for number in sockets]
        threads = [threading.Thread(target=target, args=(number,)) for target, number in targets]
        for thread in threads:
            thread.start()
        return threads

    def _send(self, number: int) -> None:
        data = memoryview(bytes(CHUNK))
        for piece, size in self._lists[number]:
            self._to_send[number].get()
            self._neighbours.outgoing[number].sendall(data[:size])
            with self._changed:
                self._unsent[piece] -= 1
                if not self._unsent[piece]:
                    self._free.release()

    def _receive(self, number: int) -> None:
        place = bytearray(PART)
        for piece, size in self._lists[number]:
            with self._changed:  # a buffer of the peer holds no more than this
                self._changed.wait_for(lambda piece=piece: piece < self._taken + UNDER_WAY)  # type: ignore[misc]
            left = size
            while left:
                left -= self._neighbours.incoming[number].recv_into(place, min(left, len(place)))
            with self._changed:
                self._missing[piece] -= 1
                if not self._missing[piece]:
                    self._has_come[piece].set()

    def forward(self) -> None:
        """Do the work of the GPU: take the slices that come in order, and pass them on."""
        for number, (step, _) in enumerate(self._slices):
            if step > 0:
                self._take(number - SLICES)
            self._free.acquire()
            for taker, _ in self._parts[number]:
                self._to_send[taker].put(None)
            if step == self._last_step and number % SLICES == SLICES - 1:
                for piece in range(number - SLICES + 1, number + 1):
                    self._take(piece)

    def _take(self, piece: int) -> None:
        self._has_come[piece].wait()
        with self._changed:
            self._taken += 1
            self._changed.notify_all()


def neighbours(rank: int, ranks: int, sockets: int) -> list[Neighbours]:
    """Connect to the next rank, and accept the previous one; returns the sockets of each channel."""
    count = CHANNELS * sockets
    listening = socket.create_server(("0.0.0.0", PORT + sockets), backlog=count)  # noqa: S104 - in a namespace
    dist.barrier()
    outgoing = []
    for number in range(count):
        made = socket.socket()
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.connect((f"{NETWORK}.{(rank + 1) % ranks + 1}", PORT + sockets))
        made.sendall(number.to_bytes(2, "big"))
        outgoing.append(made)
    incoming = {}
    for _ in range(count):
        accepted, _ = listening.accept()
        incoming[int.from_bytes(accepted.recv(2, socket.MSG_WAITALL), "big")] = accepted
    listening.close()
    return [
        Neighbours(outgoing[first : first + sockets], [incoming[first + number] for number in range(sockets)])
        for first in range(0, count, sockets)
    ]


def work(options: argparse.Namespace) -> None:
    """Do one rank's part."""
    rank, ranks = begin()
    result: dict[str, Any] = {}
    for sockets, milliseconds in CASES:
        shape(os.environ[RATE], milliseconds)
        channels = neighbours(rank, ranks, sockets)
        seconds = []
        for _ in range(ROUNDS + 1):
            means = [Channel(channel, NBYTES // CHANNELS, ranks) for channel in channels]
            waiting = [thread for mean in means for thread in mean.start()]
            forwarding = [threading.Thread(target=mean.forward) for mean in means]
            dist.barrier()
            begun = time.monotonic()
            for thread in forwarding:
                thread.start()
            for thread in (*forwarding, *waiting):
                thread.join()
            seconds.append(float(slowest([time.monotonic() - begun])[0]))
        result[f"{sockets} sockets, {milliseconds} ms"] = seconds[1:]  # the first round begins with new connections
        for channel in channels:
            for one in (*channel.outgoing, *channel.incoming):
                one.close()
    finish(result)


#: The environment variable that tells workers the rate.
RATE = "GQSGD_SLOW_RINGS_RATE"


def shape(rate: str, milliseconds: int) -> None:
    """Give what this process's host sends a rate, and a queue that holds so many milliseconds of traffic."""
    bucket = ["rate", f"{parse_rate(rate)}bit", "burst", "70000b", "latency", f"{milliseconds}ms"]
    subprocess.run(["tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *bucket], check=True)  # noqa: S607
    dist.barrier()


def measure(options: argparse.Namespace) -> Report:
    """Run the workers in every lab."""
    report = Report(
        "slow_rings",
        f"Time of a mean of {NBYTES >> 20} MiB by a ring of TCP sockets on {HOSTS} hosts, over that of its bytes",
        {
            "sockets per channel": "d",
            "queue (ms)": "d",
            "rate": "",
            "time (s)": ".2f",
            "least to most (s)": "",
            "over bytes at the rate": ".3f",
        },
        notes=[
            f"time = median of {ROUNDS} means after a first one, {CHANNELS} channels. A rank sends "
            f"{2 * (HOSTS - 1) / HOSTS:g} times the bytes of the mean. Headers of Ethernet, IP and TCP take 0.7 % of "
            f"packets of {MTU} bytes.",
            "Sockets that share a short queue lose packets at the sender, and a socket with nothing else under way "
            "waits a fifth of a second or more until it tries again. The ring waits for the last part of each slice.",
            "At 1 Gbit/s, the processors of this machine were busy with 16 sockets: the length of the queue made no "
            "difference.",
        ],
    )
    for rate in RATES:
        os.environ[RATE] = rate
        with NetLab(HOSTS, "none") as lab:
            _widen(lab)
            result = in_lab(lab, program(), f"at {rate}")
        _add_rows(report, rate, result)
    return report


def _widen(lab: NetLab) -> None:
    """Let all devices of a lab send packets of `MTU` bytes."""
    switch = lab.namespace(0).removesuffix("h0") + "sw"
    devices = [(switch, f"p{host}") for host in range(lab.hosts)]
    devices += [(lab.namespace(host), INTERFACE) for host in range(lab.hosts)]
    for namespace, device in [*devices, (switch, "br0")]:
        subprocess.run(["ip", "-n", namespace, "link", "set", device, "mtu", str(MTU)], check=True)  # noqa: S607


def _add_rows(report: Report, rate: str, result: dict[str, list[float]]) -> None:
    bytes_s = 8 * 2 * (HOSTS - 1) / HOSTS * NBYTES / (parse_rate(rate) or 1)
    for sockets, milliseconds in CASES:
        seconds = np.array(result[f"{sockets} sockets, {milliseconds} ms"])
        median = float(np.median(seconds))
        spread = f"{seconds.min():.2f} to {seconds.max():.2f}"
        report.rows.append([sockets, milliseconds, rate, median, spread, median / bytes_s])
        print(report.rows[-1], flush=True)
    report.raw[rate] = result


if __name__ == "__main__":
    work_or_present(command_line(__doc__), work, measure)
