"""Messages take turns in the memory of a rank, and connections that end."""

from __future__ import annotations

import random
import socket

import numpy as np
import pytest
import torch

from lightning_gqsgd.reducers.base import Exchange
from lightning_gqsgd.wire.neighbours import MEMORY_BYTES, Neighbour, Neighbours
from lightning_gqsgd.wire.shared_memory import _HAS_FAILED, ALIGNMENT, SharedGroup, _Line, _Ring

NBYTES = 64 * ALIGNMENT


@pytest.mark.parametrize("seed", range(20))
def test_messages_never_overlap_and_there_is_room_once_all_are_read(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    ring = _Ring(NBYTES)
    lying: dict[int, tuple[int, set[int]]] = {}
    for _ in range(2000):
        if draw.random() < 0.5:
            length = draw.randint(1, NBYTES // 4)
            readers = frozenset(draw.sample(range(3), draw.randint(1, 3)))
            place = ring.reserve(length, readers)
            if place is None:
                assert lying
                continue
            assert place % ALIGNMENT == 0
            assert 0 <= place <= place + length <= NBYTES
            for other, (end, _) in lying.items():
                assert place + length <= other or end <= place
            lying[place] = place + length, set(readers)
        elif lying:
            place = draw.choice(list(lying))
            reader = draw.choice(list(lying[place][1]))
            ring.free(place, reader)
            lying[place][1].remove(reader)
            if not lying[place][1]:
                del lying[place]
        assert ring.readers() == set().union(*(readers for _, readers in lying.values()))
    for reader in range(3):
        ring.forget(reader)
    assert ring.reserve(NBYTES, frozenset((1,))) == 0
    assert ring.reserve(1, frozenset((1,))) is None


def test_what_a_rank_sent_before_it_closed_is_read_although_it_had_packets_unread() -> None:
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.setblocking(False)
    line = _Line(Neighbour(1, own, np.empty(0, np.uint8)), most_unfreed=1)
    line.send(b"unread")
    other.send(b"first")
    other.send(b"last")
    other.close()
    assert list(line.receive()) == [b"first", b"last", b""]
    assert line.is_lost
    own.close()


def test_the_error_of_the_first_rank_that_failed_is_passed_on_as_it_is() -> None:
    """Otherwise, the words of each rank that passes it on would take the place of the cause."""
    ends = {rank: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for rank in (1, 2)}
    memory = np.zeros(MEMORY_BYTES, np.uint8)
    others = {rank: Neighbour(rank, own, memory) for rank, (own, _) in ends.items()}
    for own, _ in ends.values():
        own.setblocking(False)
    group = SharedGroup(Neighbours(0, memory, others), range(3), timeout_s=60)
    work = group.start(Exchange("all_gather", torch.empty(3, 1), torch.zeros(1)))
    ends[1][1].send(_HAS_FAILED + b"global rank 7 is on fire")
    with pytest.raises(RuntimeError, match="Connection closed by global rank 1, which has failed: global rank 7 is on"):
        work.wait()
    ends[2][1].settimeout(60)
    packets = [ends[2][1].recv(1 << 16) for _ in range(2)]  # the first one announces this rank's message
    assert packets[1] == _HAS_FAILED + b"global rank 7 is on fire"
    group.close()
    for _, other in ends.values():
        other.close()
