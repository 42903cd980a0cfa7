"""The backend's own allreduce in the gradient's dtype: what DDP does without a hook, bit for bit."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.layout import LENGTH
from lightning_gqsgd.memory import MemoryStore
from lightning_gqsgd.reducers.base import Exchange, Setting, StepKeys, Steps, ring_bytes


class Native:
    """See the module; `reducers.base.Reducer`."""

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        self.ranks = setting.ranks
        self.message_bytes = int(table[:, LENGTH].sum()) * setting.dtype.itemsize
        self.sent_bytes = ring_bytes(self.message_bytes, self.ranks)

    @staticmethod
    def stages(config: GQSGDConfig, ranks: int) -> int:
        """See `reducers.base.Reducer.stages`."""
        return 1

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore | None = None) -> Steps:
        """See `reducers.base.Reducer.steps`."""
        x.mul_(1.0 / self.ranks)  # before the sum, as DDP does: fp16 sums overflow otherwise
        yield (Exchange.in_place("sum", x),)
        return 0
