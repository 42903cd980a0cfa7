"""The reducer `tree` of Global-QSGD: at every hop, exponential codes are added in pairs, without bias.

It runs a reduce-scatter by recursive halving, and then an all-gather by recursive doubling. Ranks beyond the largest
power of two first send their codes to a partner, and finally receive the result from it. Every sum is a balanced tree
of depth log2 n, rounded up.

A rank sends 2 (n-1)/n times the bits per coordinate, and ranks beyond a power of two exchange two whole messages with
their partners. Each level of the tree rounds once more, so the error does not decrease with n. `two_shot` sends as much
and adds exactly.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs import Codec
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import Layout, place_by_owner
from lightning_gqsgd.reducers.base import Exchange, Setting, StepKeys, ring_bytes
from lightning_gqsgd.reducers.summed import Summed


class Hop(NamedTuple):
    """One hop of a rank. It sends the shards in ``gives`` to ``partner``, and receives the shards in ``takes`` from it.

    Both are ranges of numbers of shards, whose ends are excluded. If ``adds`` is true, the rank adds the received codes
    to its own; otherwise, it replaces its own codes.
    """

    partner: int | None
    gives: tuple[int, int]
    takes: tuple[int, int]
    adds: bool


_NOTHING = (0, 0)
_IDLE = Hop(None, _NOTHING, _NOTHING, adds=False)


def _owners(ranks: int) -> int:
    """Returns the number of ranks that own a shard: the largest power of two that is not above the number of ranks."""
    return 1 << (ranks.bit_length() - 1)


def hops_of(rank: int, ranks: int) -> list[Hop]:
    """Returns all hops of a rank, in the order fold, halve, double, unfold. Every rank has the same number of hops."""
    inner = _owners(ranks)
    depth = inner.bit_length() - 1
    beyond = ranks - inner
    fold = _IDLE
    unfold = _IDLE
    if rank >= inner:
        fold = Hop(rank - inner, (0, inner), _NOTHING, adds=True)
        unfold = Hop(rank - inner, _NOTHING, (0, inner), adds=False)
    elif rank < beyond:
        fold = Hop(rank + inner, _NOTHING, (0, inner), adds=True)
        unfold = Hop(rank + inner, (0, inner), _NOTHING, adds=False)
    halving = []
    doubling = []
    low = 0
    high = inner
    # The highest bit is first, so that rank r has the sum of shard r after the last halving.
    for bit in (inner >> level for level in range(1, depth + 1)):
        half = (low + high) // 2
        keeps, gives = ((low, half), (half, high)) if rank & bit == 0 else ((half, high), (low, half))
        halving.append(Hop(rank ^ bit, gives, keeps, adds=True))
        doubling.append(Hop(rank ^ bit, keeps, gives, adds=False))
        low, high = keeps
    # Ranks beyond the power of two have idle hops in the other stages, because all ranks have to start the same
    # collectives.
    if rank >= inner:
        halving = [_IDLE] * depth
        doubling = [_IDLE] * depth
    plan = [*halving, *reversed(doubling)]
    return [fold, *plan, unfold] if beyond else plan


class Tree(Summed):
    """Reduces by recursive halving and doubling, adding the codes of two ranks at every hop."""

    @staticmethod
    def check(codec: Codec) -> None:
        if not codec.adds_in_pairs:
            raise ConfigError("reducer='tree' adds powers of two: it needs codec='exponential' with mantissa=0")

    @staticmethod
    def stages(setting: Setting) -> int:
        return 1 + len(hops_of(0, setting.ranks))

    @staticmethod
    def mean_error(codec: Codec, ranks: int) -> float:
        # Each level of the tree rounds once, and these roundings do not average out.
        return codec.error_variance(ranks) * ranks.bit_length()

    def _placed(self, table: np.ndarray) -> Layout:
        # The owner of a block's sum determines the order of the additions, so the owner must not depend on buckets.
        q = self.link.quantiser
        return place_by_owner(table, q, shards=_owners(self.ranks), scale_bytes=0, raw_bytes=0, striped=True)

    def _sent_bytes(self) -> int:
        inner = _owners(self.ranks)
        codes_bytes = self.layout.message_bytes
        # A rank beyond the power of two sends its whole message to its partner, and receives a whole message from it.
        # Each rank sends at most one such message.
        folded = codes_bytes if self.ranks > inner else 0
        return ring_bytes(codes_bytes, inner) + folded

    def _added(
        self, codes: Tensor, layout: Layout, rank: int, keys: StepKeys
    ) -> Generator[Sequence[Exchange], None, None]:
        """Run all hops: yield their exchanges, and add or copy the received codes."""
        size = layout.shard_bytes
        for number, hop in enumerate(hops_of(rank, self.ranks) if size else []):
            sent = codes[hop.gives[0] * size : hop.gives[1] * size]
            mine = codes[hop.takes[0] * size : hop.takes[1] * size]
            received = torch.empty_like(mine)
            # A hop is a send and a receive between two ranks. It runs as an all-to-all of the whole group, because
            # exchanges are collectives that all ranks start in the same order.
            yield (Exchange("all_to_all", received, sent, (self._only(hop, received), self._only(hop, sent))),)

            if hop.adds:
                part = layout.shards_from(*hop.takes)
                part.kernels.combine(mine, received, self.link.coding(part, keys.rotation), keys.node(number, rank))
            else:
                mine.copy_(received)

    def _only(self, hop: Hop, message: Tensor) -> list[int]:
        """Returns the number of bytes of a message for each rank. All bytes are for the hop's partner."""
        return [len(message) if rank == hop.partner else 0 for rank in range(self.ranks)]
