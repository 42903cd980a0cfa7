"""The common base of reducers that add the codes of all ranks, and decode the sum once.

First, ranks replace the scales of blocks by their norm over ranks, usually the maximum, because codes can be added only
under equal scales. Then they send the codes, in messages without scales. Uncompressed parameters are reduced by
`two_shot` at the same time, which adds in rank order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.kernels.layout import RAW, Layout
from lightning_gqsgd.reducers.base import (
    Exchange,
    Reducer,
    Setting,
    StepKeys,
    Steps,
    shared_scale_bytes,
    side_by_side,
)
from lightning_gqsgd.reducers.link import Link
from lightning_gqsgd.reducers.memory import UP, MemoryStore
from lightning_gqsgd.reducers.two_shot import TwoShot, uncompressed


class Summed(Reducer):
    """Reduces with sums of codes under shared scales."""

    scales: ClassVar[tuple[str, ...]] = ("global",)
    adds_codes: ClassVar[bool] = True

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        self.ranks = setting.ranks
        self.link = Link(setting, UP, adds=True)
        self.needs_copy = self.link.needs_copy
        # Uncompressed coordinates cannot be added as integers, so they are reduced separately.
        raw = table[:, RAW] == 1
        self.layout = self._placed(table[~raw])
        self.raw = TwoShot(table[raw], uncompressed(setting))
        own_scales, sent_scales = shared_scale_bytes(len(self.layout.table), setting)
        self.message_bytes = self.layout.message_bytes + own_scales + self.raw.message_bytes
        self.sent_bytes = self._sent_bytes() + sent_scales + self.raw.sent_bytes

    @abstractmethod
    def _placed(self, table: np.ndarray) -> Layout:
        """Returns the positions of the codes in messages without scales."""

    @abstractmethod
    def _sent_bytes(self) -> int:
        """Returns the number of bytes of codes that each rank sends."""

    @abstractmethod
    def _added(
        self, codes: Tensor, layout: Layout, rank: int, keys: StepKeys
    ) -> Generator[Sequence[Exchange], None, None]:
        """Replace this rank's codes, uint8 [bytes], by the sum of all ranks' codes."""

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        return (yield from side_by_side(self.raw.steps(x, rank, keys, store), self._coded(x, rank, keys, store)))

    def _coded(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        layout = self.layout.on(x.device)
        part = layout.whole
        outgoing = self.link.outgoing(x, part, keys.rotation, store)
        # Codes can be added only under equal scales, so scales are exchanged before anything is encoded.
        scales = yield from outgoing.share_scales()

        # The memory is zeroed, because the padding between records takes part in the sum.
        codes = torch.zeros(layout.message_bytes, dtype=torch.uint8, device=x.device)
        remember = outgoing.encode(codes, keys.up[rank])
        yield from self._added(codes, layout, rank, keys)

        bad = part.kernels.decode_sum(codes, self.link.coding(part, keys.rotation), x, keys.up, scales)
        self.link.restore(x, part, keys.rotation, store)
        remember(x)
        return bad
