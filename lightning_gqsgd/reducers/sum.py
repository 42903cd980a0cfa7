"""Global-QSGD (arXiv 2305.18627): block scales shared by all ranks, so that an integer allreduce adds the codes.

The largest magnitudes go through a MAX, the codes through a SUM of lanes wide enough for all ranks: K levels per rank
with n (K-1) < 2^bits. Nothing is scaled after rounding, so no sum can overflow. Parameters that travel uncompressed
take the two-shot way beside it, which adds in rank order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.kernels import kernels_for
from lightning_gqsgd.layout import RAW, place
from lightning_gqsgd.memory import MemoryStore
from lightning_gqsgd.reducers.base import Exchange, Setting, StepKeys, Steps, ring_bytes, side_by_side, uncompressed
from lightning_gqsgd.reducers.link import Link, Outgoing, working_copy
from lightning_gqsgd.reducers.two_shot import TwoShot


class Sum:
    """See the module; `reducers.base.Reducer`."""

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        config, ranks = setting.config, setting.ranks
        q = setting.codec.quantiser(config.block_size, summed=ranks)
        self.link = Link(config, q, "up", scales_travel=False)
        raw = table[:, RAW] == 1
        self.layout = place(table[~raw], q, shards=1, scale_bytes=0, raw_bytes=0)
        self.raw = TwoShot(table[raw], uncompressed(setting))
        self.lane = torch.uint8 if 8 % config.bits == 0 else torch.int64
        maxima_bytes = len(self.layout.table) * (8 if setting.dtype == torch.float64 else 4)
        self.message_bytes = self.layout.message_bytes + maxima_bytes + self.raw.message_bytes
        self.sent_bytes = ring_bytes(self.layout.message_bytes + maxima_bytes, ranks) + self.raw.sent_bytes

    @staticmethod
    def stages(config: GQSGDConfig, ranks: int) -> int:
        """See `reducers.base.Reducer.stages`."""
        return 2

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore | None = None) -> Steps:
        """See `reducers.base.Reducer.steps`."""
        work = working_copy(x, self.link)
        bad = yield from side_by_side(self.raw.steps(work, rank, keys), self._coded(work, rank, keys, store))
        if work is not x:
            x.copy_(work)
        return bad

    def _coded(self, work: Tensor, rank: int, keys: StepKeys, store: MemoryStore | None) -> Steps:
        kernels, layout, q = kernels_for(work.device), self.layout.on(work.device), self.link.quantiser
        outgoing = Outgoing(self.link, work, layout.whole, keys.rotation, store)
        maxima = outgoing.find_scales()
        yield (Exchange.in_place("max", maxima),)

        codes = torch.zeros(layout.message_bytes, dtype=torch.uint8, device=work.device)
        outgoing.encode(codes, keys.up[rank])
        yield (Exchange.in_place("sum", codes.view(self.lane)),)

        bad = kernels.decode_sum(codes, maxima, layout.blocks, work, keys.up, q)
        self.link.restore(work, layout.whole, keys.rotation, store)
        outgoing.commit(work)
        return bad
