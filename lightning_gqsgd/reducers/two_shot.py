"""Two shots: every rank sends each shard's owner its codes, the owner averages and encodes the mean, all gather it.

Wire: 2 (n-1)/n bits per coordinate at any n. Error: ω/n of the ranks' roundings plus ω of the mean's.
Scales are local and travel inside the messages; shards are summed in rank order, so all ranks hold the same bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.kernels import kernels_for
from lightning_gqsgd.kernels.wire import scale_format
from lightning_gqsgd.layout import place
from lightning_gqsgd.reducers.base import Exchange, Setting, StepKeys, Steps, ring_bytes


class TwoShot:
    """See the module; `reducers.base.Reducer`."""

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        config, self.ranks, form = setting.config, setting.ranks, scale_format(setting.dtype)
        self.quantiser = setting.codec.quantiser(config.block_size)
        self.layout = place(
            table, shards=self.ranks, bits=config.bits, scale_bytes=form.nbytes, raw_bytes=form.raw_bytes
        )
        self.message_bytes = self.layout.message_bytes
        self.sent_bytes = ring_bytes(self.message_bytes, self.ranks)

    def steps(self, x: Tensor, rank: int, keys: StepKeys) -> Steps:
        """See `reducers.base.Reducer.steps`."""
        kernels, layout, q = kernels_for(x.device), self.layout, self.quantiser
        sent = torch.empty(layout.message_bytes, dtype=torch.uint8, device=x.device)
        received = torch.empty_like(sent)
        kernels.encode(x, layout.blocks, sent, keys.up[rank], q)
        yield (Exchange("all_to_all", received, sent),)

        shard = torch.empty(layout.shard_bytes, dtype=torch.uint8, device=x.device)
        messages, base = received.view(self.ranks, -1), rank * layout.shard_bytes
        kernels.reduce(messages, layout.shard(rank), base, shard, keys.up, keys.down, q, x.dtype)
        yield (Exchange("all_gather", sent, shard),)

        return kernels.decode(sent.view(1, -1), layout.blocks, x, (keys.down,), q)
