"""The largest coordinates of each block, as they are, and their places; zero for all others.

Biased: |C(x) - x|² <= (1 - k/d) |x|², since the k largest of d squares have at least their share of the sum. The k of a
block is a fixed share of its length, so that messages have the same length on every rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_gqsgd.kernels.wire import Kind, Quantiser


@dataclass(frozen=True)
class TopKCodec:
    """The ``density`` largest share of every block, rounded up; the density itself is cut to 65536ths, at least one."""

    density: float

    def quantiser(self, block_size: int, summed: int | None = None) -> Quantiser:
        """What the kernels need."""
        kept = max(1, int(self.density * 65536))
        return Quantiser(32, 1, 1, 1.0, summable=False, block_size=block_size, kind=Kind.TOP_K, kept=kept)

    def omega(self, dimension: int, summed: int = 1) -> float:
        """Infinite: the codec is biased."""
        return math.inf

    def delta(self, dimension: int) -> float:
        """δ with |C(x) - x|² <= (1-δ) |x|²: k/d."""
        return self.quantiser(dimension).kept_of(dimension) / dimension
