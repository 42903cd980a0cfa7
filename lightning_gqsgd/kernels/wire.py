"""The rules that all kernels share: the number formats of scales, and the hash that gives the dither.

A block's scale is sent as an unsigned float with the exponent of the compute type and a short mantissa, rounded up so
that no coordinate exceeds it, and one more bit: 1 if the block was rounded stochastically, and 0 if it was rounded with
subtractive dither. This takes 16 bits (8 + 7 + 1) for fp32, and 32 bits (11 + 20 + 1) for fp64. If a block has NaN or
infinity, all bits are ones.

The dither v of coordinate j of block ``index`` of parameter ``parameter`` is computed as follows. k0 and k1 are the two
32-bit keys of (seed, step, rank), and all arithmetic is modulo 2^32:

    a = mix(mix(k0 ^ parameter) + GOLDEN index),  b = mix(mix(k1 + parameter) ^ index)
    h = finish(start(a + p) ^ b),  p = j for the first half of the block, j - half for the second
    v = (low 16 bits of h, or high 16 bits in the second half; + 1/2) / 2^16,  uniform on (0, 1)

mix = finish(start(.)) is a 32-bit finaliser of two multiplications (constants of the "lowbias32" search by C. Wellons).
The scale of an EDEN code is not the largest magnitude. It is rounded up or down at random, by finish(start(a + p) ^ b)
with p = 2^31, and its additional bit is 0 (see `codecs.eden`).

The dither has 16 bits because fp32 arithmetic keeps no more if it is added to codes up to 255. The sum of two
exponential codes uses all 32 bits of finish(start(a + j) ^ b) for coordinate j, because it has to distinguish 2^-31
from 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

#: Version of the format of messages. Ranks with different versions cannot read each other's messages. Since 2, the
#: numbers of blocks determine the owners of shards. Since 3, pieces with few bits have more coordinates.
VERSION = 3

GOLDEN = 0x9E3779B9
MULTIPLY_1 = 0x7FEB352D
MULTIPLY_2 = 0x846CA68B

#: The dither of a coordinate is (k + 1/2) 2^-16, with a 16-bit integer k.
DITHER_UNIT = 2.0**-16
DITHER_FIRST = 2.0**-17


class ScaleFormat(NamedTuple):
    """The number format of scales on the wire. Scales are converted from the bits of the compute type.

    Attributes:
        shift: number of mantissa bits that are dropped. The other bits are then shifted up by one, to make room for the
            flag.
        infinity: bits of infinity. Bits from there on are not finite.
        tiny: bits of the smallest scale that is used, 2^-118 or 2^-1014. Below it, 1/Δ would overflow.
        nbytes: number of bytes of a scale on the wire.
        raw_bytes: number of bytes of an uncompressed coordinate.
        mantissa: number of bits of the compute type's mantissa.
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
        """Returns the bits of scales for the bits of largest magnitudes, int64. If a magnitude is not finite, the bits
        are those of infinity."""
        # Bits of non-negative floats are ordered like the floats. Adding all ones below the cut therefore rounds up,
        # and carries into the exponent if necessary.
        up = (bits.clamp(min=self.tiny) + (1 << self.shift) - 1) >> self.shift << self.shift
        up = torch.where(bits > 0, up, 0)
        up = torch.where(up == self.infinity, self.infinity - 1, up)  # a finite scale stays finite
        return torch.where(bits >= self.infinity, self.infinity, up)

    def rounded_at_random(self, values: Tensor, random: Tensor) -> Tensor:
        """Returns the bits of values that are rounded up or down to the format at random, without bias: int64.

        A value below the smallest scale becomes that scale or zero. A value that would become infinite becomes the
        largest finite number.

        Args:
            values: numbers of the compute type, not negative and not NaN.
            random: uniform 32-bit integers, int64, one for each value.
        """
        bits = magnitudes(values).long()
        rounded = (bits + (random >> (32 - self.shift))) >> self.shift << self.shift
        rounded = torch.where(rounded >= self.infinity, self.infinity - 1, rounded)
        # 24 of the 32 random bits, because fp32 holds no more exactly.
        small = values * values.new_tensor(self.tiny_inverse) > (random >> 8).to(values.dtype) * 2.0**-24
        return torch.where(bits < self.tiny, small * self.tiny, rounded)

    @property
    def tiny_inverse(self) -> float:
        """The inverse of the smallest scale: 2^118 or 2^1014."""
        return 2.0 ** ((self.infinity >> self.mantissa) // 2 - (self.tiny >> self.mantissa))

    def scales(self, bits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the scales with these bits, in the compute type, and whether each scale is finite. If a scale is not
        finite, it is returned as 0."""
        bits = bits.long()
        finite = bits < self.infinity
        # Scales that ranks share have not been rounded to the format, so they may be below the smallest scale.
        bits = torch.where((bits > 0) & (bits < self.tiny), self.tiny, bits)
        return self.floats(torch.where(finite, bits, 0)), finite

    def floats(self, bits: Tensor) -> Tensor:
        """Returns the numbers of the compute type with these bits."""
        return bits.to(self.integer).view(torch.float64 if self.integer == torch.int64 else torch.float32)

    def sent(self, bits: Tensor, flags: Tensor) -> Tensor:
        """Returns the codes on the wire for the bits of scales and the flags of blocks, int64."""
        return torch.where(bits < self.infinity, (((bits + 1) >> self.shift) << 1) | flags, -1)

    def received(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the bits of scales and the flags of blocks from codes on the wire."""
        bits = (codes >> 1) << self.shift
        bits = torch.where(bits == self.infinity, self.infinity - 1, bits)  # `sent` rounded it up to infinity
        return bits.clamp(max=self.infinity), (codes & 1) == 1


SCALE_FORMATS = {
    torch.float32: ScaleFormat(
        shift=16, infinity=0xFF << 23, tiny=9 << 23, nbytes=2, raw_bytes=4, mantissa=23, integer=torch.int32
    ),
    torch.float64: ScaleFormat(
        shift=32, infinity=0x7FF << 52, tiny=9 << 52, nbytes=4, raw_bytes=8, mantissa=52, integer=torch.int64
    ),
}

#: The compute dtype of each gradient dtype: coordinates are quantised, added and sent uncompressed in this dtype.
COMPUTE_DTYPES = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float64: torch.float64,
}
#: The gradient dtypes by name, e.g. ``"float32"``.
DTYPES_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in COMPUTE_DTYPES}


class Share(NamedTuple):
    """The factors of a mean over n messages. Every message is multiplied by ``each`` = 2^-c, and the sum is divided by
    ``rest`` = n/2^c.

    2^c is the smallest power of two that is at least n. So nothing overflows, and the mean of n equal numbers is exact.
    """

    each: float
    rest: float

    @classmethod
    def of(cls, ranks: int) -> Share:
        """Returns the factors for a mean over ``ranks`` messages."""
        # Powers of two scale exactly, so only the division by `rest` rounds.
        power = 1 << (ranks - 1).bit_length()
        return cls(1.0 / power, ranks / power)


#: The place p of the random number that rounds a scale. No coordinate has this place.
SCALE_PLACE = 2**31
#: The place p of the random number that orders the coordinates of a trellis code.
ORDER_PLACE = 2**31 + 1

#: The two 32-bit dither keys of one stream of one step.
Key = tuple[int, int]


class Origin(NamedTuple):
    """Numbers that are added to those of a block table, so that tensors with blocks of the same sizes can share one.

    Attributes:
        parameter: added to the numbers of parameters.
        block: added to the numbers of blocks in their parameters.
    """

    parameter: int = 0
    block: int = 0


#: The origin of tables that no other tensor shares.
NO_ORIGIN = Origin()


def magnitudes(values: Tensor) -> Tensor:
    """Returns magnitudes as integers in the same order. Infinity is above all finite numbers, and NaN is above
    infinity."""
    return values.abs().view(SCALE_FORMATS[values.dtype].integer)


def in_finite_range(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values, with finite values clamped to the largest finite number of ``dtype``, to which they will be
    rounded.

    An average of decoded numbers can be slightly larger than the largest encoded number, and could become infinite.
    """
    # The values are not rounded in this case, so they cannot exceed the largest number.
    if dtype == values.dtype:
        return values
    limit = torch.finfo(dtype).max
    return torch.where(values.isfinite(), values.clamp(-limit, limit), values)


def is_in_range(values: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether no finite value becomes infinite in another dtype."""
    return values.dtype == dtype or bool((values.to(dtype).isfinite() | ~values.isfinite()).all())


def scale_format(dtype: torch.dtype) -> ScaleFormat:
    """Returns the scale format for gradients of ``dtype``."""
    return SCALE_FORMATS[COMPUTE_DTYPES[dtype]]


def float_type(dtype: torch.dtype) -> type[np.floating]:
    """Returns the NumPy type of the compute dtype of a gradient dtype."""
    return np.float64 if COMPUTE_DTYPES[dtype] == torch.float64 else np.float32


def integer_type(dtype: torch.dtype) -> type[np.signedinteger]:
    """Returns the signed NumPy integer as wide as the compute dtype of a gradient dtype."""
    return np.int64 if COMPUTE_DTYPES[dtype] == torch.float64 else np.int32
