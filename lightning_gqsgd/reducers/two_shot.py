"""Two shots: every rank sends each shard's owner its codes, the owner averages and encodes the mean, all gather it.

Wire: 2 (n-1)/n bits per coordinate at any n. Error: ω/n of the ranks' roundings plus ω of the mean's.
Scales are local and travel inside the messages; shards are summed in rank order, so all ranks hold the same bits.
With memory, a block's owner does not depend on buckets, because the owner remembers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.kernels import kernels_for
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES
from lightning_gqsgd.layout import place, place_by_owner
from lightning_gqsgd.memory import MemoryStore
from lightning_gqsgd.reducers.base import Exchange, Setting, StepKeys, Steps, ring_bytes
from lightning_gqsgd.reducers.link import Link, Outgoing, working_copy


class TwoShot:
    """See the module; `reducers.base.Reducer`."""

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        config, self.ranks = setting.config, setting.ranks
        q = setting.codec.quantiser(config.block_size)
        self.up, self.down = Link(config, q, "up"), Link(config, q, "down")
        divide = place_by_owner if config.remembers else place
        self.layout = divide(table, q, shards=self.ranks, scale_bytes=setting.scale_bytes, raw_bytes=setting.raw_bytes)
        self.message_bytes = self.layout.message_bytes
        self.sent_bytes = ring_bytes(self.message_bytes, self.ranks)

    @staticmethod
    def stages(config: GQSGDConfig, ranks: int) -> int:
        """See `reducers.base.Reducer.stages`."""
        return 2

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore | None = None) -> Steps:
        """See `reducers.base.Reducer.steps`."""
        kernels, layout, q = kernels_for(x.device), self.layout.on(x.device), self.up.quantiser
        work = working_copy(x, self.up, self.down)
        sent = torch.empty(layout.message_bytes, dtype=torch.uint8, device=x.device)
        received = torch.empty_like(sent)
        outgoing = Outgoing(self.up, work, layout.whole, keys.rotation, store)
        outgoing.encode(sent, keys.up[rank])
        yield (Exchange("all_to_all", received, sent),)

        shard = torch.empty(layout.shard_bytes, dtype=torch.uint8, device=x.device)
        messages, base, owned = received.view(self.ranks, -1), rank * layout.shard_bytes, layout.shard(rank)
        returning = None
        if self.up.plain and self.down.plain:
            kernels.reduce(messages, owned, base, shard, keys.up, keys.down, q, work.dtype)
        else:
            mean = torch.zeros(work.shape, dtype=COMPUTE_DTYPES[x.dtype], device=x.device)
            self.up.decode(messages, layout.parts[rank], mean, keys.up, keys.rotation, store, base)
            returning = Outgoing(self.down, mean, layout.parts[rank], keys.rotation, store)
            returning.encode(shard, keys.down, base)
        yield (Exchange("all_gather", sent, shard),)

        bad = self.down.decode(sent.view(1, -1), layout.whole, work, (keys.down,), keys.rotation, store)
        for one in (outgoing, returning):
            if one is not None:
                one.commit(work)
        if work is not x:
            x.copy_(work)
        return bad
