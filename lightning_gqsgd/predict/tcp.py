"""The additional time of collectives over TCP between nodes, beyond a ring's bytes at the rate of the link.

Of NCCL, as factors of the bytes (`Terms`):

* **Sockets.** NCCL spreads what a rank sends over several sockets: 32 on AWS (two channels, each with the 2 threads of
  8 sockets that its source has for this vendor), and two where it does not know the vendor. Sockets that share the
  queue of a slow link lose packets there, and the ring waits for the last of them. How much longer a mean takes was
  measured with sockets alone, by the bytes that the queue holds (``benchmarks/slow_rings.py``). How long a link's queue
  is, nobody knows before a training: it is taken to hold between 50 and 400 ms of traffic.
* **Headers** of Ethernet, IP and TCP.
* **Trees.** An all-reduce of S bytes by a ring of N ranks sends 2 (N-1)/N S through each link. A pair of binary trees
  (Sanders, Speck, Träff, Parallel Computing 35, 2009), which NCCL has as well, sends 2 S through the links of ranks
  inside of both. On four nodes, the buckets of plain DDP were found to take as long as trees, and one all-reduce after
  the step as long as a ring. NCCL's own tables would have both take rings, so why they do is not known.

Of Gloo, as a number of latencies (`ways`):

* **Readiness.** A rank sends a message when the other end has said that it is ready to receive it, so the first byte
  comes after two latencies. Rings send segments, two of which are under way (``allreduce.cc`` and ``allgather.cc`` of
  Gloo). On a link whose latency is no more than a segment takes, a rank says that it is ready for a segment behind its
  own one in the same queue, so that each segment costs one latency. Means of 12 MiB between two hosts took 1,025 ms at
  140 Mbit/s and 25 ms, and 1,505 ms at 80 Mbit/s and 20 ms: 12 segments of 1 MiB with a latency each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

#: Bytes per second up to which a link is taken to carry TCP. Faster links usually have RDMA, of which nothing is known
#: here.
FASTEST_TCP = 25e9 / 8
#: By how much headers lengthen messages, with 66 bytes of Ethernet, IPv4 and TCP with time stamps: in packets of 9,001
#: bytes, as clouds have between machines, and of 1,500 (each without Ethernet's 14).
HEADERS_OF_LARGE_PACKETS = 9015 / 8949
HEADERS_OF_SMALL_PACKETS = 1514 / 1448
#: Milliseconds of traffic that a link's queue holds at least and at most. Their geometric mean is what is predicted.
SHORTEST_QUEUE_S = 0.05
LONGEST_QUEUE_S = 0.4
#: By the bytes that the queue of a link holds: time of a mean with 32 sockets, over that with two
#: (benchmarks/results/slow_rings.md).
LOSSES = ((0.3125e6, 1.417), (0.625e6, 1.338), (1.25e6, 1.231), (2.5e6, 1.097), (3.125e6, 1.027), (5e6, 1.004))


@dataclass(frozen=True)
class Factors:
    """Times as long as the bytes of a ring at the link's rate.

    Attributes:
        every: of each byte between nodes.
        trees: further, of a byte of an all-reduce that runs beside a backward pass.
    """

    every: float = 1.0
    trees: float = 1.0


@dataclass(frozen=True)
class Terms:
    """Factors as they are predicted, and the least and the most that they may be."""

    usual: Factors
    least: Factors
    most: Factors


def terms_of(nodes: int, ranks: int, bytes_per_s: float) -> Terms | None:
    """Returns the terms of NCCL between nodes; None: there is one node, or the link is too fast for TCP.

    Args:
        nodes: number of nodes.
        ranks: ranks of all nodes.
        bytes_per_s: rate of a node's link.
    """
    if nodes < 2 or bytes_per_s > FASTEST_TCP:
        return None
    usual = losses(bytes_per_s * math.sqrt(SHORTEST_QUEUE_S * LONGEST_QUEUE_S)) * HEADERS_OF_LARGE_PACKETS
    most = losses(bytes_per_s * SHORTEST_QUEUE_S) * HEADERS_OF_SMALL_PACKETS
    tree = ranks / (ranks - 1) if nodes > 2 else 1.0  # between two nodes, the inside of a tree is no more than its end
    return Terms(Factors(usual, tree), Factors(1.0, 1.0), Factors(most, tree))


def losses(queue_bytes: float) -> float:
    """Returns how much longer the bytes of many sockets take that share a queue of so many bytes.

    It falls evenly with the logarithm of the bytes between those of `LOSSES`, and beyond them it stays as it is.
    """
    if queue_bytes <= LOSSES[0][0]:
        return LOSSES[0][1]
    for (fewer, longer), (more, shorter) in pairwise(LOSSES):
        if queue_bytes <= more:
            share = math.log(queue_bytes / fewer) / math.log(more / fewer)
            return longer + share * (shorter - longer)
    return 1.0


#: Bytes of a segment of Gloo's all-reduce at most, and the fewest segments of the part of a rank.
_SEGMENT_BYTES = 1 << 20
_FEWEST_SEGMENTS = 2


def ways(kind: str, members: int, sent_bytes: int) -> int:
    """Returns how many latencies a collective of Gloo takes in a row, where no other one is under way.

    Args:
        kind: see `profile.Message.kind`.
        members: number of ranks that take part.
        sent_bytes: bytes that a rank sends; in a ring.
    """
    if kind == "all_to_all":  # all pairs at once
        return 2
    if kind == "all_gather":  # what a rank passes on goes in two halves
        return 2 * (members - 1)
    steps = 2 * (members - 1)
    return steps * max(_FEWEST_SEGMENTS, math.ceil(sent_bytes / steps / _SEGMENT_BYTES))
