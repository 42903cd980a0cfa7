"""The backend's own allreduce in the gradient's dtype: what DDP does without a hook, bit for bit."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from lightning_gqsgd.layout import LENGTH, START
from lightning_gqsgd.reducers.base import Exchange, Setting, StepKeys, Steps, ring_bytes


class Native:
    """See the module; `reducers.base.Reducer`."""

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        self.ranks = setting.ranks
        self.part = slice(int(table[0, START]), int(table[-1, START] + table[-1, LENGTH]))
        self.message_bytes = (self.part.stop - self.part.start) * setting.dtype.itemsize
        self.sent_bytes = ring_bytes(self.message_bytes, self.ranks)

    def steps(self, x: Tensor, rank: int, keys: StepKeys) -> Steps:
        """See `reducers.base.Reducer.steps`."""
        part = x[self.part].mul_(1.0 / self.ranks)  # before the sum, as DDP does: fp16 sums overflow otherwise
        yield (Exchange.in_place("sum", part),)
        return 0
