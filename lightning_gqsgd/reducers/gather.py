"""All-gather of every rank's codes with local scales (QSGD, arXiv 1610.02132), averaged by everyone in rank order.

Wire: (n-1) bits per coordinate, as much as two shots at n = 2 and more beyond; one rounding only, error ω/n.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.kernels import kernels_for
from lightning_gqsgd.kernels.wire import scale_format
from lightning_gqsgd.layout import place
from lightning_gqsgd.reducers.base import Exchange, Setting, StepKeys, Steps


class Gather:
    """See the module; `reducers.base.Reducer`."""

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        config, self.ranks, form = setting.config, setting.ranks, scale_format(setting.dtype)
        self.quantiser = setting.codec.quantiser(config.block_size)
        self.layout = place(table, shards=1, bits=config.bits, scale_bytes=form.nbytes, raw_bytes=form.raw_bytes)
        self.message_bytes = self.layout.message_bytes
        self.sent_bytes = (self.ranks - 1) * self.message_bytes

    def steps(self, x: Tensor, rank: int, keys: StepKeys) -> Steps:
        """See `reducers.base.Reducer.steps`."""
        kernels, layout, q = kernels_for(x.device), self.layout, self.quantiser
        sent = torch.empty(layout.message_bytes, dtype=torch.uint8, device=x.device)
        received = torch.empty(self.ranks, layout.message_bytes, dtype=torch.uint8, device=x.device)
        kernels.encode(x, layout.blocks, sent, keys.up[rank], q)
        yield (Exchange("all_gather", received, sent),)

        return kernels.decode(received, layout.blocks, x, keys.up, q)
