"""Reduce-scatter: every rank sends each shard's owner its codes, and the owner averages them in rank order.

This is the first of the two exchanges of `two_shot`. Wire: (n-1)/n bits per coordinate. Error: ω (n-1)/n², of the other
ranks' roundings, because an owner has its own gradient exactly. Scales are local and travel inside the messages. The
caller says which rank owns which shard, so no configuration names this reducer.
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
    """Reduces as a `reducers.base.Reducer` does, but each rank gets the mean of its own shard only.

    The table has as many alike runs of blocks as there are ranks: the shards, in rank order.
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
