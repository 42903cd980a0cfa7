"""The top-k codec: each block keeps its largest coordinates, with their places, and all others become zero.

The codec is biased: |C(x) - x|² <= (1 - k/d) |x|², because the k largest of d squares have at least the share k/d of
the sum. k is a fixed share of a block's length, so that messages have the same length on every rank.

A block's record has the kept coordinates in the compute dtype, in the order of their places, and then the places, 16
bits each. With ``bits`` from 2 to 4, kept coordinates are also rounded; see `codecs.top_k.coarse`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs.base import Codec
from lightning_gqsgd.codecs.top_k.coarse import PLACE_BYTES, CoarseTopKQuantiser
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import CODES, LENGTH
from lightning_gqsgd.kernels.packing import bytes_of, positions
from lightning_gqsgd.kernels.protocol import Kind, Lengths
from lightning_gqsgd.kernels.wire import Key, magnitudes

#: The numbers of bits of kept coordinates that are rounded; see `codecs.top_k.coarse`.
FEW_BITS = (2, 3, 4)


@dataclass(frozen=True)
class TopKQuantiser:
    """A top-k codec at one block size, as kernels see it; see `kernels.protocol.Quantiser`.

    Attributes:
        block_size: the largest number of coordinates in a block.
        kept: number of coordinates that are kept out of 65536; 1 or more.
    """

    block_size: int
    kept: int

    kind: ClassVar[Kind] = Kind("top_k", __package__)
    is_whole: ClassVar[bool] = True
    has_scale: ClassVar[bool] = False
    summable: ClassVar[bool] = False
    bits: ClassVar[int] = 32

    def kept_of(self, length: Lengths) -> Lengths:
        """Returns the number of coordinates that a block of this length keeps, rounded up."""
        return (length * self.kept + 65535) >> 16

    def record_bytes(self, length: np.ndarray, raw_bytes: int) -> np.ndarray:
        """Returns the number of bytes of each block's record; see `kernels.protocol.Quantiser.record_bytes`."""
        return self.kept_of(length) * (raw_bytes + PLACE_BYTES)

    def write(self, values: Tensor, blocks: Tensor, wire: Tensor, key: Key) -> None:
        """Write the records of blocks; see `kernels.protocol.WholeQuantiser.write`. If magnitudes are equal, the first
        ones are kept."""
        inside = positions(blocks, values.shape[1])[1]
        # Padding sorts last. NaN sorts first, so that it is kept, and the receiver sees that the block is not finite.
        order = torch.where(inside, magnitudes(values).long(), -1).argsort(dim=1, descending=True, stable=True)
        for k, count in enumerate(self.kept_of(blocks[:, LENGTH]).tolist()):
            # Places are in ascending order, as in the records of the fast kernels.
            places = order[k, :count].sort().values
            at = int(blocks[k, CODES])
            kept = bytes_of(values[k, places]).flatten()
            wire[at : at + len(kept)] = kept
            wire[at + len(kept) : at + len(kept) + PLACE_BYTES * count] = bytes_of(places.to(torch.int16)).flatten()

    def read(self, wire: Tensor, blocks: Tensor, dtype: torch.dtype, key: Key, factor: float) -> Tensor:
        """Returns the coordinates of blocks, read from a message; see `kernels.protocol.WholeQuantiser.read`.

        A block is NaN everywhere if a kept coordinate is not finite, or if its place is not in the block.
        """
        values = torch.zeros(len(blocks), self.block_size, dtype=dtype, device=wire.device)
        for k, length in enumerate(blocks[:, LENGTH].tolist()):
            kept, places = self.record(wire, int(blocks[k, CODES]), length, dtype)
            # The places come from the network. Nothing must be written to a place beyond the block.
            if kept.isfinite().all() and (places < length).all():
                values[k, places] = kept * factor
            else:
                values[k] = torch.nan
        return values

    def record(self, wire: Tensor, at: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the kept coordinates of a block, [count], and their places, int64 [count], from the block's record. A
        place can be beyond the block.

        Args:
            wire: the message, uint8 [bytes].
            at: byte position of the record.
            length: number of coordinates of the block.
            dtype: the compute dtype.
        """
        count = self.kept_of(length)
        middle = at + count * dtype.itemsize
        places = wire[middle : middle + PLACE_BYTES * count].clone().view(torch.int16).long() & 0xFFFF
        return wire[at:middle].clone().view(dtype), places


@dataclass(frozen=True)
class TopKCodec(Codec):
    """Keeps the largest share ``density`` of the coordinates of every block. Their number is rounded up. ``density`` is
    rounded down to a multiple of 1/65536, but not to 0."""

    density: float
    bits: int = 32

    name: ClassVar[str] = "top_k"
    fields: ClassVar[frozenset[str]] = frozenset({"density"})
    default_bits: ClassVar[int] = 32
    has_scale: ClassVar[bool] = False
    takes_norm: ClassVar[bool] = False

    @classmethod
    def of(cls, bits: int, *, density: float = 0.01) -> TopKCodec:
        """Returns the codec that keeps a share of all coordinates.

        Args:
            bits: bits of a kept coordinate; 32: kept coordinates are not rounded.
            density: the share.

        Raises:
            ConfigError: if the codec cannot have this number of bits, or if ``density`` is 0.
        """
        if bits not in (32, *FEW_BITS):
            raise ConfigError(
                f"codec='top_k' sends whole what it keeps, which is bits=32, or at few bits, not bits={bits}; take one "
                f"of {', '.join(map(str, FEW_BITS))}, or leave bits out"
            )
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

    @property
    def biased_by(self) -> str:
        """The setting that makes the codec biased, if any; see `Codec.biased_by`."""
        return "codec='top_k'"

    def describe(self) -> tuple[str, list[str]]:
        """Returns the bits per coordinate as text, and a list of words that describe the codec."""
        what = f"top_k, {self.density:.3g} of all coordinates"
        if self.bits != 32:
            what += f" at {self.bits} bits"
        return f"{self.density * (self.bits + 8 * PLACE_BYTES):.3g}", [what]

    def quantiser(self, block_size: int, summed: int | None = None) -> TopKQuantiser | CoarseTopKQuantiser:
        """Returns the quantiser: the codec at one block size, as kernels see it."""
        kept = max(1, int(self.density * 65536))
        if self.bits == 32:
            return TopKQuantiser(block_size, kept)
        return CoarseTopKQuantiser(block_size, kept, self.bits)

    def error_variance(self, summed: int = 1) -> float:
        """Returns NaN: the error depends on the gradient alone, so it is not predicted."""
        return math.nan

    def omega(self, dimension: int, summed: int = 1) -> float:
        """Returns infinity, because the codec is biased."""
        return math.inf

    def delta(self, dimension: int) -> float:
        """Returns δ with |C(x) - x|² <= (1-δ) |x|²: k/d where the kept coordinates travel whole.

        At few bits only 1/d is certain: |C(x)|² is at least Σ n_c m_c² >= (Σ m)²/k >= Σ m²/k over the k kept magnitudes
        m, whose squares have at least the share k/d of |x|².
        """
        if self.bits != 32:
            return 1 / dimension
        return self.quantiser(dimension).kept_of(dimension) / dimension
