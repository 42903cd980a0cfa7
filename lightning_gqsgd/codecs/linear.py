"""Uniform levels with dither.

A block with scale M (the largest magnitude in it, over one rank or over all) is rounded to K levels, Δ = 2M/(K-1)
apart, symmetric about zero. A code is the level's number, 0 to K-1, and stands for (code - (K-1)/2) Δ. With y = x/Δ:

* stochastic: code = floor(y + v) + (K-1)/2, v uniform on [0, 1), K odd, so that zero is a level and stays zero.
* subtractive: code = rint(y + u + (K-1)/2), u uniform on [-1/2, 1/2); the receiver, which knows u, decodes
  (code - (K-1)/2 - u) Δ. Zero need not be a level, so K may be even and every code of the word is used.
* adaptive: subtractive, but stochastic in blocks with so many zeros that it has the smaller error there.
* nearest: code = rint(y + (K-1)/2), decoded to its level; a zero, which is half-way, goes to either side at random.

The first two are unbiased. The choice between them depends on the gradient alone, not on the dither, so adaptive is,
too. Nearest is not: its error is at most Δ/2 and the same every time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_gqsgd.codecs.variance import omega_linear, omega_subtractive
from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.kernels.wire import Quantiser


@dataclass(frozen=True)
class LinearCodec:
    """Linear dithering at a number of bits per coordinate.

    Attributes:
        bits: bits of a code on the wire (of the sum of all ranks' codes, where codes are summed).
        dither: ``"adaptive"``, ``"subtractive"``, ``"stochastic"`` or ``"nearest"``.
        most: the most levels on each side of zero under stochastic rounding, s; None: as many as fit.
    """

    bits: int
    dither: str
    most: int | None = None

    def levels(self, summed: int = 1, *, odd: bool | None = None) -> int:
        """Number of levels K per rank, so that the sum of ``summed`` codes fits ``bits`` bits: summed (K-1) < 2^bits.

        Args:
            summed: number of ranks whose codes are added before they are decoded.
            odd: for stochastic rounding, which needs an odd K; None for what the codec does on dense gradients.

        Raises:
            ConfigError: fewer than two levels (three, if odd) would be left.
        """
        odd = self.dither == "stochastic" if odd is None else odd
        levels = (2**self.bits - 1) // summed + 1
        if odd:
            levels -= 1 - levels % 2
            levels = min(levels, 2 * self.most + 1) if self.most else levels
        if levels < (3 if odd else 2):
            limit = (2**self.bits - 1) // (2 if odd else 1)
            raise ConfigError(
                f"reducer='sum' at bits={self.bits} with {'stochastic' if odd else 'subtractive'} dither sums at most "
                f"{limit} ranks, not {summed}; take more bits or reducer='two_shot'"
            )
        return levels

    def quantiser(self, block_size: int, summed: int | None = None) -> Quantiser:
        """What the kernels need; ``summed``: codes are added over so many ranks, under scales that all ranks share.

        Sums have one dither in all blocks, since each rank's choice would have to reach the decoder: adaptive is
        subtractive there.

        Raises:
            ConfigError: see `levels`.
        """
        if self.dither == "stochastic":
            odd = self.levels(summed or 1)
            return Quantiser(self.bits, odd, odd, -1.0, summed is not None, block_size)
        even = odd = self.levels(summed or 1)
        share = 1.0
        if self.dither == "adaptive" and summed is None and self.bits > 1:
            odd = self.levels(odd=True)
            share = _break_even(even, odd)
        nearest = self.dither == "nearest"
        return Quantiser(self.bits, even, odd, share, summed is not None, block_size, nearest=nearest)

    def step(self, summed: int = 1) -> float:
        """Distance Δ of two levels, in units of the block's scale."""
        return 2.0 / (self.levels(summed) - 1)

    def error_variance(self, summed: int = 1) -> float:
        """Mean square error of one rank's coordinate, in units of the squared scale, on dense gradients.

        Subtractive dither: Δ²/12 whatever the coordinate. Stochastic rounding: f(1-f) Δ² with f the distance to the
        level below, Δ²/6 for uniform f.
        """
        return self.step(summed) ** 2 / (6 if self.dither == "stochastic" else 12)

    def omega(self, dimension: int, summed: int = 1) -> float:
        """ω with E|Q(x) - x|² <= ω |x|² for ``dimension`` coordinates that share a scale; infinite if the codec is
        biased. ``summed``: of one rank's codes, where they are added over so many ranks.

        Adaptive dither has no more error than subtractive.

        Raises:
            ConfigError: see `levels`.
        """
        if self.dither == "nearest":
            return math.inf
        if self.dither != "stochastic":
            return omega_subtractive(dimension, self.levels(summed))
        return omega_linear(dimension, (self.levels(summed) - 1) // 2)

    def delta(self, dimension: int) -> float:
        """δ with |C(x) - x|² <= (1-δ) |x|², for C = Q/(1+ω), or for the nearest level: errors are at most Δ/2."""
        if self.dither != "nearest":
            return 1 / (1 + self.omega(dimension))
        return max(0.0, 1 - dimension * self.step() ** 2 / 4)

    def mean_error(self, reducer: str, ranks: int) -> float:
        """Predicted mean square error of the mean over ``ranks``, per coordinate, in units of the squared scale.

        All ranks are taken to have the same scale, which for ``two_shot`` is also that of the mean (aligned gradients,
        its worst case): error_variance/n for the ranks' roundings, plus one more rounding of the mean in ``two_shot``.

        Raises:
            ConfigError: ``reducer`` is ``"sum"`` and the codes of so many ranks do not fit.
        """
        one = self.error_variance(ranks if reducer == "sum" else 1)
        return one / ranks + (one if reducer == "two_shot" else 0.0)


def _break_even(levels: int, odd_levels: int) -> float:
    """Share c of zeros from which stochastic rounding, with steps Δ', has the smaller error: (1-c) Δ'²/6 < Δ²/12."""
    return 1 - ((odd_levels - 1) / (levels - 1)) ** 2 / 2
