"""Reduce-scatter: every rank sends each shard's owner its codes, and the owner averages them in rank order.

The first of `two_shot`'s two. Wire: (n-1)/n bits per coordinate. Error: ω/n, of the ranks' roundings. Scales are local
and travel inside the messages. What belongs to whom is given, not chosen, so that no configuration names this reducer.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.layout import place_alike
from lightning_gqsgd.memory import MemoryStore
from lightning_gqsgd.reducers.base import Exchange, Setting, StepKeys, Steps
from lightning_gqsgd.reducers.link import Link, Outgoing, working_copy


class Scatter:
    """See the module; `reducers.base.Reducer`, but that each rank gets the mean of its own shard only.

    The table has as many alike runs of blocks as there are ranks: the shards, in rank order.
    """

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        config, self.ranks = setting.config, setting.ranks
        q = setting.codec.quantiser(config.block_size)
        self.link = Link(config, q, "up")
        self.layout = place_alike(
            table, q, shards=self.ranks, scale_bytes=setting.scale_bytes, raw_bytes=setting.raw_bytes
        )
        self.message_bytes = self.layout.message_bytes
        self.sent_bytes = self.message_bytes - self.layout.shard_bytes

    @staticmethod
    def stages(config: GQSGDConfig, ranks: int) -> int:
        """See `reducers.base.Reducer.stages`."""
        return 1

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore | None = None) -> Steps:
        """Replace this rank's shard by its mean over ranks; see `reducers.base.Reducer.steps`."""
        layout = self.layout.on(x.device)
        work = working_copy(x, self.link)
        sent = torch.empty(layout.message_bytes, dtype=torch.uint8, device=x.device)
        received = torch.empty_like(sent)
        outgoing = Outgoing(self.link, work, layout.whole, keys.rotation, store)
        outgoing.encode(sent, keys.up[rank])
        yield (Exchange("all_to_all", received, sent),)

        part = layout.parts[rank]
        messages, base = received.view(self.ranks, -1), rank * layout.shard_bytes
        bad = self.link.decode(messages, part, work, keys.up, keys.rotation, store, base)
        if work is not x:
            x.copy_(work)
        return bad
