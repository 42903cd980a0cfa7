"""The top-k codec: each block keeps its largest coordinates, with their places, and all others become zero.

The codec is biased: |C(x) - x|² <= (1 - k/d) |x|², because the k largest of d squares have at least the share k/d of
the sum. k is a fixed share of a block's length, so that messages have the same length on every rank.

A block's record has the kept coordinates in the compute dtype, in the order of their places, and then the places, 16
bits each. With ``bits`` from 2 to 4, kept coordinates are also rounded; see `codecs.top_k.coarse`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lightning_gqsgd.codecs.base import BiasedCodec
from lightning_gqsgd.codecs.top_k.coarse import CoarseTopKQuantiser
from lightning_gqsgd.codecs.top_k.sparsifier import PLACE_BYTES, Sparsifier, numbers_of, rows_of_bytes
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.protocol import Kind, Lengths

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class TopKQuantiser(Sparsifier):
    """A top-k codec that does not round, at one block size, as kernels see it."""

    kind: ClassVar[Kind] = Kind("top_k", __package__)
    bits: ClassVar[int] = 32

    def sizes(self, count: Lengths, raw_bytes: int) -> tuple[Lengths, int]:
        """Returns the number of bytes of the kept coordinates, and 0; see `Sparsifier.sizes`."""
        return count * raw_bytes, 0

    def encode(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the bytes of the kept coordinates, and none; see `Sparsifier.encode`."""
        before = rows_of_bytes(kept)
        return before, before[:, :0]

    def decode(self, before: Tensor, behind: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Returns the kept coordinates; see `Sparsifier.decode`."""
        return numbers_of(before, dtype)


@dataclass(frozen=True)
class TopKCodec(BiasedCodec):
    """Keeps the largest share ``density`` of the coordinates of every block. Their number is rounded up. ``density`` is
    rounded down to a multiple of 1/65536, but not to 0."""

    density: float
    bits: int = 32

    name: ClassVar[str] = "top_k"
    fields: ClassVar[frozenset[str]] = frozenset({"density"})
    default_bits: ClassVar[int] = 32
    widths: ClassVar[Sequence[int]] = (2, 3, 4, 32)  # below 32, `codecs.top_k.coarse` rounds kept coordinates
    has_scale: ClassVar[bool] = False
    takes_norm: ClassVar[bool] = False

    @classmethod
    def of(cls, bits: int, *, density: float = 0.01) -> Self:
        """Returns the codec that keeps a share of all coordinates.

        Args:
            bits: bits of a kept coordinate; 32: kept coordinates are not rounded.
            density: the share.

        Raises:
            ConfigError: if ``density`` is 0.
        """
        if not density:
            raise ConfigError("density=0 keeps nothing; take e.g. density=0.01")
        return cls(density, bits)

    def check_blocks(self, block_size: int, *, rotation: bool) -> None:
        """Check that the codec works with a block size and without a rotation; see `Codec.check_blocks`. A rotated
        block has no large coordinates."""
        if rotation:
            raise ConfigError(
                "rotation=True leaves no large coordinates for codec='top_k' to keep; take rotation=False"
            )

    def describe(self) -> tuple[str, list[str]]:
        """Returns the bits per coordinate, and words that describe the codec; see `Codec.describe`."""
        what = f"top_k, {self.density:.3g} of all coordinates"
        if self.bits != 32:
            what += f" at {self.bits} bits"
        return f"{self.density * (self.bits + 8 * PLACE_BYTES):.3g}", [what]

    def quantiser(self, block_size: int, summed: int | None = None) -> TopKQuantiser | CoarseTopKQuantiser:
        """Returns the quantiser; see `Codec.quantiser`."""
        if self.bits == 32:
            return TopKQuantiser(block_size, self.kept)
        return CoarseTopKQuantiser(block_size, self.kept, self.bits)

    @property
    def kept(self) -> int:
        """Number of coordinates that are kept out of 65536; 1 or more."""
        return max(1, int(self.density * 65536))

    def delta(self, dimension: int) -> float:
        """Returns δ with |C(x) - x|² <= (1-δ) |x|²: k/d where the kept coordinates travel whole.

        At few bits only 1/d is certain: |C(x)|² is at least Σ n_c m_c² >= (Σ m)²/k >= Σ m²/k over the k kept magnitudes
        m, whose squares have at least the share k/d of |x|².
        """
        if self.bits != 32:
            return 1 / dimension
        return self.quantiser(dimension).kept_of(dimension) / dimension
