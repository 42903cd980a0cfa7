"""What all kernel files agree on: number formats of scales, the dither's hash, and the shape of a quantiser.

A block's scale travels as an unsigned float with the exponent of the compute type and a short mantissa, rounded up so
that no coordinate exceeds it, and one more bit: 1 if the block was rounded stochastically, 0 if by subtractive dither.
That is 16 bits (8 + 7 + 1) for fp32, 32 bits (11 + 20 + 1) for fp64. A block that holds NaN or infinity has all ones.

The dither of coordinate j of block ``index`` of parameter ``parameter``, under the two 32-bit keys k0, k1 of (seed,
step, rank), all arithmetic modulo 2^32:

    a = mix(mix(k0 ^ parameter) + GOLDEN index),  b = mix(mix(k1 + parameter) ^ index)
    h = finish(start(a + p) ^ b),  p = j for the first half of the block, j - half for the second
    v = (low 16 bits of h, or high 16 bits in the second half; + 1/2) / 2^16,  uniform on (0, 1)

mix = finish(start(.)) is a 32-bit finaliser of two multiplications (constants of the "lowbias32" search by C. Wellons).
16 bits are what fp32 arithmetic keeps of a dither added to codes up to 255. The sum of two exponential codes draws all
32 bits of finish(start(a + j) ^ b) for coordinate j: it has to tell 2^-31 from 0.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

GOLDEN = 0x9E3779B9
MULTIPLY_1 = 0x7FEB352D
MULTIPLY_2 = 0x846CA68B

#: One coordinate's dither is (k + 1/2) 2^-16 for the 16-bit integer k.
DITHER_UNIT = 2.0**-16
DITHER_FIRST = 2.0**-17


class ScaleFormat(NamedTuple):
    """How a block's largest magnitude, as the bits of the compute type, becomes the scale on the wire.

    Attributes:
        shift: bits of the mantissa that are dropped (the rest then moves up by one, to make room for the flag).
        infinity: bits of infinity; anything from there on is not finite.
        tiny: bits of the smallest scale used, 2^-118 or 2^-1014: below it, 1/Δ would overflow.
        nbytes: bytes on the wire.
        raw_bytes: bytes of an uncompressed coordinate.
        mantissa: bits of the compute type's mantissa.
        integer: the integer type as wide as the compute type.
    """

    shift: int
    infinity: int
    tiny: int
    nbytes: int
    raw_bytes: int
    mantissa: int
    integer: torch.dtype

    def rounded_up(self, bits: Tensor) -> Tensor:
        """Bits of the scales for largest magnitudes with these bits, int64; of infinity, where they are not finite."""
        up = (bits.clamp(min=self.tiny) + (1 << self.shift) - 1) >> self.shift << self.shift
        up = torch.where(bits > 0, up, 0)
        up = torch.where(up == self.infinity, self.infinity - 1, up)  # rounded up to it: the largest finite number
        return torch.where(bits >= self.infinity, self.infinity, up)


SCALE_FORMATS = {
    torch.float32: ScaleFormat(
        shift=16, infinity=0xFF << 23, tiny=9 << 23, nbytes=2, raw_bytes=4, mantissa=23, integer=torch.int32
    ),
    torch.float64: ScaleFormat(
        shift=32, infinity=0x7FF << 52, tiny=9 << 52, nbytes=4, raw_bytes=8, mantissa=52, integer=torch.int64
    ),
}

#: Gradient dtype -> dtype in which it is quantised, summed and, uncompressed, sent.
COMPUTE_DTYPES = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float64: torch.float64,
}


class Share(NamedTuple):
    """How a mean over n messages is scaled: every message by ``each`` = 2^-c, the sum by 1/``rest``, with rest = n/2^c.

    2^c is the smallest power of two from n on: nothing overflows, and the mean of n equal numbers is exact.
    """

    each: float
    rest: float

    @classmethod
    def of(cls, ranks: int) -> Share:
        """For a mean over ``ranks`` messages."""
        power = 1 << (ranks - 1).bit_length()
        return cls(1.0 / power, ranks / power)


class Kind(IntEnum):
    """What codes are."""

    LINEAR = 0  # numbers of equidistant levels
    EXPONENTIAL = 1  # sign, exponent and mantissa, from the highest bit downwards
    TOP_K = 2  # coordinates as they are, and where they belong


Count = TypeVar("Count", int, np.ndarray, Tensor)


class Quantiser(NamedTuple):
    """The numbers a kernel needs of a codec.

    Attributes:
        bits: bits per code on the wire.
        levels: number of levels K per rank under subtractive dither; codes are 0 to K-1.
        odd_levels: the same under stochastic rounding.
        stochastic_from: a block is rounded stochastically if more than this share of its coordinates is zero: always
            below 0, never at 1.
        summable: codes lie in lanes whose sums do not overflow.
        block_size: the most coordinates a block has.
        kind: what codes are; the entries above are a linear quantiser's, those below others'.
        nearest: linear, but without dither, except for zeros: codes are the nearest levels' numbers.
        magnitudes: number of non-zero magnitudes S of an exponential code. Magnitude c stands for the float whose bits,
            cut off after ``mantissa`` bits of the mantissa, are S - c below those of 1.0; 0 stands for 0.
        mantissa: bits of the mantissa, m.
        headroom: an exponential code stands for 2^-headroom of what its sums do: 2^headroom codes add up to at most 1.
        kept: of 65536 coordinates, how many top-k keeps; 1 or more.
    """

    bits: int
    levels: int
    odd_levels: int
    stochastic_from: float
    summable: bool
    block_size: int
    kind: Kind = Kind.LINEAR
    nearest: bool = False
    magnitudes: int = 0
    mantissa: int = 0
    headroom: int = 0
    kept: int = 0

    @property
    def always_stochastic(self) -> bool:
        """Which dither codes have whose scale comes from elsewhere, so that no flag travels with it."""
        return self.stochastic_from < 0

    def kept_of(self, length: Count) -> Count:
        """How many coordinates top-k keeps of a block with so many, rounded up."""
        return (length * self.kept + 65535) >> 16


Key = tuple[int, int]


def scale_format(dtype: torch.dtype) -> ScaleFormat:
    """Scale format for gradients of ``dtype``."""
    return SCALE_FORMATS[COMPUTE_DTYPES[dtype]]
