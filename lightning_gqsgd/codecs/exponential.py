"""Powers of two, and a few mantissa bits between them.

With y = |x|/M in [0, 1], the levels are 0 and S magnitudes that go down from 1, 2^m to each power of two: what is left
of a float when its mantissa is cut to m bits. Stochastic rounding adds a uniform number to the bits that are cut off,
so it takes integer operations only; below the smallest level l, it gives l with probability y/l. Unbiased.

m = 0 is natural dithering (arXiv 1905.10988) and the exponential dithering of Global-QSGD (arXiv 2305.18627); under a
scale that is a power of two, wide codes are natural compression.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gqsgd.codecs.variance import omega_exponential
from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.kernels.wire import Kind, Quantiser


@dataclass(frozen=True)
class ExponentialCodec:
    """Exponential dithering at a number of bits per coordinate, one of which is the sign.

    Attributes:
        bits: bits of a code on the wire, 2 to 8.
        mantissa: bits of the mantissa, m.
        most: the most non-zero magnitudes; None: as many as fit.
    """

    bits: int
    mantissa: int = 0
    most: int | None = None

    @property
    def magnitudes(self) -> int:
        """Number of non-zero magnitudes S."""
        fitting = 2 ** (self.bits - 1) - 1
        return min(self.most or fitting, fitting)

    def quantiser(self, block_size: int, summed: int | None = None) -> Quantiser:
        """What the kernels need; ``summed``: codes are added in pairs over so many ranks, under a shared scale.

        Raises:
            ConfigError: fewer than two magnitudes are left to each rank's own codes.
        """
        return Quantiser(
            bits=self.bits,
            levels=1,
            odd_levels=1,
            stochastic_from=1.0,
            summable=False,
            block_size=block_size,
            kind=Kind.EXPONENTIAL,
            magnitudes=self.magnitudes,
            mantissa=self.mantissa,
            headroom=self._headroom(summed or 1),
        )

    def omega(self, dimension: int, summed: int = 1) -> float:
        """ω with E|Q(x) - x|² <= ω |x|² for ``dimension`` coordinates that share a scale; see
        `variance.omega_exponential`. ``summed``: of one rank's codes, where they are added over so many ranks.

        Raises:
            ConfigError: see `quantiser`.
        """
        return omega_exponential(dimension, self.magnitudes - self._headroom(summed), self.mantissa)

    def delta(self, dimension: int) -> float:
        """δ with E|C(x) - x|² <= (1-δ) |x|² for C = Q/(1+ω)."""
        return 1 / (1 + self.omega(dimension))

    def _headroom(self, summed: int) -> int:
        """How many magnitudes are left to sums over so many ranks.

        A tree of sums whose depth is log2 n, rounded up, multiplies the largest magnitude by at most 2^depth: sums of
        two numbers up to 2^k are at most 2^(k+1), which is a level, so rounding stays below it.
        """
        headroom = (summed - 1).bit_length()
        if self.magnitudes - headroom < 2 and headroom:
            raise ConfigError(
                f"reducer='tree' at bits={self.bits} with {self.magnitudes} magnitudes adds at most "
                f"{2 ** max(0, self.magnitudes - 2)} ranks, not {summed}; take more bits or reducer='two_shot'"
            )
        return headroom
