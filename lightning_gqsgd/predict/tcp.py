"""The additional time of collectives over TCP between nodes, beyond a ring's bytes at the rate of the link.

For NCCL, as factors of the bytes (`Terms`):

* **Sockets.** NCCL spreads the bytes that a rank sends over several sockets: 32 on AWS (two channels, each with the 2
  threads of 8 sockets that its source has for this vendor), and two if it does not know the vendor. Sockets that share
  the queue of a slow link lose packets there, and the ring waits for the last socket. The factor by which a mean takes
  longer was measured with sockets alone, as a function of the queue's bytes (``benchmarks/slow_rings.py``). The length
  of a link's queue is unknown before a training. It is assumed to hold between 50 and 400 ms of traffic.
* **Headers** of Ethernet, IP and TCP.
* **Trees.** An all-reduce of S bytes by a ring of N ranks sends 2 (N-1)/N S through each link. A pair of binary trees
  (Sanders, Speck, Träff, Parallel Computing 35, 2009), which NCCL also implements, sends 2 S through the links of ranks
  that are inner nodes of both trees. On four nodes, the buckets of plain DDP took as long as trees in measurements, and
  one all-reduce after the step as long as a ring. According to NCCL's own tables, both should use rings, so the reason
  is unknown.

For Gloo, as a number of latencies (`ways`):

* **Readiness.** A rank sends a message only after the other end has said that it is ready to receive, so the first byte
  arrives after two latencies. Rings send segments, two of which are under way (``allreduce.cc`` and ``allgather.cc`` of
  Gloo). If a link's latency is at most the duration of a segment, a rank's notice that it is ready waits behind its own
  segment in the same queue. So each segment costs one latency. Means of 12 MiB between two hosts took 1,025 ms at 140
  Mbit/s and 25 ms, and 1,505 ms at 80 Mbit/s and 20 ms: 12 segments of 1 MiB with a latency each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

#: Bytes per second up to which a link is assumed to use TCP. Faster links usually use RDMA, which is not modelled here.
FASTEST_TCP = 25e9 / 8
#: Factors by which headers lengthen messages, with 66 bytes of Ethernet, IPv4 and TCP with time stamps: in packets of
#: 9,001 bytes, as between machines of clouds, and of 1,500 bytes (both without Ethernet's 14 bytes).
HEADERS_OF_LARGE_PACKETS = 9015 / 8949
HEADERS_OF_SMALL_PACKETS = 1514 / 1448
#: Seconds of traffic that a link's queue holds at least and at most. Predictions use their geometric mean.
SHORTEST_QUEUE_S = 0.05
LONGEST_QUEUE_S = 0.4
#: By the bytes of a link's queue: time of a mean with 32 sockets over the time with two sockets
#: (benchmarks/results/slow_rings.md).
LOSSES = ((0.3125e6, 1.417), (0.625e6, 1.338), (1.25e6, 1.231), (2.5e6, 1.097), (3.125e6, 1.027), (5e6, 1.004))


@dataclass(frozen=True)
class Factors:
    """Factors on the time that the bytes of a ring take at the link's rate.

    Attributes:
        every: factor for each byte between nodes.
        trees: additional factor for each byte of an all-reduce that runs during a backward pass.
    """

    every: float = 1.0
    trees: float = 1.0


@dataclass(frozen=True)
class Terms:
    """The predicted factors, and their smallest and largest possible values."""

    usual: Factors
    least: Factors
    most: Factors


def terms_of(nodes: int, ranks: int, bytes_per_s: float) -> Terms | None:
    """Returns the terms of NCCL between nodes; None if there is one node, or if the link is too fast for TCP.

    Args:
        nodes: number of nodes.
        ranks: number of ranks of all nodes.
        bytes_per_s: rate of a node's link.
    """
    if nodes < 2 or bytes_per_s > FASTEST_TCP:
        return None
    usual = losses(bytes_per_s * math.sqrt(SHORTEST_QUEUE_S * LONGEST_QUEUE_S)) * HEADERS_OF_LARGE_PACKETS
    most = losses(bytes_per_s * SHORTEST_QUEUE_S) * HEADERS_OF_SMALL_PACKETS
    tree = ranks / (ranks - 1) if nodes > 2 else 1.0  # with two nodes, a tree has no inner node
    return Terms(Factors(usual, tree), Factors(1.0, 1.0), Factors(most, tree))


def losses(queue_bytes: float) -> float:
    """Returns the factor by which bytes take longer over many sockets that share a queue of ``queue_bytes`` bytes.

    It is interpolated linearly in the logarithm of the bytes between the points of `LOSSES`. Below them it is constant,
    and above them 1.
    """
    if queue_bytes <= LOSSES[0][0]:
        return LOSSES[0][1]
    for (fewer, longer), (more, shorter) in pairwise(LOSSES):
        if queue_bytes <= more:
            share = math.log(queue_bytes / fewer) / math.log(more / fewer)
            return longer + share * (shorter - longer)
    return 1.0


#: Largest number of bytes of a segment of Gloo's all-reduce, and smallest number of segments of a rank's part.
_SEGMENT_BYTES = 1 << 20
_FEWEST_SEGMENTS = 2


def ways(kind: str, members: int, sent_bytes: int) -> int:
    """Returns the number of consecutive latencies of a collective of Gloo, if no other collective is under way.

    Args:
        kind: see `profile.Message.kind`.
        members: number of ranks that take part.
        sent_bytes: bytes that a rank sends in a ring.
    """
    if kind == "all_to_all":  # all pairs at once
        return 2
    if kind == "all_gather":  # a rank sends each message in two halves
        return 2 * (members - 1)
    steps = 2 * (members - 1)
    return steps * max(_FEWEST_SEGMENTS, math.ceil(sent_bytes / steps / _SEGMENT_BYTES))
