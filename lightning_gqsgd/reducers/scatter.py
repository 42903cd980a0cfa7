"""Reduce-scatter: every rank sends codes to the owner of each shard, and the owner averages them in rank order.

This is the first of the two exchanges of `two_shot`. A rank sends (n-1)/n times the bits per coordinate. The error is
ω (n-1)/n², from the roundings of the other ranks, because an owner has its own gradient exactly. Scales are local and
part of the messages. The caller determines which rank owns which shard, so this reducer is not available in a
configuration.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.kernels.layout import place_alike
from lightning_gqsgd.reducers.base import Exchange, Setting, StepKeys, Steps
from lightning_gqsgd.reducers.link import Link
from lightning_gqsgd.reducers.memory import UP, MemoryStore


class Scatter:
    """Reduces like a `reducers.base.Reducer`, but each rank gets only the mean of its own shard.

    The table consists of the shards in rank order, which are runs of blocks with equal lengths.
    """

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        self.ranks = setting.ranks
        q = setting.codec.quantiser(setting.block_size)
        self.link = Link(setting, q, UP)
        self.needs_copy = self.link.needs_copy
        self.layout = place_alike(table, q, shards=self.ranks, **setting.record_sizes)
        self.message_bytes = self.layout.message_bytes
        # A rank keeps its own shard.
        self.sent_bytes = self.message_bytes - self.layout.shard_bytes

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        """Replace this rank's shard by its mean over ranks; see `reducers.base.Reducer.steps`."""
        layout = self.layout.on(x.device)
        sent = torch.empty(layout.message_bytes, dtype=torch.uint8, device=x.device)
        received = torch.empty_like(sent)
        self.link.outgoing(x, self.link.part_for_owners(layout, rank), keys.rotation, store).encode(sent, keys.up[rank])
        yield (Exchange("all_to_all", received, sent),)

        messages = received.view(self.ranks, -1)
        return self.link.decode(messages, layout.shard(rank), x, keys.up, keys.rotation, store, own=rank)
