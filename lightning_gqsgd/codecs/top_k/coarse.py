"""Top-k at few bits: the places of each block's largest coordinates, with a sign and one of 2^(b-1) magnitudes each.

The range of the kept magnitudes is cut into 2^(b-1) cells of equal width. Each magnitude becomes the mean of its cell,
which is sent with the block. Let cell c have n_c magnitudes and the mean m_c. Then |C(x)|² = Σ n_c m_c², and the error
is orthogonal to the decoded block: |x - C(x)|² = |x|² - |C(x)|². SparseLoCo also sends 2 bits (arXiv 2508.15706); the
cells are our own choice.

A block's record has the means of the cells in the compute dtype, then the places in ascending order, 16 bits each, and
then b bits for each kept coordinate, with the sign first. The last byte is padded with zeros.

There are no fast kernels, because this code is made for averages of local steps, which are rare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.kernels.layout import CODES, LENGTH
from lightning_gqsgd.kernels.packing import bytes_of
from lightning_gqsgd.kernels.protocol import Kind, Lengths
from lightning_gqsgd.kernels.wire import Key, magnitudes

#: Bytes of a place in a block.
PLACE_BYTES = 2


@dataclass(frozen=True)
class CoarseTopKQuantiser:
    """A top-k codec of few bits at one block size, as kernels see it; see `kernels.protocol.Quantiser`.

    Attributes:
        block_size: the largest number of coordinates in a block.
        kept: number of coordinates that are kept out of 65536; 1 or more.
        bits: bits of a kept coordinate, 2 to 4.
    """

    block_size: int
    kept: int
    bits: int

    kind: ClassVar[Kind] = Kind("coarse_top_k")
    is_whole: ClassVar[bool] = True
    has_scale: ClassVar[bool] = False
    summable: ClassVar[bool] = False

    @property
    def cells(self) -> int:
        """Number of cells, which is the number of different magnitudes."""
        return 1 << (self.bits - 1)

    def kept_of(self, length: Lengths) -> Lengths:
        """Returns the number of coordinates that a block of this length keeps, rounded up."""
        return (length * self.kept + 65535) >> 16

    def record_bytes(self, length: np.ndarray, raw_bytes: int) -> np.ndarray:
        """Returns the number of bytes of each block's record; see `kernels.protocol.Quantiser.record_bytes`."""
        count = self.kept_of(length)
        return self.cells * raw_bytes + PLACE_BYTES * count + (count * self.bits + 7) // 8

    def write(self, values: Tensor, blocks: Tensor, wire: Tensor, key: Key) -> None:
        """Write the records of blocks; see `kernels.protocol.WholeQuantiser.write`."""
        for length, rows in _by_length(blocks):
            record = self._record(values[rows, :length])
            wire[blocks[rows, CODES, None] + torch.arange(record.shape[1], device=wire.device)] = record

    def read(self, wire: Tensor, blocks: Tensor, dtype: torch.dtype, key: Key, factor: float) -> Tensor:
        """Returns the coordinates of blocks, read from a message; see `kernels.protocol.WholeQuantiser.read`.

        A block is NaN everywhere if a cell's mean is not finite, or if a place is not in the block.
        """
        values = torch.zeros(len(blocks), self.block_size, dtype=dtype, device=wire.device)
        for length, rows in _by_length(blocks):
            count = self.kept_of(length)
            sizes = [self.cells * dtype.itemsize, PLACE_BYTES * count, (count * self.bits + 7) // 8]
            columns = torch.arange(sum(sizes), device=wire.device)
            means, places, codes = wire[blocks[rows, CODES, None] + columns].split(sizes, dim=1)
            levels = _numbers(means, dtype)
            where = _numbers(places, torch.int16).long() & 0xFFFF
            code = _unpacked(codes, count, self.bits)
            kept = levels.gather(1, code & (self.cells - 1)) * factor
            signed = torch.where(code >= self.cells, -kept, kept)
            good = levels.isfinite().all(dim=1) & (where < length).all(dim=1)
            part = torch.zeros(len(rows), self.block_size, dtype=dtype, device=wire.device)
            part.scatter_(1, where.clamp(max=self.block_size - 1), signed)
            values[rows] = torch.where(good[:, None], part, torch.nan)
        return values

    def _record(self, values: Tensor) -> Tensor:
        """Returns the records of blocks of one length, uint8 [B, bytes]. ``values`` are their coordinates, [B,
        length]."""
        count = self.kept_of(values.shape[1])
        places = largest(values, count)
        kept = values.gather(1, places)
        size = kept.double().abs()
        low = size.amin(dim=1, keepdim=True)
        high = size.amax(dim=1, keepdim=True)
        share = torch.where(high > low, (size - low) / (high - low), 0.0)
        cell = (share.nan_to_num() * self.cells).long().clamp(max=self.cells - 1)
        total = torch.zeros(len(values), self.cells, dtype=torch.float64, device=values.device)
        members = torch.zeros_like(total).scatter_add_(1, cell, torch.ones_like(size))
        means = (total.scatter_add_(1, cell, size) / members.clamp(min=1)).to(values.dtype)
        code = cell | (torch.signbit(kept).long() << (self.bits - 1))
        parts = [_rows_of_bytes(means), _rows_of_bytes(places.to(torch.int16)), _packed(code, self.bits)]
        return torch.cat(parts, dim=1)


def largest(values: Tensor, count: int) -> Tensor:
    """Returns the places of the ``count`` largest coordinates of each row, ascending, int64 [B, count].

    If magnitudes are equal, the first ones are kept. The places that ``torch.topk`` returns would not do: of equal
    magnitudes, it keeps other ones on other devices and in other versions, so that messages would differ.

    Args:
        values: coordinates of blocks of one length, [B, length].
        count: number of coordinates to keep, 1 to length.
    """
    # Magnitudes are compared as integers. NaN is the largest one then, so a block with NaN decodes to NaN.
    sizes = magnitudes(values)
    least = sizes.topk(count, dim=1).values[:, -1:]
    above = sizes > least
    ties = sizes == least
    wanted = count - above.sum(dim=1, keepdim=True)
    return (above | (ties & (ties.cumsum(dim=1) <= wanted))).nonzero()[:, 1].view(-1, count)


def _by_length(blocks: Tensor) -> list[tuple[int, Tensor]]:
    """Returns each length of blocks, with the row numbers of the blocks of this length."""
    lengths = blocks[:, LENGTH]
    return [(int(length), (lengths == length).nonzero().flatten()) for length in lengths.unique()]


def _rows_of_bytes(values: Tensor) -> Tensor:
    """Returns the bytes of each row, uint8 [B, bytes]."""
    return bytes_of(values).reshape(len(values), -1)


def _numbers(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers whose bytes are in ``rows``, [B, numbers]: the inverse of `_rows_of_bytes`."""
    return rows.flatten().clone().view(dtype).view(len(rows), -1)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Returns codes of ``bits`` bits side by side, the highest bit first: uint8 [B, bytes]."""
    each = codes[:, :, None] >> torch.arange(bits - 1, -1, -1, device=codes.device) & 1
    flat = torch.nn.functional.pad(each.flatten(1), (0, -(codes.shape[1] * bits) % 8))
    weights = 1 << torch.arange(7, -1, -1, device=codes.device)
    return (flat.view(len(codes), -1, 8) * weights).sum(dim=2).to(torch.uint8)


def _unpacked(packed: Tensor, count: int, bits: int) -> Tensor:
    """Returns the codes from the bytes of `_packed`, int64 [B, count]."""
    each = packed[:, :, None].long() >> torch.arange(7, -1, -1, device=packed.device) & 1
    weights = 1 << torch.arange(bits - 1, -1, -1, device=packed.device)
    return (each.flatten(1)[:, : count * bits].reshape(len(packed), count, bits) * weights).sum(dim=2)
