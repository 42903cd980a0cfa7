"""Levels that lie denser near zero, with subtractive dither: companding, without a bias.

A block with scale M has K = 2^bits codes, with the middle m = (K-1)/2. A curve g turns coordinates into numbers y from
-m to m, on which subtractive dither rounds as `codecs.linear` does. The receiver applies a decoder d to what it gets:

    g(y) = (s y + y |y|/m)/(1 + s),           x = (M/m) g(y)
    code = rint(y + u + m),                   u uniform on [-1/2, 1/2)
    z    = code - m - u
    d(z) = (s z + |r| (2z - r)/m)/(1 + s),    r = floor(z + 1/2),    decoded (M/m) d(z)

z is y + e, and e is uniform on [-1/2, 1/2) whatever y is. So the decoded number is unbiased if the mean of d over
[y - 1/2, y + 1/2] is g(y). That is so for this d: d is continuous, and straight between the numbers k + 1/2, where
d(z) = (s z + (z |z| - sign(z)/4)/m)/(1 + s). Its box mean therefore has the derivative d(y + 1/2) - d(y - 1/2) =
(s + 2|y|/m)/(1 + s), which is the derivative of g, and both are zero at zero. `docs/theory.md` has the general rule.

g has an inverse with one square root: y = sign(x) (sqrt(q² + (s+1) m |x| m/M) - q) with q = s m/2.

The distance of two levels is Δ (s + 2|y|/m)/(1 + s), Δ = M/m: smaller than that of linear codes near zero, and larger
near M. The mean square error is about linear in the coordinate's magnitude, see `variance.variance_companded`. The
slope s is one number for all blocks: `SLOPE`.

In adaptive dither, a block that is nearly all zeros is rounded stochastically to equidistant levels, as in
`codecs.linear`: zeros stay zeros there. The choice depends on the gradient alone, so it introduces no bias.

Dither in the companded domain is the idea of E. Akyol and K. Rose ("Nonuniform Dithered Quantization", DCC 2009; "On
Constrained Randomized Quantization", IEEE T-SP 2013). They choose both curves for the least error on a source whose
density is known. Here the decoder is unbiased at every single coordinate, and no density is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs.base import Codec, check_code_bits
from lightning_gqsgd.codecs.linear.codec import are_stochastic, coordinates, levels_per_unit
from lightning_gqsgd.codecs.variance import (
    mean_variance_companded,
    omega_companded,
    omega_linear,
    variance_companded,
)
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.packing import code_bytes
from lightning_gqsgd.kernels.protocol import Kind

#: Slope s of the decoder at zero, before it is divided by 1 + s. A smaller slope suits heavier tails, and a larger one
#: suits coordinates of one size. With this one, gradients of networks have at 3 and 4 bits an error within 3 % of that
#: of the best curve that was tried: see `benchmarks/results/companded.md`.
SLOPE = 0.75

#: Dithers that the codec has.
DITHERS = ("adaptive", "subtractive")

#: Mean magnitude over the scale of the coordinates that are not zero, in a block of mostly zeros.
_SPARSE_MAGNITUDE = 1 / 3


@cache  # every choice of a reducer asks for it several times, and it takes milliseconds
def _gaussian_variance(levels: int) -> float:
    """Returns the mean square error on dense Gaussian gradients in blocks of 256, in units of the squared scale.

    Magnitudes of a block over its scale are 256 equally likely ones, of which the last is 1.
    """
    quantiles = [NormalDist().inv_cdf(0.5 + (k + 0.5) / 512) for k in range(256)]
    return fmean(variance_companded(quantile / quantiles[-1], levels, SLOPE) for quantile in quantiles)


@dataclass(frozen=True)
class Curve:
    """The numbers of the curves g and d for K levels.

    Attributes:
        middle: m = (K-1)/2.
        slope: s m: d(z) = (slope z + |r| (2z - r)) shrink.
        shrink: 1/((1+s) m).
        stretch: (1+s) m: y = sqrt(root_squared + stretch |x| m/M) - root.
        root: s m/2.
        root_squared: the square of ``root``.
    """

    middle: float
    slope: float
    shrink: float
    stretch: float
    root: float
    root_squared: float

    @classmethod
    def of(cls, levels: int) -> Curve:
        """Returns the numbers for K = ``levels`` levels."""
        middle = (levels - 1) / 2
        slope = SLOPE * middle
        stretch = (1 + SLOPE) * middle
        return cls(middle, slope, 1 / stretch, stretch, slope / 2, slope * slope / 4)


@dataclass(frozen=True)
class CompandedQuantiser:
    """A companded codec at one block size, as kernels see it; see `kernels.protocol.Quantiser`.

    Attributes:
        bits: bits of one code on the wire.
        levels: number of codes K of companded blocks.
        odd_levels: number of levels of blocks that are rounded stochastically.
        stochastic_from: a block is rounded stochastically if more than this share of its coordinates is zero; 1: none
            is.
        block_size: the largest number of coordinates in a block.
    """

    bits: int
    levels: int
    odd_levels: int
    stochastic_from: float
    block_size: int

    kind: ClassVar[Kind] = Kind("companded", __package__)
    is_whole: ClassVar[bool] = False
    has_scale: ClassVar[bool] = True
    summable: ClassVar[bool] = False

    @property
    def curve(self) -> Curve:
        """The numbers of the curves."""
        return Curve.of(self.levels)

    def record_bytes(self, length: np.ndarray, raw_bytes: int) -> np.ndarray:
        """Returns the number of bytes of each block's record; see `kernels.protocol.Quantiser.record_bytes`."""
        return code_bytes(length, self.bits)

    def encode(self, values: Tensor, lengths: Tensor, scales: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the codes of blocks, and a flag of each block; see `kernels.protocol.ScaledQuantiser.encode`. A
        block's flag says that it is rounded stochastically."""
        stochastic = are_stochastic(values, lengths, self.stochastic_from)
        levels = torch.where(stochastic, self.odd_levels, self.levels)
        middle = ((levels - 1) / 2).to(scales.dtype)
        zero = levels // 2
        y = values * levels_per_unit(scales, middle)[:, None]
        # The clamp cuts off what is beyond the last level, by the rounding of y or because the scale is clipped.
        y = torch.where(stochastic[:, None], y, self._compressed(y)).clamp(-middle[:, None], middle[:, None])
        shifted = y + (uniform.to(y.dtype) - (zero - middle)[:, None])
        # A block that is not finite has NaN here, which cannot become an integer; its codes are not used.
        return shifted.nan_to_num().floor().long() + zero[:, None], stochastic

    def decode(self, codes: Tensor, scales: Tensor, flags: Tensor, uniform: Tensor) -> Tensor:
        """Returns the coordinates that codes stand for; see `kernels.protocol.ScaledQuantiser.decode`."""
        middle = (torch.where(flags, self.odd_levels, self.levels) - 1) / 2
        offset = middle[:, None] + torch.where(flags[:, None], 0, uniform - 0.5)
        z = (codes.float() - offset).to(scales.dtype)
        return coordinates(torch.where(flags[:, None], z, self._expanded(z)), middle, scales, flags)

    def _compressed(self, x: Tensor) -> Tensor:
        """Returns the inverse of g; ``x``: coordinates in units of M/m."""
        curve = self.curve
        root_squared = x.new_tensor(curve.root_squared)
        stretch = x.new_tensor(curve.stretch)
        y = (x.abs() * stretch + root_squared).sqrt() - x.new_tensor(curve.root)
        return torch.copysign(y, x)

    def _expanded(self, z: Tensor) -> Tensor:
        """Returns the decoder d: coordinates in units of M/m."""
        curve = self.curve
        r = (z + 0.5).floor()
        return (z * z.new_tensor(curve.slope) + r.abs() * (z + (z - r))) * z.new_tensor(curve.shrink)


@dataclass(frozen=True)
class CompandedCodec(Codec):
    """Companded subtractive dither at a number of bits per coordinate.

    Attributes:
        bits: bits of a code on the wire, 2 to 8.
        dither: ``"adaptive"`` or ``"subtractive"``.
    """

    bits: int
    dither: str = "adaptive"

    name: ClassVar[str] = "companded"
    fields: ClassVar[frozenset[str]] = frozenset({"dither"})
    default_block_size: ClassVar[int] = 128

    @classmethod
    def of(cls, bits: int, *, dither: str = "adaptive") -> CompandedCodec:
        """Returns the codec with so many bits.

        Args:
            bits: bits of a code, 2 to 8.
            dither: one of `DITHERS`.

        Raises:
            ConfigError: the codec cannot have such a number or dither.
        """
        check_code_bits("companded", bits, cls.widths)
        if bits < 2:
            raise ConfigError(
                "codec='companded' needs two levels on each side of zero for its curve; take bits=2 to 8, not 1, or "
                "codec='linear'"
            )
        if dither not in DITHERS:
            raise ConfigError(
                f"dither={dither!r} is not for codec='companded', whose dither is always taken off again; take "
                "dither='adaptive' or 'subtractive', or codec='linear'"
            )
        return cls(bits, dither)

    def describe(self) -> tuple[str, list[str]]:
        """Returns the bits per coordinate as text, and words that say what they are."""
        return f"{self.bits}", ["companded", f"{self.dither} dither"]

    def quantiser(self, block_size: int, summed: int | None = None) -> CompandedQuantiser:
        """Returns the quantiser: the codec at one block size, as kernels see it.

        Args:
            block_size: the largest number of coordinates in a block.
            summed: number of ranks whose codes are added; only None works.

        Raises:
            ConfigError: codes would have to be added, which means nothing for levels that are not equidistant.
        """
        if summed is not None:
            raise ConfigError(
                f"codes of codec='companded' cannot be added over {summed} ranks, because its levels are not "
                "equidistant; take reducer='two_shot', 'gather' or 'hierarchical', or codec='linear'"
            )
        share = self._stochastic_from if self.dither == "adaptive" else 1.0
        return CompandedQuantiser(self.bits, self._levels, self._levels - 1, share, block_size)

    def error_variance(self, summed: int = 1) -> float:
        """Returns the mean square error of one rank's coordinate, in units of the squared scale, on dense Gaussian
        gradients in blocks of 256; `variance.variance_companded` has that of a single coordinate."""
        return _gaussian_variance(self._levels)

    def omega(self, dimension: int, summed: int = 1) -> float:
        """Returns ω with E|Q(x) - x|² <= ω |x|² for ``dimension`` coordinates that share a scale.

        That is `variance.omega_companded`, or, where that is more, ω of the stochastic rounding of the coordinates that
        are not zero in a block of mostly zeros.
        """
        companded = omega_companded(dimension, self._levels, SLOPE)
        if self.dither == "subtractive":
            return companded
        others = max(1, int((1 - self._stochastic_from) * dimension))
        return max(companded, omega_linear(others, self._levels // 2 - 1))

    @property
    def _levels(self) -> int:
        """Number of codes K."""
        return 2**self.bits

    @property
    def _stochastic_from(self) -> float:
        """Share c of zeros from which stochastic rounding to K-1 levels has the smaller error.

        Its error is (1-c) Δ'²/6, Δ' = 2M/(K-2), if coordinates that are not zero lie anywhere between two levels. That
        of companded codes is c v(0) + (1-c) v(1/3), with v of `variance.mean_variance_companded`: a third of the scale
        is the mean magnitude of the few that are not zero.
        """
        zero, other = (mean_variance_companded(mean, self._levels, SLOPE) for mean in (0.0, _SPARSE_MAGNITUDE))
        gain = (2 / (self._levels - 2)) ** 2 / 6 - other
        return gain / (gain + zero)
