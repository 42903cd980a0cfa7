"""The reducer `gather`: an all-gather of all ranks' codes, which each rank averages (QSGD, arXiv 1610.02132).

A rank sends n-1 times the bits per coordinate. This is as much as with `two_shot` at n = 2, and more for larger n. Each
coordinate is rounded once, so the error is ω/n. Scales are local, or global after a MAX or another norm over ranks, as
in TernGrad. Elias codes have no fixed length, so their lengths are gathered first.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import BlockRun, place, sizes_by_owner
from lightning_gqsgd.reducers.base import Exchange, Reducer, Setting, StepKeys, Steps, gathered, shared_scale_bytes
from lightning_gqsgd.reducers.link import Link
from lightning_gqsgd.reducers.memory import UP, MemoryStore


class Gather(Reducer):
    """Gathers the messages of all ranks, which every rank decodes and averages."""

    scales: ClassVar[tuple[str, ...]] = ("local", "global")
    memories: ClassVar[tuple[str, ...]] = ("memory",)
    coders: ClassVar[tuple[str, ...]] = ("fixed", "elias")

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        self.ranks = setting.ranks
        self.link = Link(setting, UP)
        self.needs_copy = self.link.needs_copy
        self.compresses_codes = setting.coder == "elias"
        self.layout = place(table, self.link.quantiser, shards=1, **setting.record_sizes)
        # Shared scales are sent in a separate exchange, including those of uncompressed blocks.
        self._scales = shared_scale_bytes(len(table), setting) if setting.global_scales else (0, 0)
        self._count(self.layout.message_bytes)

    @staticmethod
    def check_device(setting: Setting, device: torch.device) -> None:
        if setting.coder == "elias" and device.type != "cpu":
            raise ConfigError(
                f"coder='elias' is for tensors on the CPU, not on {device}: its codes have no fixed length; take "
                "coder='fixed'"
            )

    @staticmethod
    def stages(setting: Setting) -> int:
        return 1 + setting.global_scales + (setting.coder == "elias")

    @classmethod
    def alike(cls, block_runs: Sequence[BlockRun], setting: Setting) -> Hashable:
        q = setting.codec.quantiser(setting.block_size)
        return sizes_by_owner(block_runs, q, shards=1, **setting.record_sizes)

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        layout = self.layout.on(x.device)
        # The message is written into this rank's row of the gathered messages, so that it need not be copied there.
        received = torch.empty(self.ranks, layout.message_bytes, dtype=torch.uint8, device=x.device)
        sent = received[rank]
        outgoing = self.link.outgoing(x, layout.whole, keys.rotation, store)
        if self.link.shares_scales:
            yield from outgoing.share_scales()
        remember = outgoing.encode(sent, keys.up[rank])
        if self.compresses_codes:
            received = yield from self._gather_compressed(sent)
        else:
            yield (Exchange("all_gather", received, sent),)

        bad = self.link.decode(received, layout.whole, x, keys.up, keys.rotation, store)
        remember(x)
        return bad

    def _gather_compressed(self, sent: Tensor) -> Generator[Sequence[Exchange], None, Tensor]:
        """Gather all ranks' messages as Elias codes. Returns the messages, uint8 [ranks, bytes]."""
        from lightning_gqsgd.reducers.elias import streams as elias  # Numba takes a second to import

        blocks = self.layout.blocks
        q = self.link.quantiser
        streams = yield from gathered(elias.compress(sent, blocks, q), self.ranks)
        self._count(max(map(len, streams)))
        return torch.stack([elias.expand(stream, blocks, q, len(sent)) for stream in streams])

    def _count(self, message_bytes: int) -> None:
        own_scales, sent_scales = self._scales
        self.message_bytes = message_bytes + own_scales
        self.sent_bytes = (self.ranks - 1) * message_bytes + sent_scales
