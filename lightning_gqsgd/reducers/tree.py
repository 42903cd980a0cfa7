"""Global-QSGD's exponential allreduce: codes that are powers of two are added in pairs, without bias, at every hop.

A reduce-scatter by recursive halving and an all-gather by recursive doubling. Ranks beyond the largest power of two
hand their codes to a partner first, and get the result from it. Every sum is a balanced tree of depth log2 n, rounded
up.

Wire: 2 (n-1)/n bits per coordinate, and two whole messages for ranks beyond a power of two. Each level of the tree
rounds once more, so the error does not fall with n; `two_shot` sends as much and adds exactly.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs import Codec
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels import kernels_for
from lightning_gqsgd.kernels.layout import RAW, Layout, place_by_owner
from lightning_gqsgd.reducers.base import (
    Exchange,
    Reducer,
    Setting,
    StepKeys,
    Steps,
    ring_bytes,
    side_by_side,
    uncompressed,
)
from lightning_gqsgd.reducers.link import Link
from lightning_gqsgd.reducers.memory import UP, MemoryStore
from lightning_gqsgd.reducers.two_shot import TwoShot

if TYPE_CHECKING:
    from lightning_gqsgd.spec.fields import Fields


class Hop(NamedTuple):
    """One hop of a rank, which sends the shards in ``gives`` to ``partner`` and receives those in ``takes`` from it.

    Both are ranges of numbers of shards, without their ends.
    """

    partner: int | None
    gives: tuple[int, int]
    takes: tuple[int, int]
    adds: bool


_NOTHING = (0, 0)
_IDLE = Hop(None, _NOTHING, _NOTHING, adds=False)


def hops_of(rank: int, ranks: int) -> list[Hop]:
    """Returns all hops of a rank, in the order fold, halve, double, unfold. Every rank has the same number of hops."""
    depth = ranks.bit_length() - 1
    inner = 1 << depth
    beyond = ranks - (1 << depth)
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
    # The highest bit comes first, so that rank r has the sum of shard r after the last halving.
    for bit in (inner >> level for level in range(1, depth + 1)):
        half = (low + high) // 2
        keeps, gives = ((low, half), (half, high)) if rank & bit == 0 else ((half, high), (low, half))
        halving.append(Hop(rank ^ bit, gives, keeps, adds=True))
        doubling.append(Hop(rank ^ bit, keeps, gives, adds=False))
        low, high = keeps
    # Folded ranks still take part in all stages, with idle hops: every rank has to start the same collectives.
    if rank >= inner:
        halving = [_IDLE] * depth
        doubling = [_IDLE] * depth
    plan = [*halving, *reversed(doubling)]
    return [fold, *plan, unfold] if beyond else plan


class Tree(Reducer):
    """Reduces by recursive halving and doubling, adding the codes of two ranks at every hop.

    See `reducers.base.Reducer` for the arguments.
    """

    scales: ClassVar[tuple[str, ...]] = ("global",)
    adds_codes: ClassVar[bool] = True

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        self.ranks = setting.ranks
        q = setting.codec.quantiser(setting.block_size, summed=self.ranks)
        self.link = Link(setting, q, UP, scales_travel=False)
        self.needs_copy = self.link.needs_copy
        raw = table[:, RAW] == 1
        inner = 1 << (self.ranks.bit_length() - 1)
        # Where a block's sum ends says in which order it is added, so that must not depend on buckets.
        self.layout = place_by_owner(table[~raw], q, shards=inner, scale_bytes=0, raw_bytes=0, striped=True)
        self.raw = TwoShot(table[raw], uncompressed(setting))
        # Maxima travel in the compute dtype: 8 bytes for fp64 gradients, 4 for all others.
        maxima_bytes = len(self.layout.table) * (8 if setting.dtype == torch.float64 else 4)
        codes_bytes = self.layout.message_bytes
        self.message_bytes = codes_bytes + maxima_bytes + self.raw.message_bytes
        self.sent_bytes = ring_bytes(maxima_bytes, self.ranks) + self.raw.sent_bytes + ring_bytes(codes_bytes, inner)
        # A rank beyond the power of two hands its whole message to its partner, and gets as much back; each rank sends
        # at most one such message.
        self.sent_bytes += codes_bytes if self.ranks > inner else 0

    @staticmethod
    def check(codec: Codec) -> None:
        """Raise ConfigError for a codec whose codes the reducer cannot work with; see `reducers.base.Reducer.check`.
        Codes have to be powers of two."""
        if not codec.adds_in_pairs:
            raise ConfigError("reducer='tree' adds powers of two: it needs codec='exponential' with mantissa=0")

    @staticmethod
    def stages(config: Fields, ranks: int) -> int:
        """Returns the number of stages; see `reducers.base.Reducer.stages`."""
        return 1 + len(hops_of(0, ranks))

    @staticmethod
    def mean_error(codec: Codec, ranks: int) -> float:
        """Returns the predicted mean square error; see `reducers.base.Reducer.mean_error`. Each level
        of the tree rounds once, and these roundings do not average out."""
        return codec.error_variance(ranks) * ranks.bit_length()

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        """Replace ``x`` by the mean over ranks; see `reducers.base.Reducer.steps`."""
        return (yield from side_by_side(self.raw.steps(x, rank, keys, store), self._coded(x, rank, keys, store)))

    def _coded(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        kernels = kernels_for(x.device)
        layout = self.layout.on(x.device)
        q = self.link.quantiser
        outgoing = self.link.outgoing(x, layout.whole, keys.rotation, store)
        maxima = outgoing.find_scales()
        yield (Exchange.in_place("max", maxima),)

        codes = torch.zeros(layout.message_bytes, dtype=torch.uint8, device=x.device)
        outgoing.encode(codes, keys.up[rank])
        yield from self._run(codes, layout, rank, keys)

        bad = kernels.decode_sum(codes, maxima, layout.blocks, x, q, keys.up)
        self.link.restore(x, layout.whole, keys.rotation, store)
        return bad

    def _run(
        self, codes: Tensor, layout: Layout, rank: int, keys: StepKeys
    ) -> Generator[Sequence[Exchange], None, None]:
        """Run all hops: yield their exchanges, and add or copy the codes that they bring."""
        kernels = kernels_for(codes.device)
        size = layout.shard_bytes
        for number, hop in enumerate(hops_of(rank, self.ranks) if size else []):
            sent = codes[hop.gives[0] * size : hop.gives[1] * size]
            mine = codes[hop.takes[0] * size : hop.takes[1] * size]
            received = torch.empty_like(mine)
            # A hop is a send and a receive between two ranks. It is issued as an all-to-all of the whole group, because
            # exchanges are collectives that all ranks start in one order.
            yield (Exchange("all_to_all", received, sent, (self._only(hop, received), self._only(hop, sent))),)

            if hop.adds:
                blocks = layout.shards_from(*hop.takes).blocks
                kernels.combine(mine, received, blocks, self.link.quantiser, keys.node(number, rank))
            else:
                mine.copy_(received)

    def _only(self, hop: Hop, message: Tensor) -> list[int]:
        """Returns how many bytes of a message belong to each rank: all to the hop's partner."""
        return [len(message) if rank == hop.partner else 0 for rank in range(self.ranks)]
