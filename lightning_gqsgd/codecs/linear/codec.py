"""The linear codec: uniform levels with dither.

A block with scale M (its largest magnitude, on one rank or on all ranks) is rounded to K levels. The levels are
symmetric about zero, and neighbours are Δ = 2M/(K-1) apart. A code is the number of a level, 0 to K-1, and stands for
(code - (K-1)/2) Δ. With y = x/Δ:

* stochastic: code = floor(y + v) + (K-1)/2, v uniform on [0, 1), K odd, so that zero is a level and stays zero.
* subtractive: code = rint(y + u + (K-1)/2), u uniform on [-1/2, 1/2). The receiver computes the same u, and decodes
  (code - (K-1)/2 - u) Δ. Zero need not be a level, so K may be even, and all values of a code are used.
* adaptive: subtractive, but stochastic in blocks with so many zeros that stochastic rounding has the smaller error.
* nearest: code = rint(y + (K-1)/2), decoded to its level. A zero lies half-way between two levels, and is rounded to
  either of them at random.

Stochastic and subtractive dither are unbiased. Adaptive dither chooses between them by the gradient alone, and not by
the dither, so it is unbiased, too. Nearest is biased: its error is at most Δ/2, and is the same every time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs.base import Codec
from lightning_gqsgd.codecs.variance import omega_linear, omega_subtractive
from lightning_gqsgd.errors import ConfigError, counted
from lightning_gqsgd.kernels.packing import code_bytes, summable_code_bytes
from lightning_gqsgd.kernels.protocol import Kind

DITHERS = ("adaptive", "subtractive", "stochastic", "nearest")


@dataclass(frozen=True)
class LinearQuantiser:
    """A linear codec at one block size, as kernels see it; see `kernels.protocol.Quantiser`.

    Attributes:
        bits: bits of one code on the wire.
        levels: number of levels K of each rank under subtractive dither; codes are 0 to K-1.
        odd_levels: number of levels of each rank under stochastic rounding.
        stochastic_from: a block is rounded stochastically if more than this share of its coordinates is zero. Below 0:
            every block is; 1: no block is.
        block_size: the largest number of coordinates in a block.
        summable: whether the codes of several ranks are added up on the wire.
        nearest: whether codes are the numbers of the nearest levels, without dither except for zeros.
    """

    bits: int
    levels: int
    odd_levels: int
    stochastic_from: float
    block_size: int
    summable: bool = False
    nearest: bool = False

    kind: ClassVar[Kind] = Kind("linear", __package__)
    is_whole: ClassVar[bool] = False

    @property
    def always_stochastic(self) -> bool:
        """True if every block is rounded stochastically."""
        return self.stochastic_from < 0

    def record_bytes(self, length: np.ndarray, raw_bytes: int) -> np.ndarray:
        """Returns the number of bytes of each block's record; see `kernels.protocol.Quantiser.record_bytes`."""
        return (summable_code_bytes if self.summable else code_bytes)(length, self.bits)

    def encode(self, values: Tensor, lengths: Tensor, scales: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the codes and the flag of each block; see `kernels.protocol.ScaledQuantiser.encode`. The flag is set
        if the block is rounded stochastically."""
        stochastic = are_stochastic(values, lengths, self.stochastic_from)
        levels = torch.where(stochastic, self.odd_levels, self.levels)
        middle = (levels - 1).to(scales.dtype) / 2
        zero = levels // 2
        y = (values * levels_per_unit(scales, middle)[:, None]).clamp(-middle[:, None], middle[:, None])
        if self.nearest:  # if all zeros were rounded to the same side, the errors of all ranks would add up
            uniform = torch.where(values == 0, uniform, 0.5)
        # Levels are counted from zero here, because most coordinates are near zero, and small sums round least.
        shifted = y + (uniform.to(y.dtype) - (zero - middle)[:, None])
        # A block that is not finite has NaN here, which cannot be converted to an integer. Its codes are not used.
        return shifted.nan_to_num().floor().long() + zero[:, None], stochastic

    def decode(self, codes: Tensor, scales: Tensor, flags: Tensor, uniform: Tensor) -> Tensor:
        """Returns the coordinates of codes; see `kernels.protocol.ScaledQuantiser.decode`."""
        middle = (torch.where(flags, self.odd_levels, self.levels) - 1).float() / 2
        dither = torch.zeros_like(uniform) if self.nearest else uniform - 0.5
        offset = middle[:, None] + torch.where(flags[:, None], 0, dither)
        return coordinates((codes.float() - offset).to(scales.dtype), middle, scales, flags)

    def decode_sum(self, codes: Tensor, scales: Tensor, uniforms: Sequence[Tensor]) -> Tensor:
        """Returns the mean from the sums of all ranks' codes; see `kernels.protocol.SummableQuantiser.decode_sum`. The
        subtractive dither of all ranks is taken off the sum."""
        middle = torch.full_like(scales, len(uniforms) * (self.levels - 1) / 2, dtype=torch.float32)
        offset = middle[:, None].repeat(1, codes.shape[1])
        for uniform in () if self.always_stochastic or self.nearest else uniforms:
            offset += uniform - 0.5
        stochastic = torch.full_like(scales, self.always_stochastic).bool()
        return coordinates((codes.float() - offset).to(scales.dtype), middle, scales, stochastic)


def are_stochastic(values: Tensor, lengths: Tensor, stochastic_from: float) -> Tensor:
    """Returns whether the share of zeros in each block is above ``stochastic_from``: bool [B].

    Args:
        values: coordinates in the compute dtype, [B, width].
        lengths: number of coordinates of each block, int64 [B].
        stochastic_from: a share. This function rounds it to the compute dtype.
    """
    inside = torch.arange(values.shape[1], device=values.device)[None] < lengths[:, None]
    zeros = ((values == 0) & inside).sum(dim=1)
    share = torch.tensor(stochastic_from, dtype=values.dtype, device=values.device)
    # The comparison is in fp64 for gradients of all dtypes, so that all kernels decide alike.
    return zeros > share.double() * lengths


def levels_per_unit(scales: Tensor, middle: Tensor) -> Tensor:
    """Returns 1/Δ of each block, [B], large enough that a coordinate at the scale reaches the last level.

    Args:
        scales: the blocks' scales, [B].
        middle: (K-1)/2 of each block, in the same dtype, [B].
    """
    # The quotient is rounded. If it is rounded down, the last level may never be reached.
    inverse = middle / scales
    return torch.where(scales * inverse < middle, inverse * _up(scales.dtype), inverse)


def coordinates(y: Tensor, middle: Tensor, scales: Tensor, stochastic: Tensor) -> Tensor:
    """Returns the coordinates for numbers of levels that are counted from zero: [B, width].

    Args:
        y: numbers of levels without dither, in the compute dtype, [B, width].
        middle: the code that stands for zero, [B].
        scales: the blocks' scales, [B].
        stochastic: whether each block was rounded stochastically, bool [B]. The coordinates of such a block are at most
            the scale.
    """
    middle = middle.to(scales.dtype)
    step = scales / middle
    # After stochastic rounding, the last level has to decode to the scale, exactly.
    step = torch.where(stochastic & (step * middle < scales), step * _up(scales.dtype), step)
    # Levels end at the scale. Subtractive dither may decode to half a step more, so it is only kept finite.
    limit = torch.where(stochastic, scales, torch.finfo(scales.dtype).max)[:, None]
    return (y * step[:, None]).clamp(-limit, limit)


def _up(dtype: torch.dtype) -> float:
    """Returns a factor just above 1: 1 + 2 ulp."""
    return 1 + 2 * float(torch.finfo(dtype).eps)


@dataclass(frozen=True)
class LinearCodec(Codec):
    """Linear dithering at a number of bits per coordinate.

    Attributes:
        bits: bits of a code on the wire. If codes are added, this is also the number of bits of the sum of all ranks'
            codes.
        dither: ``"adaptive"``, ``"subtractive"``, ``"stochastic"`` or ``"nearest"``.
        most: the largest number s of levels on each side of zero under stochastic rounding; None: as many as fit.
    """

    bits: int
    dither: str
    most: int | None = None

    name: ClassVar[str] = "linear"
    fields: ClassVar[frozenset[str]] = frozenset({"levels", "dither"})
    widths: ClassVar[Sequence[int]] = range(1, 9)
    adds_as_integers: ClassVar[bool] = True

    @classmethod
    def of(cls, bits: int, *, levels: int | None = None, dither: str = "adaptive") -> LinearCodec:
        """Returns the codec with these attributes; see `Codec.of`. ``levels`` becomes ``most``."""
        if bits == 1 and dither == "stochastic":
            raise ConfigError(
                "bits=1 cannot hold the three levels (-1, 0, 1) of stochastic rounding; take bits=2 or "
                "dither='subtractive'"
            )
        if levels is not None and dither != "stochastic":
            raise ConfigError(
                f"levels={levels} is for codec='exponential', or 'linear' with dither='stochastic'; leave it out"
            )
        check_levels(levels, bits)
        return cls(bits, dither, levels)

    @property
    def biased_by(self) -> str:
        """The setting that makes the codec biased, if any; see `Codec.biased_by`."""
        return "dither='nearest'" if self.dither == "nearest" else ""

    @property
    def has_odd_levels(self) -> bool:
        """True if all blocks have an odd number of levels, which Elias codes need."""
        return self.dither == "stochastic"

    def describe(self) -> tuple[str, list[str]]:
        """Returns the bits per coordinate, and words that describe the codec; see `Codec.describe`."""
        dither = f"{self.dither} dither" if self.dither != "nearest" else "nearest level"
        return f"{self.bits}", ["linear", dither]

    def levels(self, summed: int = 1, *, odd: bool | None = None) -> int:
        """Returns the largest number of levels K per rank for which the sum of ``summed`` codes fits ``bits`` bits:
        summed (K-1) < 2^bits.

        Args:
            summed: number of ranks whose codes are added before they are decoded.
            odd: whether K has to be odd, as for stochastic rounding. None: K is odd if the codec's dither is
                stochastic.

        Raises:
            ConfigError: if fewer than two levels (three, if K is odd) would be left.
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
                f"{counted(limit, 'rank')}, not {summed}; take more bits or reducer='two_shot'"
            )
        return levels

    def quantiser(self, block_size: int, summed: int | None = None) -> LinearQuantiser:
        """Returns the quantiser; see `Codec.quantiser`.

        If codes are added, all blocks have the same dither, because a decoder of sums does not learn each rank's
        choice. Adaptive dither is subtractive then.
        """
        summable = summed is not None
        if self.dither == "stochastic":
            odd = self.levels(summed or 1)
            return LinearQuantiser(self.bits, odd, odd, -1.0, block_size, summable)
        even = odd = self.levels(summed or 1)
        share = 1.0
        if self.dither == "adaptive" and not summable and self.bits > 1:
            odd = self.levels(odd=True)
            share = _break_even(even, odd)
        return LinearQuantiser(self.bits, even, odd, share, block_size, summable, self.dither == "nearest")

    def step(self, summed: int = 1) -> float:
        """Returns the distance Δ of two levels, in units of the block's scale."""
        return 2.0 / (self.levels(summed) - 1)

    def error_variance(self, summed: int = 1) -> float:
        """Returns the mean square error on dense gradients; see `Codec.error_variance`.

        Subtractive dither: Δ²/12 for every coordinate. Stochastic rounding: f(1-f) Δ², with f Δ the distance to the
        level below, which is on average Δ²/6 for uniform f.
        """
        return self.step(summed) ** 2 / (6 if self.dither == "stochastic" else 12)

    def omega(self, dimension: int, summed: int = 1) -> float:
        """Returns ω; see `Codec.omega`.

        For adaptive dither, ω is the larger one of subtractive dither and of stochastic rounding of the non-zero
        coordinates in a block of mostly zeros. On average over coordinates between two levels, stochastic rounding has
        the smaller error in such a block; if all of them lie halfway between two levels, it has the larger one.
        """
        if self.biased_by:
            return math.inf
        if self.dither != "stochastic":
            subtractive = omega_subtractive(dimension, self.levels(summed))
            if self.dither == "subtractive" or summed > 1 or self.bits == 1:
                return subtractive
            odd = self.levels(odd=True)
            others = max(1, int((1 - _break_even(self.levels(), odd)) * dimension))
            return max(subtractive, omega_linear(others, (odd - 1) // 2))
        return omega_linear(dimension, (self.levels(summed) - 1) // 2)

    def delta(self, dimension: int) -> float:
        """Returns δ with |C(x) - x|² <= (1-δ) |x|². C is Q/(1+ω), or rounding to the nearest level, whose errors are at
        most Δ/2."""
        if not self.biased_by:
            return super().delta(dimension)
        return max(0.0, 1 - dimension * self.step() ** 2 / 4)


def check_levels(levels: int | None, bits: int) -> None:
    """Raise ConfigError if there are more magnitudes than a code of ``bits`` bits can have. One bit is the sign."""
    limit = 2 ** (bits - 1) - 1
    if levels is not None and levels > limit:
        raise ConfigError(f"levels={levels} do not fit bits={bits}, which holds {limit}; take more bits")


def _break_even(levels: int, odd_levels: int) -> float:
    """Returns the share c of zeros above which stochastic rounding, with steps Δ', has the smaller error:
    (1-c) Δ'²/6 < Δ²/12."""
    return 1 - ((odd_levels - 1) / (levels - 1)) ** 2 / 2
