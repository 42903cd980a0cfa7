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

import torch
from torch import Tensor

from lightning_gqsgd.codecs.top_k.sparsifier import Sparsifier, numbers_of, rows_of_bytes
from lightning_gqsgd.kernels.protocol import Kind, Lengths


@dataclass(frozen=True)
class CoarseTopKQuantiser(Sparsifier):
    """A top-k codec of few bits at one block size, as kernels see it.

    Attributes:
        block_size: the largest number of coordinates in a block.
        kept: number of coordinates that are kept out of 65536; 1 or more.
        bits: bits of a kept coordinate, 2 to 4.
    """

    bits: int

    kind: ClassVar[Kind] = Kind("coarse_top_k")

    @property
    def cells(self) -> int:
        """Number of cells, which is the number of different magnitudes."""
        return 1 << (self.bits - 1)

    def sizes(self, count: Lengths, raw_bytes: int) -> tuple[int, Lengths]:
        """Returns the numbers of bytes of the means, and of the codes; see `Sparsifier.sizes`."""
        return self.cells * raw_bytes, (count * self.bits + 7) // 8

    def encode(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the bytes of the means, and of the codes; see `Sparsifier.encode`."""
        size = kept.double().abs()
        low = size.amin(dim=1, keepdim=True)
        high = size.amax(dim=1, keepdim=True)
        share = torch.where(high > low, (size - low) / (high - low), 0.0)
        cell = (share.nan_to_num() * self.cells).long().clamp(max=self.cells - 1)
        total = torch.zeros(len(kept), self.cells, dtype=torch.float64, device=kept.device)
        members = torch.zeros_like(total).scatter_add_(1, cell, torch.ones_like(size))
        means = (total.scatter_add_(1, cell, size) / members.clamp(min=1)).to(kept.dtype)
        code = cell | (torch.signbit(kept).long() << (self.bits - 1))
        return rows_of_bytes(means), _packed(code, self.bits)

    def decode(self, before: Tensor, behind: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """Returns the kept coordinates; see `Sparsifier.decode`. They are NaN if a cell's mean is not finite."""
        means = numbers_of(before, dtype)
        code = _unpacked(behind, count, self.bits)
        kept = means.gather(1, code & (self.cells - 1))
        signed = torch.where(code >= self.cells, -kept, kept)
        return signed.where(means.isfinite().all(dim=1, keepdim=True), torch.nan)


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
