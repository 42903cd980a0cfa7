"""The reducer `two_shot`: ranks send codes to each shard's owner, which averages and encodes; all gather the means.

A rank sends 2 (n-1)/n times the bits per coordinate at any n. The error is ω (n-1)/n² from the roundings of the ranks,
plus ω from the rounding of the mean. An owner has its own gradient exactly, so its own message is used only if there is
a memory, which has the error of the message. Scales are local and part of the messages. All ranks decode the owner's
mean, so all ranks have the same bits. A block's owner depends only on the numbers of the block and of its parameter, so
results do not depend on buckets.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs import Codec, CompandedCodec, FloatCodec
from lightning_gqsgd.kernels.layout import BlockRun, Layout, place_by_owner, sizes_by_owner
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES
from lightning_gqsgd.reducers.base import Exchange, Reducer, Setting, StepKeys, Steps, ring_bytes
from lightning_gqsgd.reducers.link import Link, Remember, remember_nothing
from lightning_gqsgd.reducers.memory import DOWN, UP, MemoryStore
from lightning_gqsgd.reducers.native import Native


class TwoShot(Reducer):
    """Averages each shard on its owner, from quantised messages, and gathers the quantised means."""

    memories: ClassVar[tuple[str, ...]] = ("memory", "memory_down")
    owns_shards: ClassVar[bool] = True

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        self.ranks = setting.ranks
        self.up = Link(setting, UP)
        self.down = Link(setting, DOWN)
        self.needs_copy = self.up.needs_copy or self.down.needs_copy
        q = self.up.quantiser
        self.layout = place_by_owner(table, q, shards=self.ranks, **setting.record_sizes, striped=setting.remembers)
        self.message_bytes = self.layout.message_bytes
        self.sent_bytes = ring_bytes(self.message_bytes, self.ranks)

    @classmethod
    def alike(cls, block_runs: Sequence[BlockRun], setting: Setting) -> Hashable:
        """Returns the sizes of the piece and of rank 0's shard."""
        q = setting.codec.quantiser(setting.block_size)
        return sizes_by_owner(block_runs, q, shards=setting.ranks, **setting.record_sizes)

    @staticmethod
    def mean_error(codec: Codec, ranks: int) -> float:
        # Each rank except for the owner rounds once, and these roundings average out. The owner rounds the mean once
        # more.
        rounding = codec.error_variance()
        return rounding * (ranks - 1) / ranks**2 + rounding

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        device = x.device
        layout = self.layout.on(device)
        sent = torch.empty(layout.message_bytes, dtype=torch.uint8, device=device)
        received = torch.empty(self.ranks, layout.shard_bytes, dtype=torch.uint8, device=device)
        part = self.up.part_for_owners(layout, rank)
        remember = self.up.outgoing(x, part, keys.rotation, store).encode(sent, keys.up[rank])
        # A rank sends each owner only its shard, so it sends (n-1)/n of a message in each of the two exchanges, for any
        # number of ranks.
        yield (Exchange("all_to_all", received, sent),)

        shard = torch.empty(layout.shard_bytes, dtype=torch.uint8, device=device)
        remember_mean = self._average(received, layout, rank, shard, x, keys, store)
        yield (Exchange("all_gather", sent, shard),)

        # The owner also decodes its mean from the message, and does not keep the exact mean. Otherwise ranks would have
        # different bits, and their parameters would drift apart.
        bad = self.down.decode(sent.view(1, -1), layout.whole, x, (keys.down,), keys.rotation, store)
        # Memories change last, because they do not change at coordinates whose result is not finite.
        remember(x)
        remember_mean(x)
        return bad

    def _average(
        self,
        messages: Tensor,
        layout: Layout,
        rank: int,
        out: Tensor,
        x: Tensor,
        keys: StepKeys,
        store: MemoryStore,
    ) -> Remember:
        """Encode the mean of this rank's shard into ``out``. The layout counts from the start of ``x``.

        Returns:
            A function that changes the memory after the step.
        """
        part = layout.shard(rank)
        # If both links are plain, one kernel decodes, averages and encodes, and the mean is not written in between.
        if self.up.plain and self.down.plain:
            part.kernels.reduce(messages, self.up.coding(part, keys.rotation), x, keys.up, rank, out, keys.down)
            return remember_nothing
        mean = x.to(COMPUTE_DTYPES[x.dtype], copy=True)
        self.up.decode(messages, part, mean, keys.up, keys.rotation, store, own=rank)
        return self.down.outgoing(mean, part, keys.rotation, store).encode(out, keys.down)


def uncompressed(setting: Setting) -> Setting:
    """Returns the setting for uncompressed parameters. It is a setting of `TwoShot`, which adds in rank order for all
    buckets, or of `Native` if the codec is `FloatCodec`.

    No coordinate is quantised. The codec is kept, so that no other kernel has to be compiled: those of a GPU are
    compiled for the numbers of a codec. A biased codec would need a memory, so it is replaced by companded codes.
    """
    codec = setting.codec
    is_float = isinstance(codec, FloatCodec)
    if is_float:
        codec = FloatCodec.of(FloatCodec.default_bits)
    elif codec.biased_by:
        codec = CompandedCodec.of(CompandedCodec.default_bits)
    return Setting(
        Native if is_float else TwoShot,
        codec,
        setting.ranks,
        setting.dtype,
        setting.block_size,
        seed=setting.seed,
        sample_every=setting.sample_every,
        piece_size=setting.piece_size,
    )
