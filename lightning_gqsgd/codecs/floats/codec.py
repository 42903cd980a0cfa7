"""The float codec: coordinates stay as they are (32 bits), or are rounded stochastically to bf16 (16 bits).

Blocks have no scale and no levels, so the backend's own all-reduce adds the numbers.

A bf16 number is the upper half of an fp32 number. Rounding adds a random integer of 16 bits to the lower half, and then
drops the lower half:

    code = floor((m + k) / 2^16),   m the 31 bits of the magnitude, k uniform on 0 .. 2^16 - 1

The code is the next number above the magnitude with probability (m mod 2^16)/2^16, and the number below it otherwise.
Within a binade the numbers are equidistant, and a binade's upper end is the next binade's lower end, so the mean of
the rounded number is the magnitude exactly. Neighbours are 2^-7 of a binade's lower end apart, so the variance is that
of powers of two with 7 bits in between (`variance.relative_variance`): at most 1.5e-5 of the square, and 5.6e-6 on
average over magnitudes whose logarithm is uniform, which is a relative error of 2^-8.7.

The numbers are divided by the number of ranks n first. Numbers beyond `largest` are clipped to it, so that no sum of n
of them overflows. NaN and infinity stay.

The sum within the backend's all-reduce is not unbiased: every addition of two bf16 numbers rounds to the nearest bf16
number, with an error of at most 2^-9 of the sum. A ring makes n - 1 additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn

from lightning_gqsgd.codecs.base import Codec
from lightning_gqsgd.codecs.variance import relative_variance
from lightning_gqsgd.errors import ConfigError

#: The reducer for each number of bits per coordinate.
REDUCER_OF_BITS = {16: "bf16", 32: "native"}

_MANTISSA = 7
#: Sums of clipped numbers stay below 2 to this exponent. This is half of bf16's range, because sums are rounded.
_EXPONENT = 126


def largest(ranks: int) -> int:
    """Returns the bits of the largest magnitude that a rank sends, as an fp32 number. The magnitude is 2^126 divided by
    n, with n = ``ranks`` rounded up to a power of two.

    A sum of up to 256 numbers of at most 2^e is at most 256 2^e, also after rounding, because the multiples of 2^e up
    to 256 2^e are bf16 numbers. With more numbers, rounding makes the sum of a tree larger by at most a factor
    (1 + 2^-8)^log2(n) < 2. The sum of a ring stops growing at 260 2^e, where 2^e is less than half of the distance of
    two bf16 numbers.
    """
    exponent = _EXPONENT - (ranks - 1).bit_length()
    return exponent + 127 << 23


@dataclass(frozen=True)
class FloatCodec(Codec):
    """Coordinates as floating-point numbers.

    Attributes:
        bits: 16 for bf16, 32 for uncompressed coordinates.
    """

    bits: int

    name: ClassVar[str] = "float"
    default_bits: ClassVar[int] = 32
    widths: ClassVar[Sequence[int]] = tuple(REDUCER_OF_BITS)
    default_block_size: ClassVar[int] = 1024
    has_scale: ClassVar[bool] = False
    takes_norm: ClassVar[bool] = False

    @classmethod
    def of(cls, bits: int) -> FloatCodec:
        """Returns the codec of numbers with 16 or 32 bits; see `Codec.of`."""
        return cls(bits)

    def check_blocks(self, block_size: int, *, rotation: bool) -> None:
        """Check that the codec works with a block size and without a rotation; see `Codec.check_blocks`. There are no
        blocks to rotate."""
        if rotation:
            raise ConfigError(f"rotation=True is for codes of 1 to 8 bits, not bits={self.bits}; leave it out")

    def describe(self) -> tuple[str, list[str]]:
        """Returns the bits per coordinate, and words that describe the codec; see `Codec.describe`."""
        return str(self.bits), ["bf16, stochastic rounding" if self.bits == 16 else "as they are"]

    def quantiser(self, block_size: int, summed: int | None = None) -> NoReturn:
        """Raise ConfigError, because there are no codes."""
        raise ConfigError(f"bits={self.bits} has no codes; take at most 8 bits")

    def error_variance(self, summed: int = 1) -> float:
        """Returns the largest mean square error of a coordinate up to the scale, in units of the squared scale."""
        return self.omega(1)

    def omega(self, dimension: int, summed: int = 1) -> float:
        """Returns ω. It does not depend on the dimension, because each coordinate's error is relative to the
        coordinate."""
        return relative_variance(_MANTISSA) if self.bits == 16 else 0.0
