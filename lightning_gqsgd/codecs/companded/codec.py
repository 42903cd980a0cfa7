"""The companded codec: levels that are denser near zero, with subtractive dither and without bias.

A block with scale M has K = 2^bits codes, with the middle m = (K-1)/2. The inverse of a curve g maps coordinates to
numbers y from -m to m. Subtractive dither rounds these numbers as in `codecs.linear`. The receiver takes the dither off
and applies a decoder d:

    g(y) = (s y + y |y|/m)/(1 + s),           x = (M/m) g(y)
    code = rint(y + u + m),                   u uniform on [-1/2, 1/2)
    z    = code - m - u
    d(z) = (s z + |r| (2z - r)/m)/(1 + s),    r = floor(z + 1/2),    decoded (M/m) d(z)

z is y + e, and e is uniform on [-1/2, 1/2) for every y. So the decoded number is unbiased if the mean of d over
[y - 1/2, y + 1/2] is g(y). This d fulfils the condition: d is continuous, and is straight between the numbers k + 1/2.
At these numbers, d(z) = (s z + (z |z| - sign(z)/4)/m)/(1 + s). The mean of d over the box therefore has the derivative
d(y + 1/2) - d(y - 1/2) = (s + 2|y|/m)/(1 + s). This is the derivative of g, and both functions are zero at zero.
`docs/theory.md` has the general rule.

The inverse of g takes one square root: y = sign(x) (sqrt(q² + (s+1) m |x| m/M) - q) with q = s m/2.

The distance of two levels is Δ (s + 2|y|/m)/(1 + s), Δ = M/m. It is smaller than the distance Δ of linear codes near
zero, and larger near M. The mean square error is about linear in the coordinate's magnitude, see
`variance.variance_companded`. The slope s is the same number for all blocks: `SLOPE`.

With adaptive dither, a block that is nearly all zeros is rounded stochastically to equidistant levels, as in
`codecs.linear`, so its zeros stay zeros. The choice depends on the gradient alone, so it introduces no bias.

Dither in the companded domain is the idea of E. Akyol and K. Rose ("Nonuniform Dithered Quantization", DCC 2009; "On
Constrained Randomized Quantization", IEEE T-SP 2013). They choose both curves for the smallest error on a source with a
known density. Here the decoder is unbiased at every single coordinate, and no density is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs.base import Codec
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
#: suits coordinates of similar magnitudes. With this slope, the error of networks' gradients at 3 and 4 bits is within
#: 3 % of the error of the best curve that was tried: see `benchmarks/results/companded.md`.
SLOPE = 0.75

#: The values of ``dither`` that the codec accepts.
DITHERS = ("adaptive", "subtractive")

#: Mean magnitude, in units of the scale, of the non-zero coordinates in a block of mostly zeros.
_SPARSE_MAGNITUDE = 1 / 3


@cache  # every choice of a reducer calls it several times, and each call would take milliseconds
def _gaussian_variance(levels: int) -> float:
    """Returns the mean square error on dense Gaussian gradients in blocks of 256, in units of the squared scale.

    The magnitudes of the block are 256 equally likely quantiles, and its scale is the largest of them.
    """
    quantiles = [NormalDist().inv_cdf(0.5 + (k + 0.5) / 512) for k in range(256)]
    return fmean(variance_companded(quantile / quantiles[-1], levels, SLOPE) for quantile in quantiles)


@dataclass(frozen=True)
class Curve:
    """Constants of the curves g and d for K levels.

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
        """Returns the constants for K = ``levels`` levels."""
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
        stochastic_from: a block is rounded stochastically if more than this share of its coordinates is zero; 1: no
            block is.
        block_size: the largest number of coordinates in a block.
    """

    bits: int
    levels: int
    odd_levels: int
    stochastic_from: float
    block_size: int

    kind: ClassVar[Kind] = Kind("companded", __package__)
    is_whole: ClassVar[bool] = False
    summable: ClassVar[bool] = False

    @property
    def curve(self) -> Curve:
        """The constants of the curves g and d."""
        return Curve.of(self.levels)

    def record_bytes(self, length: np.ndarray, raw_bytes: int) -> np.ndarray:
        """Returns the number of bytes of each block's record; see `kernels.protocol.Quantiser.record_bytes`."""
        return code_bytes(length, self.bits)

    def encode(self, values: Tensor, lengths: Tensor, scales: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the codes and the flag of each block; see `kernels.protocol.ScaledQuantiser.encode`. The flag is set
        if the block is rounded stochastically."""
        stochastic = are_stochastic(values, lengths, self.stochastic_from)
        levels = torch.where(stochastic, self.odd_levels, self.levels)
        middle = ((levels - 1) / 2).to(scales.dtype)
        zero = levels // 2
        y = values * levels_per_unit(scales, middle)[:, None]
        # A number can be beyond the last level because y is rounded, or because the scale is clipped.
        y = torch.where(stochastic[:, None], y, self._compressed(y)).clamp(-middle[:, None], middle[:, None])
        shifted = y + (uniform.to(y.dtype) - (zero - middle)[:, None])
        # A block that is not finite has NaN here, which cannot be converted to an integer. Its codes are not used.
        return shifted.nan_to_num().floor().long() + zero[:, None], stochastic

    def decode(self, codes: Tensor, scales: Tensor, flags: Tensor, uniform: Tensor) -> Tensor:
        """Returns the coordinates of codes; see `kernels.protocol.ScaledQuantiser.decode`."""
        middle = (torch.where(flags, self.odd_levels, self.levels) - 1) / 2
        offset = middle[:, None] + torch.where(flags[:, None], 0, uniform - 0.5)
        z = (codes.float() - offset).to(scales.dtype)
        return coordinates(torch.where(flags[:, None], z, self._expanded(z)), middle, scales, flags)

    def _compressed(self, x: Tensor) -> Tensor:
        """Returns the inverse of g at ``x``, which are coordinates in units of M/m."""
        curve = self.curve
        root_squared = x.new_tensor(curve.root_squared)
        stretch = x.new_tensor(curve.stretch)
        y = (x.abs() * stretch + root_squared).sqrt() - x.new_tensor(curve.root)
        return torch.copysign(y, x)

    def _expanded(self, z: Tensor) -> Tensor:
        """Returns the decoder d at ``z``: coordinates in units of M/m."""
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
        """Returns the codec with these attributes; see `Codec.of`."""
        if dither not in DITHERS:
            raise ConfigError(
                f"dither={dither!r} does not work with codec='companded', which always subtracts its dither after "
                "decoding; take dither='adaptive' or 'subtractive', or codec='linear'"
            )
        return cls(bits, dither)

    def describe(self) -> tuple[str, list[str]]:
        """Returns the bits per coordinate, and words that describe the codec; see `Codec.describe`."""
        return f"{self.bits}", ["companded", f"{self.dither} dither"]

    def quantiser(self, block_size: int, summed: int | None = None) -> CompandedQuantiser:
        """Returns the quantiser; see `Codec.quantiser`.

        Raises:
            ConfigError: if codes are to be added. A sum of codes has no meaning, because levels are not equidistant.
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
        gradients in blocks of 256. `variance.variance_companded` returns the error of a coordinate of known
        magnitude."""
        return _gaussian_variance(self._levels)

    def omega(self, dimension: int, summed: int = 1) -> float:
        """Returns ω; see `Codec.omega`.

        ω is the larger of `variance.omega_companded` and, for adaptive dither, the ω of stochastic rounding of the
        non-zero coordinates in a block of mostly zeros.
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

        The error of stochastic rounding is (1-c) Δ'²/6, Δ' = 2M/(K-2), if non-zero coordinates are uniform between two
        levels. The error of companded codes is c v(0) + (1-c) v(1/3), and v is `variance.mean_variance_companded`. The
        mean magnitude of the few non-zero coordinates is taken as a third of the scale.
        """
        zero, other = (mean_variance_companded(mean, self._levels, SLOPE) for mean in (0.0, _SPARSE_MAGNITUDE))
        gain = (2 / (self._levels - 2)) ** 2 / 6 - other
        return gain / (gain + zero)
