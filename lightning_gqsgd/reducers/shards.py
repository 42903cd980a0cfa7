"""Reduce-scatter and all-gather of shards: the two exchanges of `two_shot`, each by itself.

The caller determines which rank owns which shard, so these reducers are not available in a configuration. A rank sends
(n-1)/n times the bits per coordinate in each of them. Scales are local and part of the messages.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.kernels.layout import place_alike
from lightning_gqsgd.reducers.base import Exchange, Setting, StepKeys, Steps
from lightning_gqsgd.reducers.link import Link
from lightning_gqsgd.reducers.memory import DOWN, UP, Direction, MemoryStore


class _Shards:
    """The shards of a piece, which have the same `reducers.base.HasSteps` as a reducer.

    Args:
        table: the shards in rank order, which are runs of blocks with equal lengths.
        setting: the setting; its reducer is ignored.
        direction: that of the codes.
    """

    def __init__(self, table: np.ndarray, setting: Setting, direction: Direction) -> None:
        self.ranks = setting.ranks
        q = setting.codec.quantiser(setting.block_size)
        self.link = Link(setting, q, direction)
        self.needs_copy = self.link.needs_copy
        self.layout = place_alike(table, q, shards=self.ranks, **setting.record_sizes)
        self.message_bytes = self.layout.message_bytes
        # A rank keeps its own shard.
        self.sent_bytes = self.message_bytes - self.layout.shard_bytes


class ReduceScatter(_Shards):
    """Averages each shard on its owner: every rank sends codes to the owners, which average them in rank order.

    The error is ω (n-1)/n², from the roundings of the other ranks, because an owner has its own gradient exactly.
    """

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        super().__init__(table, setting, UP)

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        """Replace this rank's shard by its mean over ranks; see `reducers.base.Reducer.steps`."""
        layout = self.layout.on(x.device)
        sent = torch.empty(layout.message_bytes, dtype=torch.uint8, device=x.device)
        received = torch.empty_like(sent)
        self.link.outgoing(x, self.link.part_for_owners(layout, rank), keys.rotation, store).encode(sent, keys.up[rank])
        yield (Exchange("all_to_all", received, sent),)

        messages = received.view(self.ranks, -1)
        return self.link.decode(messages, layout.shard(rank), x, keys.up, keys.rotation, store, own=rank)


class AllGather(_Shards):
    """Gathers all shards: every owner sends the codes of its shard to all ranks. The error is ω.

    The owner decodes its own shard from the codes, too, so that all ranks have the same bits.
    """

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        super().__init__(table, setting, DOWN)

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        """Replace all shards by their decoded values. Only this rank's shard of ``x`` is read; see
        `reducers.base.Reducer.steps`."""
        layout = self.layout.on(x.device)
        shard = torch.empty(layout.shard_bytes, dtype=torch.uint8, device=x.device)
        everyone = torch.empty(layout.message_bytes, dtype=torch.uint8, device=x.device)
        self.link.outgoing(x, layout.shard(rank), keys.rotation, store).encode(shard, keys.down)
        yield (Exchange("all_gather", everyone, shard),)

        return self.link.decode(everyone.view(1, -1), layout.whole, x, (keys.down,), keys.rotation, store)
