"""The base class of the quantisers that keep the largest coordinates of each block, and send their places."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_gqsgd.kernels.layout import CODES, LENGTH
from lightning_gqsgd.kernels.packing import bytes_of
from lightning_gqsgd.kernels.protocol import Lengths
from lightning_gqsgd.kernels.wire import Key, magnitudes

#: Bytes of a place in a block.
PLACE_BYTES = 2


@dataclass(frozen=True)
class Sparsifier(ABC):
    """Base class of the quantisers that keep the largest coordinates; see `kernels.protocol.WholeQuantiser`.

    A block's record has the places of the kept coordinates, in ascending order. A subclass defines the bytes before the
    places and behind them.

    Attributes:
        block_size: the largest number of coordinates in a block.
        kept: number of coordinates that are kept out of 65536; 1 or more.
    """

    block_size: int
    kept: int

    is_whole: ClassVar[bool] = True
    summable: ClassVar[bool] = False

    @abstractmethod
    def sizes(self, count: Lengths, raw_bytes: int) -> tuple[Lengths | int, Lengths | int]:
        """Returns how many bytes a record has before the places of ``count`` coordinates, and how many behind them;
        ``raw_bytes`` is the number of bytes of one uncompressed coordinate."""

    @abstractmethod
    def encode(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the bytes before the places and those behind them, uint8 [B, bytes] each. ``kept`` are the kept
        coordinates, [B, count]."""

    @abstractmethod
    def decode(self, before: Tensor, behind: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Returns the kept coordinates in the compute dtype ``dtype``, [B, count], from the results of `encode`. One of
        them is not finite if the block is to be NaN everywhere."""

    def kept_of(self, length: Lengths) -> Lengths:
        """Returns the number of coordinates that a block of this length keeps, rounded up."""
        return (length * self.kept + 65535) >> 16

    def record_bytes(self, length: Lengths, raw_bytes: int) -> Lengths:
        """Returns the number of bytes of each block's record; see `kernels.protocol.Quantiser.record_bytes`."""
        count = self.kept_of(length)
        before, behind = self.sizes(count, raw_bytes)
        return before + PLACE_BYTES * count + behind

    def write(self, values: Tensor, blocks: Tensor, wire: Tensor, key: Key) -> None:
        """Write the records of blocks; see `kernels.protocol.WholeQuantiser.write`."""
        for length, rows in _by_length(blocks):
            record = self.record(values[rows, :length])
            wire[blocks[rows, CODES, None] + torch.arange(record.shape[1], device=wire.device)] = record

    def read(self, wire: Tensor, blocks: Tensor, dtype: torch.dtype, key: Key, factor: float) -> Tensor:
        """Returns the coordinates of blocks, read from a message; see `kernels.protocol.WholeQuantiser.read`.

        A block is NaN everywhere if a number in its record is not finite, or if a place is not in the block.
        """
        values = torch.zeros(len(blocks), self.block_size, dtype=dtype, device=wire.device)
        for length, rows in _by_length(blocks):
            count = self.kept_of(length)
            before, behind = self.sizes(count, dtype.itemsize)
            sizes = [before, PLACE_BYTES * count, behind]
            columns = torch.arange(sum(sizes), device=wire.device)
            first, middle, last = wire[blocks[rows, CODES, None] + columns].split(sizes, dim=1)
            kept = self.decode(first, last, count, dtype)
            places = numbers_of(middle, torch.int16).long() & 0xFFFF
            # The places come from the network. Nothing must be written to a place beyond the block.
            good = (kept.isfinite() & (places < length)).all(dim=1, keepdim=True)
            part = self.placed(kept, places.where(good, 0), length, factor)
            values[rows, :length] = part.where(good, torch.nan)
        return values

    def record(self, values: Tensor) -> Tensor:
        """Returns the records of blocks of one length, uint8 [B, bytes]. ``values`` are their coordinates, [B, length].
        If magnitudes are equal, the first ones are kept."""
        places = largest(values, self.kept_of(values.shape[1]))
        before, behind = self.encode(values.gather(1, places))
        return torch.cat([before, rows_of_bytes(places.to(torch.int16)), behind], dim=1)

    def placed(self, kept: Tensor, places: Tensor, length: int, factor: float) -> Tensor:
        """Returns the coordinates of blocks of one length times ``factor``, [B, length]. ``kept`` are the kept
        coordinates and ``places`` their places, [B, count]."""
        zeros = torch.zeros(len(kept), length, dtype=kept.dtype, device=kept.device)
        return zeros.scatter_(1, places, kept * factor)


def largest(values: Tensor, count: int) -> Tensor:
    """Returns the places of the ``count`` largest coordinates of each row, ascending, int64 [B, count].

    If magnitudes are equal, the first ones are kept. The places that ``torch.topk`` returns would not do: of equal
    magnitudes, it keeps other ones on other devices and in other versions, so that messages would differ.
    """
    # Magnitudes are compared as integers. NaN is the largest one then, so a block with NaN decodes to NaN.
    sizes = magnitudes(values)
    least = sizes.topk(count, dim=1).values[:, -1:]
    above = sizes > least
    ties = sizes == least
    wanted = count - above.sum(dim=1, keepdim=True)
    return (above | (ties & (ties.cumsum(dim=1) <= wanted))).nonzero()[:, 1].view(-1, count)


def rows_of_bytes(values: Tensor) -> Tensor:
    """Returns the bytes of each row of numbers, uint8 [B, bytes]."""
    return bytes_of(values).reshape(len(values), -1)


def numbers_of(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers whose bytes are in ``rows``, [B, numbers]: the inverse of `rows_of_bytes`."""
    return rows.flatten().clone().view(dtype).view(len(rows), -1)


def _by_length(blocks: Tensor) -> list[tuple[int, Tensor]]:
    """Returns each length of blocks, with the row numbers of the blocks of this length."""
    lengths = blocks[:, LENGTH]
    return [(int(length), (lengths == length).nonzero().flatten()) for length in lengths.unique()]
