"""The reducer `native`: the backend's own all-reduce in the gradient's dtype, bit-identical to DDP without a hook."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from lightning_gqsgd.kernels.layout import LENGTH
from lightning_gqsgd.reducers.base import Exchange, Setting, StepKeys, Steps, WholeNumbers, ring_bytes
from lightning_gqsgd.reducers.memory import MemoryStore


class Native(WholeNumbers):
    """Reduces with the backend's own all-reduce, without quantisation."""

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        self.ranks = setting.ranks
        self.message_bytes = int(table[:, LENGTH].sum()) * setting.dtype.itemsize
        self.sent_bytes = ring_bytes(self.message_bytes, self.ranks)

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        x.mul_(1.0 / self.ranks)  # before the sum, as DDP does: sums of fp16 numbers overflow otherwise
        yield (Exchange.in_place("sum", x),)
        return 0
