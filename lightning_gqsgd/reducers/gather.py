"""All-gather of every rank's codes (QSGD, arXiv 1610.02132), averaged by everyone in rank order.

Wire: (n-1) bits per coordinate, as much as two shots at n = 2 and more beyond; one rounding only, error ω/n. Scales are
local or, after a MAX over ranks, global (TernGrad's shared ones). Elias codes have no fixed length: their lengths are
gathered first.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.kernels import elias
from lightning_gqsgd.layout import place
from lightning_gqsgd.memory import MemoryStore
from lightning_gqsgd.reducers.base import Exchange, Setting, StepKeys, Steps
from lightning_gqsgd.reducers.link import Link, Outgoing, working_copy


class Gather:
    """See the module; `reducers.base.Reducer`."""

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        config, self.ranks = setting.config, setting.ranks
        q = setting.codec.quantiser(config.block_size)
        self.link = Link(config, q, "up")
        self.shares_scales, self.compresses = config.scale == "global", config.coder == "elias"
        self.layout = place(table, q, shards=1, scale_bytes=setting.scale_bytes, raw_bytes=setting.raw_bytes)
        self._book(self.layout.message_bytes)

    @staticmethod
    def stages(config: GQSGDConfig, ranks: int) -> int:
        """See `reducers.base.Reducer.stages`."""
        return 1 + (config.scale == "global") + (config.coder == "elias")

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore | None = None) -> Steps:
        """See `reducers.base.Reducer.steps`."""
        layout = self.layout.on(x.device)
        work = working_copy(x, self.link)
        sent = torch.empty(layout.message_bytes, dtype=torch.uint8, device=x.device)
        outgoing = Outgoing(self.link, work, layout.whole, keys.rotation, store)
        if self.shares_scales:
            yield (Exchange.in_place("max", outgoing.find_scales()),)
        outgoing.encode(sent, keys.up[rank])
        received = yield from self._gather_compressed(sent) if self.compresses else self._gather(sent)

        bad = self.link.decode(received, layout.whole, work, keys.up, keys.rotation, store)
        outgoing.commit(work)
        if work is not x:
            x.copy_(work)
        return bad

    def _gather(self, sent: Tensor) -> Generator[Sequence[Exchange], None, Tensor]:
        received = torch.empty(self.ranks, len(sent), dtype=torch.uint8, device=sent.device)
        yield (Exchange("all_gather", received, sent),)
        return received

    def _gather_compressed(self, sent: Tensor) -> Generator[Sequence[Exchange], None, Tensor]:
        """The same through Elias codes, which are as long as the longest rank's on the wire."""
        blocks, q = self.layout.blocks, self.link.quantiser
        stream = elias.compress(sent, blocks, q)
        lengths = torch.empty(self.ranks, 1, dtype=torch.int64)
        yield (Exchange("all_gather", lengths, torch.tensor([len(stream)])),)

        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: len(stream)] = stream
        streams = yield from self._gather(padded)
        self._book(len(padded))
        rows = zip(streams, lengths[:, 0].tolist(), strict=True)
        return torch.stack([elias.expand(row[:length], blocks, q, len(sent)) for row, length in rows])

    def _book(self, message_bytes: int) -> None:
        self.message_bytes = message_bytes
        self.sent_bytes = (self.ranks - 1) * message_bytes
