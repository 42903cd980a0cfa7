"""The exponential codec: powers of two, with a few mantissa bits between them.

With y = |x|/M in [0, 1], the levels are 0 and S magnitudes that descend from 1, 2^m for each power of two. They are
floats whose mantissa has m bits. Stochastic rounding adds a uniform number to the mantissa bits that are cut off, so it
takes integer operations only. Below the smallest level l, the result is l with probability y/l, and 0 otherwise. The
codec is unbiased.

m = 0 is natural dithering (arXiv 1905.10988) and the exponential dithering of Global-QSGD (arXiv 2305.18627). Under a
scale that is a power of two, codes of many bits are natural compression.

Codes with m = 0 can be added in pairs without bias. Let the magnitudes be 2^-a >= 2^-b, and D = b - a. The sum of equal
signs is 2^(1-a) with probability 2^-D, and 2^-a otherwise. The sum of opposite signs is 2^-(a+1) with probability
2^(1-D), and 2^-a otherwise; for D = 0 it is zero. A sum above the largest magnitude becomes the largest magnitude.
Random numbers have 32 bits, so an event that is rarer than 2^-32 does not happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs.base import Codec
from lightning_gqsgd.codecs.linear.codec import check_levels
from lightning_gqsgd.codecs.variance import omega_exponential, relative_variance, smallest_level
from lightning_gqsgd.errors import ConfigError, counted
from lightning_gqsgd.kernels.packing import code_bytes
from lightning_gqsgd.kernels.protocol import Kind
from lightning_gqsgd.kernels.wire import SCALE_FORMATS, magnitudes

#: The largest number of mantissa bits: with more, the levels are nearly uniform.
MAX_MANTISSA = 3


@dataclass(frozen=True)
class ExponentialQuantiser:
    """An exponential codec at one block size, as kernels see it; see `kernels.protocol.Quantiser`.

    Attributes:
        bits: bits of one code on the wire; the highest one is the sign.
        block_size: the largest number of coordinates in a block.
        magnitudes: number of non-zero magnitudes S. Magnitude c stands for the float whose bits, cut off after
            ``mantissa`` bits of the mantissa, are S - c below the bits of 1.0. Magnitude 0 stands for 0.
        mantissa: bits of the mantissa, m.
        headroom: before encoding, coordinates are multiplied by 2^-headroom, so that 2^headroom codes add up to at
            most 1.
    """

    bits: int
    block_size: int
    magnitudes: int
    mantissa: int = 0
    headroom: int = 0

    kind: ClassVar[Kind] = Kind("exponential", __package__)
    is_whole: ClassVar[bool] = False
    summable: ClassVar[bool] = False

    def record_bytes(self, length: np.ndarray, raw_bytes: int) -> np.ndarray:
        """Returns the number of bytes of each block's record; see `kernels.protocol.Quantiser.record_bytes`."""
        return code_bytes(length, self.bits)

    def encode(self, values: Tensor, lengths: Tensor, scales: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the codes and the flag of each block; see `kernels.protocol.ScaledQuantiser.encode`. The flag is
        never set."""
        form = SCALE_FORMATS[values.dtype]
        cut, bits_of_one = self._cut(values.dtype)
        y = (values.abs() * (1 / scales)[:, None]).clamp(max=1).nan_to_num() * 2.0**-self.headroom
        random = (uniform.double() * 2.0**cut).long()
        magnitude = ((magnitudes(y).long() + random) >> cut) - (bits_of_one - self.magnitudes)
        smallest = form.floats(torch.full_like(y, (bits_of_one - self.magnitudes + 1) << cut).long())
        # Below the smallest level there are no mantissa bits to round: the coordinate becomes that level or zero.
        magnitude = torch.where(y < smallest, (y * (1 / smallest) > uniform.to(y.dtype)).long(), magnitude)
        codes = torch.where(magnitude > 0, magnitude | ((values < 0).long() << (self.bits - 1)), 0)
        return codes, torch.zeros(len(values), dtype=torch.bool, device=values.device)

    def decode(self, codes: Tensor, scales: Tensor, flags: Tensor, uniform: Tensor) -> Tensor:
        """Returns the coordinates of codes; see `kernels.protocol.ScaledQuantiser.decode`. Decoding needs no dither."""
        return self._decoded(codes, scales, 1.0)

    def _decoded(self, codes: Tensor, scales: Tensor, share: float) -> Tensor:
        cut, bits_of_one = self._cut(scales.dtype)
        magnitude = codes & ((1 << (self.bits - 1)) - 1)
        sign = codes >> (self.bits - 1)
        y = SCALE_FORMATS[scales.dtype].floats((magnitude + (bits_of_one - self.magnitudes)) << cut)
        limit = torch.finfo(scales.dtype).max
        y = y * (1 - 2 * sign) * share  # not the scale times the share, which may be infinite
        return torch.where(magnitude > 0, y * scales[:, None], 0).clamp(-limit, limit)

    def decode_sum(self, codes: Tensor, scales: Tensor, uniforms: Sequence[Tensor]) -> Tensor:
        """Returns the mean from the sums of all ranks' codes; see `kernels.protocol.SummableQuantiser.decode_sum`. The
        sums are codes, see `combine`."""
        share = 2.0**self.headroom / len(uniforms)
        return self._decoded(codes, scales, share)

    def combine(self, codes: Tensor, others: Tensor, words: Tensor) -> Tensor:
        """Returns unbiased codes of the sums of two codes' numbers; see `kernels.protocol.SummableQuantiser.combine`.
        The module's docstring describes the rule, which is for codes without mantissa."""
        mask = (1 << (self.bits - 1)) - 1
        sign = 1 << (self.bits - 1)
        swap = (others & mask) > (codes & mask)
        large = torch.where(swap, others, codes)
        small = torch.where(swap, codes, others)
        a = large & mask
        b = small & mask
        opposite = ((large ^ small) & sign) != 0
        distance = a - b - opposite.long()
        # A random word is below 2^(32-D) with probability 2^-D. Every 32-bit word is below 2^32, so D = 0 always fires.
        fires = words < (1 << (32 - distance.clamp(0, 32)))
        moved = torch.where(opposite, a - fires.long(), (a + fires.long()).clamp(max=self.magnitudes))
        moved = torch.where(opposite & (distance < 0), 0, moved)
        # Code 0 is the number zero, which adds nothing.
        result = torch.where(b == 0, a, moved)
        return torch.where(result == 0, 0, (large & sign) | result)

    def _cut(self, dtype: torch.dtype) -> tuple[int, int]:
        """Returns the number of mantissa bits that codes drop, and the bits of 1.0 without the dropped bits."""
        form = SCALE_FORMATS[dtype]
        exponent_of_one = form.infinity >> form.mantissa >> 1  # half of infinity's
        return form.mantissa - self.mantissa, exponent_of_one << self.mantissa


@dataclass(frozen=True)
class ExponentialCodec(Codec):
    """Exponential dithering at a number of bits per coordinate, one of which is the sign.

    Attributes:
        bits: bits of a code on the wire, 2 to 8.
        mantissa: bits of the mantissa, m.
        most: upper limit of the number of non-zero magnitudes; None: as many as fit.
    """

    bits: int
    mantissa: int = 0
    most: int | None = None

    name: ClassVar[str] = "exponential"
    fields: ClassVar[frozenset[str]] = frozenset({"levels", "mantissa"})

    @classmethod
    def of(cls, bits: int, *, levels: int | None = None, mantissa: int = 0) -> ExponentialCodec:
        """Returns the codec with these attributes; see `Codec.of`. ``levels`` becomes ``most``."""
        check_levels(levels, bits)
        return cls(bits, mantissa, levels)

    @property
    def adds_in_pairs(self) -> bool:
        """True if codes can be added in pairs; see `Codec.adds_in_pairs`. The rule is for codes without mantissa."""
        return self.mantissa == 0

    def describe(self) -> tuple[str, list[str]]:
        """Returns the bits per coordinate, and words that describe the codec; see `Codec.describe`."""
        return f"{self.bits}", ["exponential", f"{self.mantissa} mantissa bits"]

    @property
    def magnitudes(self) -> int:
        """Number of non-zero magnitudes S."""
        fitting = 2 ** (self.bits - 1) - 1
        return min(self.most or fitting, fitting)

    def quantiser(self, block_size: int, summed: int | None = None) -> ExponentialQuantiser:
        """Returns the quantiser; see `Codec.quantiser`. Codes are added in pairs.

        Raises:
            ConfigError: if fewer than two magnitudes are left for each rank's own codes.
        """
        headroom = self._headroom(summed or 1)
        return ExponentialQuantiser(self.bits, block_size, self.magnitudes, self.mantissa, headroom)

    def error_variance(self, summed: int = 1) -> float:
        """Returns an upper limit of the mean square error of one rank's coordinate, in units of the squared scale:
        h²/(4(1+h)), h = 2^-m.

        This is the largest error relative to the coordinate's own square; see `variance.relative_variance`. A
        coordinate half as large as the smallest magnitude l has the error l²/4, which is larger if there is only one
        magnitude.
        """
        return max(relative_variance(self.mantissa), smallest_level(self.magnitudes, self.mantissa) ** 2 / 4)

    def omega(self, dimension: int, summed: int = 1) -> float:
        """Returns ω, see `Codec.omega`: the result of `variance.omega_exponential`."""
        return omega_exponential(dimension, self.magnitudes - self._headroom(summed), self.mantissa)

    def _headroom(self, summed: int) -> int:
        """Returns the number of magnitudes that are reserved for sums over ``summed`` ranks.

        The depth of a tree of sums is log2 n, rounded up. The tree multiplies the largest magnitude by at most 2^depth:
        a sum of two numbers up to 2^k is at most 2^(k+1). This is a level, so rounding does not exceed it.
        """
        headroom = (summed - 1).bit_length()
        if self.magnitudes - headroom < 2 and headroom:
            raise ConfigError(
                f"reducer='tree' at bits={self.bits} with {self.magnitudes} magnitudes adds at most "
                f"{counted(2 ** max(0, self.magnitudes - 2), 'rank')}, not {summed}; take more bits or "
                "reducer='two_shot'"
            )
        return headroom
