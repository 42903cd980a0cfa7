"""The reducer `bf16`: each rank rounds to bf16 stochastically, and the backend's own all-reduce adds.

Each coordinate takes 16 bits. Gradients of 16 bits are sent as they are, as by `native`. fp64 gradients are rounded to
fp32 first.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs import Codec
from lightning_gqsgd.codecs.floats.codec import FloatCodec, largest
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import LENGTH, Layout
from lightning_gqsgd.kernels.wire import in_finite_range
from lightning_gqsgd.reducers.base import Exchange, Reducer, Setting, StepKeys, Steps, ring_bytes
from lightning_gqsgd.reducers.memory import MemoryStore


class Bf16(Reducer):
    """Reduces with the backend's own all-reduce, in bf16."""

    scales: ClassVar[tuple[str, ...]] = ()
    float_bits: ClassVar[tuple[int, ...]] = (16,)
    needs_copy = False

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        self.ranks = setting.ranks
        self.layout = Layout(table, np.arange(len(table)), (0, len(table)), 0, setting.block_size)
        self.message_bytes = int(table[:, LENGTH].sum()) * torch.bfloat16.itemsize
        self.sent_bytes = ring_bytes(self.message_bytes, self.ranks)

    @staticmethod
    def check(codec: Codec) -> None:
        if not isinstance(codec, FloatCodec):
            raise ConfigError(f"reducer='bf16' is for bits=16, not bits={codec.bits}; leave reducer out")

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        # fp16 and bf16 gradients already have 16 bits, so they are not rounded. They are divided before the sum,
        # because the sum might overflow otherwise.
        if x.dtype.itemsize == torch.bfloat16.itemsize:
            x.mul_(1.0 / self.ranks)
            yield (Exchange.in_place("sum", x),)
            return 0
        # The kernels round only fp32 numbers. fp64 numbers that are too large for fp32 are clamped, to stay finite.
        wide = in_finite_range(x, torch.float32).float()
        small = torch.empty_like(wide, dtype=torch.bfloat16)
        part = self.layout.on(x.device).whole
        # Ranks divide before they round, and clamp to `largest`, so that no sum within the all-reduce overflows.
        factor = 1.0 / self.ranks
        part.kernels.narrow(wide, part.blocks, small, keys.up[rank], part.block_size, factor, largest(self.ranks))
        yield (Exchange.in_place("sum", small),)
        x.copy_(small)
        return 0
