"""The sign of each coordinate, times the block's mean magnitude: C(x) = |x|_1/d sign(x).

Biased: |C(x) - x|² = (1 - |x|_1²/(d |x|²)) |x|² exactly, so its error has to be remembered (EF-signSGD, arXiv
1901.09847). A zero takes either sign at random, so that on average over ranks it stays one. The kernels see two levels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_gqsgd.kernels.wire import Quantiser


@dataclass(frozen=True)
class SignCodec:
    """One bit per coordinate."""

    def quantiser(self, block_size: int, summed: int | None = None) -> Quantiser:
        """What the kernels need."""
        return Quantiser(1, 2, 2, 1.0, summable=False, block_size=block_size, nearest=True)

    def omega(self, dimension: int, summed: int = 1) -> float:
        """Infinite: the codec is biased."""
        return math.inf

    def delta(self, dimension: int) -> float:
        """δ with |C(x) - x|² <= (1-δ) |x|²: |x|_1²/(d |x|²), at least 1/d; 2/π for large Gaussian blocks."""
        return 1 / dimension
