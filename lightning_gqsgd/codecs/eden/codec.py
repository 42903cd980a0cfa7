"""The EDEN codec: rotated coordinates at the best levels for Gaussian numbers, under a scale that removes the bias.

A block x of m coordinates is rotated by R = H D1 H D2. H is the orthonormal Hadamard matrix, and the diagonal matrices
D1 and D2 have random signs. The coordinates of z = R x are nearly Gaussian for every x, so they are rounded to the
Lloyd-Max levels of the normal distribution, in units of their root mean square σ = |z|/sqrt(m):

    q_j     = sign(z_j) L_k,   k the number of the level L_k nearest to |z_j|/σ
    S       = |z|²/<z, q>
    decoded = S D2 H D1 H q

The decoded block x̂ has <x̂, x> = S <q, z> = |x|² in every single message. If R were uniform among all rotations, the
other part of x̂ would be in every direction orthogonal to x equally often, so that E x̂ = x (arXiv 2108.08842, theorem
2.1; arXiv 2105.08339, theorem 2, for one bit). So the codec is unbiased **over rotations**: the signs are random, and
there is no dither. Every message has its own signs, from the hash of `kernels.wire` under the message's key. So errors
of ranks and steps are independent, and only scales and codes are sent.

R is not uniform. After one round, H D, blocks with few non-zero coordinates are far from Gaussian: with two non-zero
coordinates 3 and 1, the decoded mean of one of them is wrong by half at 2 bits. After a second round, the coordinates
of such a block are nearly Gaussian, but they lie on a lattice. If two coordinates x and y of m are not zero, rotated
coordinates are sums of multiples of 2(x+y)/m and 2(x-y)/m. The position of these numbers among the levels is the same
for all signs, so the mean of a coordinate could be wrong by up to 6 %. Therefore, a block with at most `FEW`
coordinates that are not small gets a dither of the lattice's width, 4 max|x|/m, before its levels are chosen. The scale
S is computed from the coordinates without this dither, so that <x̂, x> stays |x|². In blocks of 128 and more
coordinates, the mean of a coordinate is then right within a share of 1/m, unless another one is many times as large.
A coordinate of 1/64 of the largest one may be off by 3 %, which is less than 1/(4m) of the largest one
(`tests/statistics/test_eden.py`). If more than `FEW` coordinates are not small, their own sums fill the gaps of the
lattice. There is no dither then, because a dither increases the error. A block whose length is not a power of two from
128 on gets zeros at its end, up to the next such power, and all of its rotated coordinates are sent.

The error is |x̂ - x|² = S² |q|² - |x|², because <x̂, x> = |x|². See `variance.omega_eden`.

The scale is rounded up or down to the wire's format at random, so that its mean is right. Scales that are a largest
magnitude are always rounded up, which would be a bias of 2^-8 here.

Before these steps, a block is multiplied by a power of two, so that squares do not overflow or underflow. Sums are
added in a fixed order (`folded`), so that all kernels give the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs.base import Codec
from lightning_gqsgd.codecs.variance import LLOYD_MAX, gaussian_distortion
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.dither import uniform, words
from lightning_gqsgd.kernels.layout import LENGTH
from lightning_gqsgd.kernels.packing import code_bytes, pack, read_scales, unpack, write_scales
from lightning_gqsgd.kernels.protocol import Kind
from lightning_gqsgd.kernels.rotation import FEW, SHORTEST, padded, smallness, transformed
from lightning_gqsgd.kernels.wire import SCALE_FORMATS, SCALE_PLACE, Key, ScaleFormat, magnitudes

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class RotatingQuantiser(ABC):
    """A codec of rotated blocks at one block size, as kernels see it; see `kernels.protocol.Quantiser`.

    Attributes:
        bits: bits of one code on the wire.
        block_size: the largest number of coordinates in a block, a power of two.
    """

    bits: int
    block_size: int

    kind: ClassVar[Kind]
    is_whole: ClassVar[bool] = True
    summable: ClassVar[bool] = False

    @abstractmethod
    def rounded(self, rotated: Tensor, deviations: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the codes of rotated coordinates, int64 [B, width], and the levels of the codes, in units of the root
        mean square, [B, width].

        Args:
            rotated: rotated coordinates, [B, width].
            deviations: root mean square of each block, [B].
            lengths: number of rotated coordinates of each block, int64 [B].
        """

    @abstractmethod
    def levels(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the levels of codes, int64 [B, width], in the compute dtype ``dtype``."""

    def arranged(self, rotated: Tensor, whole: Tensor, key: Key) -> Tensor:
        """Returns rotated coordinates in the order of their codes on the wire, [B, width]. This class keeps the order.

        Args:
            rotated: rotated coordinates, [B, width].
            whole: block table, with the lengths of blocks including the zeros at their ends.
            key: the message's key.
        """
        return rotated

    def put_back(self, levels: Tensor, whole: Tensor, key: Key) -> Tensor:
        """Undo `arranged`: returns levels in the order of rotated coordinates, [B, width]. The arguments are like those
        of `arranged`."""
        return levels

    def record_bytes(self, length: np.ndarray, raw_bytes: int) -> np.ndarray:
        """Returns the number of bytes of each block's record; see `kernels.protocol.Quantiser.record_bytes`. A record
        has the codes of all rotated coordinates."""
        return code_bytes(padded(length, self.block_size), self.bits)

    def write(self, values: Tensor, blocks: Tensor, wire: Tensor, key: Key) -> None:
        """Write the records of blocks; see `kernels.protocol.WholeQuantiser.write`."""
        form = SCALE_FORMATS[values.dtype]
        whole = self._whole(blocks)
        largest = form.rounded_up(magnitudes(values).amax(dim=1).long())
        finite = largest < form.infinity
        down, up = powers_of_two(largest, form)
        values = torch.where(finite[:, None], values, 0) * down[:, None]
        width = dither_widths(values, torch.where(finite, form.floats(largest), 0) * down, whole)

        # There are two rounds of signs and Hadamard transforms, because after one round, blocks with few non-zero
        # coordinates are far from Gaussian.
        dither = uniform(whole, key, self.block_size)
        first, second = signs(dither, values.dtype)
        z = transformed(transformed(values * first, whole) * second, whole)
        squares = folded(z.square())
        z = self.arranged(z, whole, key)
        deviation = (squares / whole[:, LENGTH]).sqrt()
        moved = z + offsets(dither, z.dtype) * width[:, None]
        codes, levels = self.rounded(moved, deviation, whole[:, LENGTH])
        products = folded(z * levels)

        scales = torch.where(products > 0, squares / products, 0) * up
        # No coordinate has this place, so the rounding of the scale does not depend on the signs.
        random = words(whole, key, torch.full((1,), SCALE_PLACE, device=blocks.device))[:, 0]
        bits = form.rounded_at_random(scales, random)
        bits = torch.where(finite, bits, form.infinity)
        # Such blocks decode to NaN or to zeros with any codes. Zeros make messages equal on all devices.
        codes[~finite | (bits == 0)] = 0
        write_scales(form.sent(bits, torch.zeros_like(finite)), blocks, wire, form)
        pack(codes, whole, wire, self.bits, summable=False)

    def read(self, wire: Tensor, blocks: Tensor, dtype: torch.dtype, key: Key, factor: float) -> Tensor:
        """Returns the coordinates of blocks, read from a message; see `kernels.protocol.WholeQuantiser.read`. A block
        whose scale is not finite is NaN everywhere."""
        form = SCALE_FORMATS[dtype]
        whole = self._whole(blocks)
        bits, _ = form.received(read_scales(wire, blocks, form))
        scales, finite = form.scales(bits)
        codes = unpack(wire, whole, self.bits, self.block_size, summable=False)
        levels = self.levels(codes, dtype)
        # Codes beyond the end of a block are 0, but code 0 stands for a level that is not zero.
        levels[torch.arange(self.block_size, device=wire.device) >= whole[:, LENGTH, None]] = 0

        first, second = signs(uniform(whole, key, self.block_size), dtype)
        levels = self.put_back(levels, whole, key)
        rotated_back = transformed(transformed(levels, whole) * second, whole) * first
        limit = torch.finfo(dtype).max * factor  # the sum of all messages stays finite
        values = (rotated_back * (scales * factor)[:, None]).clamp(-limit, limit)
        values[~finite] = torch.nan
        return values

    def _whole(self, blocks: Tensor) -> Tensor:
        """Returns the block table with the lengths of blocks including the zeros at their ends."""
        whole = blocks.clone()
        whole[:, LENGTH] = padded(blocks[:, LENGTH], self.block_size)
        return whole


@dataclass(frozen=True)
class EdenQuantiser(RotatingQuantiser):
    """An EDEN codec at one block size.

    The lower bits of a code are the number of the magnitude. The highest bit is 1 for a negative number.
    """

    kind: ClassVar[Kind] = Kind("eden", __package__, is_padded=True)

    @property
    def magnitudes(self) -> tuple[float, ...]:
        """Magnitudes of the levels, ascending, in units of the root mean square."""
        return LLOYD_MAX[self.bits]

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The smallest number that is rounded to each magnitude: half the sum of two neighbours, and 0."""
        inner = ((below + above) / 2 for below, above in zip(self.magnitudes[:-1], self.magnitudes[1:], strict=True))
        return (0.0, *inner)

    def rounded(self, rotated: Tensor, deviations: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Returns codes and the nearest levels; see `RotatingQuantiser.rounded`."""
        numbers = torch.zeros_like(rotated, dtype=torch.int64)
        for threshold in self.thresholds[1:]:
            numbers += rotated.abs() >= rotated.new_tensor(threshold) * deviations[:, None]
        levels = rotated.new_tensor(self.magnitudes)[numbers]
        codes = numbers | (rotated < 0).long() << (self.bits - 1)
        return codes, torch.where(rotated < 0, -levels, levels)

    def levels(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the levels of codes; see `RotatingQuantiser.levels`."""
        size = torch.tensor(self.magnitudes, dtype=dtype, device=codes.device)
        return torch.cat([size, -size])[codes]


def signs(dither: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the diagonals of D2, which is applied first, and of D1: 1 or -1, [B, width].

    The two signs of a coordinate are the two highest bits of its 16-bit dither (`kernels.dither`). 0 stands for -1.
    """
    first = torch.where(dither < 0.5, -1, 1)
    second = torch.where(dither % 0.5 < 0.25, -1, 1)
    return first.to(dtype), second.to(dtype)


def offsets(dither: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a dither for each rotated coordinate, uniform on (-1/2, 1/2), [B, width].

    It is computed from the 14 bits of the 16-bit dither that `signs` does not use.
    """
    return (dither % 0.25 * 4 - 0.5).to(dtype)


def dither_widths(values: Tensor, largest: Tensor, whole: Tensor) -> Tensor:
    """Returns the width of each block's dither, [B]; 0 for blocks with more than `FEW` coordinates that are not small.

    Args:
        values: coordinates of blocks, [B, width].
        largest: largest magnitude of each block, rounded up, [B].
        whole: block table, with the lengths of blocks including the zeros at their ends.
    """
    lengths = whole[:, LENGTH]
    exponents = torch.frexp(lengths.double()).exponent - 1  # lengths are powers of two
    limit = torch.ldexp(largest, -smallness(exponents)).to(largest.dtype)  # `ldexp` promotes to torch's default dtype
    is_sparse = (values.abs() >= limit[:, None]).sum(dim=1) <= FEW
    return torch.where(is_sparse, largest * (4 / lengths.to(largest.dtype)), 0)


def powers_of_two(largest: Tensor, form: ScaleFormat) -> tuple[Tensor, Tensor]:
    """Returns two tensors [B]: a power of two for each block that brings its largest magnitude near 1, and its inverse.

    The exponents are limited, so that no power of very small blocks is infinite, and no power of very large blocks is
    denormal.

    Args:
        largest: bits of the largest magnitudes, rounded up to the wire's format, int64 [B].
        form: the number format.
    """
    infinity = form.infinity >> form.mantissa
    exponent = (largest >> form.mantissa).clamp(form.tiny >> form.mantissa, infinity - 2)
    return form.floats((infinity - 1 - exponent) << form.mantissa), form.floats(exponent << form.mantissa)


def folded(terms: Tensor) -> Tensor:
    """Returns the sum of each row, [B]. The second half of a row is added to its first half until one number is left.

    Args:
        terms: [B, width]; the width is a power of two.
    """
    while terms.shape[1] > 1:
        first, second = terms.chunk(2, dim=1)
        terms = first + second
    return terms[:, 0]


@dataclass(frozen=True)
class EdenCodec(Codec):
    """EDEN at a number of bits per coordinate; at 1 bit, it is DRIVE.

    Attributes:
        bits: bits of a code on the wire, 1 to 4.
    """

    bits: int

    name: ClassVar[str] = "eden"
    default_bits: ClassVar[int] = 2
    widths: ClassVar[Sequence[int]] = range(1, max(LLOYD_MAX) + 1)
    takes_norm: ClassVar[bool] = False
    quantiser_finds_scale: ClassVar[bool] = True
    unbiased_over: ClassVar[str] = "rotations"

    @classmethod
    def of(cls, bits: int) -> Self:
        """Returns the codec with ``bits`` bits, 1 to 4; see `Codec.of`."""
        return cls(bits)

    def check_blocks(self, block_size: int, *, rotation: bool) -> None:
        """Check that the codec works with a block size and without ``rotation``; see `Codec.check_blocks`. The codec
        rotates whole blocks itself, so a second rotation is refused."""
        if rotation:
            raise ConfigError(f"codec={self.name!r} rotates every block itself; take rotation=False")
        if block_size < SHORTEST or block_size & (block_size - 1):
            raise ConfigError(
                f"codec={self.name!r} rotates whole blocks, and needs a block_size that is a power of two of at least "
                f"{SHORTEST}, not {block_size}; take e.g. block_size={self.default_block_size}"
            )

    def quantiser(self, block_size: int, summed: int | None = None) -> RotatingQuantiser:
        """Returns the quantiser; see `Codec.quantiser`.

        Raises:
            ConfigError: if codes are to be added. A sum of codes has no meaning, because every rank has another
                rotation.
        """
        if summed is not None:
            raise ConfigError(
                f"codes of codec={self.name!r} cannot be added over {summed} ranks, because every rank rotates its "
                "blocks by signs of its own; take reducer='two_shot', 'gather' or 'hierarchical', or codec='linear'"
            )
        return EdenQuantiser(self.bits, block_size)

    def distortion(self, dimension: int) -> float:
        """Returns the mean square error D of normal numbers that are rounded to the levels, in blocks of ``dimension``
        coordinates: `variance.gaussian_distortion`."""
        return gaussian_distortion(self.bits)

    def error_variance(self, summed: int = 1) -> float:
        """Returns the mean square error; see `Codec.error_variance`.

        The error is D/(1-D) σ² with the distortion D (`distortion`). The mean of z_j q_j is (1-D) σ, so the scale is
        about σ²/((1-D) σ) = σ/(1-D). The quotient is D (1-D).
        """
        distortion = self.distortion(self.default_block_size)
        return distortion * (1 - distortion)

    def omega(self, dimension: int, summed: int = 1) -> float:
        """Returns ω, see `Codec.omega`, averaged over rotations, for long blocks: D/(1-D), see `variance.omega_eden`.

        If a block of m coordinates gets a dither, the dither adds at most 4/3 max|x|²/(m |x|²).
        """
        distortion = self.distortion(dimension)
        return distortion / (1 - distortion)
