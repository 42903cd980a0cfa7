"""The sign codec: the sign of each coordinate, times the block's mean magnitude, C(x) = |x|_1/d sign(x).

The codec is biased: |C(x) - x|² = (1 - |x|_1²/(d |x|²)) |x|² exactly, so it needs an error memory (EF-signSGD, arXiv
1901.09847). A zero gets either sign at random, so that the average over ranks stays near zero. For kernels, the codec
is a linear codec with two levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lightning_gqsgd.codecs.base import BiasedCodec
from lightning_gqsgd.codecs.linear.codec import LinearQuantiser


@dataclass(frozen=True)
class SignCodec(BiasedCodec):
    """One bit per coordinate."""

    name: ClassVar[str] = "sign"
    default_bits: ClassVar[int] = 1
    widths: ClassVar[Sequence[int]] = (1,)
    bits = 1
    takes_norm: ClassVar[bool] = False  # the scale is the mean magnitude

    @classmethod
    def of(cls, bits: int) -> SignCodec:
        """Returns the codec, whose number of bits is 1; see `Codec.of`."""
        return cls()

    def quantiser(self, block_size: int, summed: int | None = None) -> LinearQuantiser:
        """Returns the quantiser; see `Codec.quantiser`."""
        return LinearQuantiser(1, levels=2, odd_levels=2, stochastic_from=1.0, block_size=block_size, nearest=True)

    def delta(self, dimension: int) -> float:
        """Returns δ = 1/d, with |C(x) - x|² <= (1-δ) |x|² for all x. For a given x, |x|_1²/(d |x|²) takes the place of
        1/d; it is near 2/π for large Gaussian blocks."""
        return 1 / dimension
