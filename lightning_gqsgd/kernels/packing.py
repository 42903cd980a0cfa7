"""The layout of scales, codes and uncompressed coordinates in a message, in readable PyTorch, and their sizes in bytes.

Codes are stored in *bit planes*: the number of bits is a sum of powers of two, and each power, 8, 4, 2 or 1, is the
width of one plane. Codes that are added on the wire are stored in *lanes* of one width instead: a byte has whole lanes,
or a 64-bit word has whole lanes if 8 is not a multiple of the width. In both layouts, lane l of word w of a run holds
coordinate w + l * words of the block.

Common arguments: ``blocks`` is a block table, int64 [B, `layout.COLUMNS`]. Its byte positions count from the start of
the message ``wire``, uint8 [bytes].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.kernels.layout import CODES, LENGTH, SCALE
from lightning_gqsgd.kernels.wire import ScaleFormat

#: Widths of the bit planes.
PLANES = (8, 4, 2, 1)


def code_bytes(length: np.ndarray, bits: int) -> np.ndarray:
    """Returns the number of bytes of ``length`` codes of ``bits`` bits in bit planes."""
    return np.sum([-(-length * plane // 8) for plane in PLANES if bits & plane], axis=0)


def summable_code_bytes(length: np.ndarray, bits: int) -> np.ndarray:
    """Returns the number of bytes of ``length`` codes of ``bits`` bits in lanes that can be added."""
    if 8 % bits == 0:
        return -(-length // (8 // bits))
    return 8 * -(-length // (64 // bits))


def pack(codes: Tensor, blocks: Tensor, wire: Tensor, bits: int, *, summable: bool) -> None:
    """Write codes, int64 [B, width], of ``bits`` bits each."""
    j, inside = positions(blocks, codes.shape[1])
    for run in _runs(blocks, bits, summable=summable):
        word = j % run.words[:, None]
        lane = j // run.words[:, None]
        part = torch.where(inside, ((codes >> run.low) & ((1 << run.width) - 1)) << (run.width * lane), 0)
        # Lanes of a word do not overlap, so adding them sets their bits.
        packed = torch.zeros_like(codes).scatter_add_(1, word, part)
        filled = j < run.words[:, None]
        for byte in range(run.nbytes):
            places = (blocks[:, CODES, None] + run.first[:, None] + j * run.nbytes + byte)[filled]
            wire[places] = (packed[filled] >> 8 * byte & 0xFF).to(torch.uint8)


def unpack(wire: Tensor, blocks: Tensor, bits: int, width: int, *, summable: bool) -> Tensor:
    """Returns the codes of ``bits`` bits each, int64 [B, width]; 0 beyond the end of a block."""
    j, inside = positions(blocks, width)
    codes = torch.zeros(inside.shape, dtype=torch.int64, device=wire.device)
    for run in _runs(blocks, bits, summable=summable):
        word = j % run.words[:, None]
        lane = j // run.words[:, None]
        start = blocks[:, CODES, None] + run.first[:, None] + word * run.nbytes
        value = sum(wire[start + byte].long() << 8 * byte for byte in range(run.nbytes))
        codes |= torch.where(inside, ((value >> (run.width * lane)) & ((1 << run.width) - 1)) << run.low, 0)
    return codes


def pack_raw(values: Tensor, blocks: Tensor, wire: Tensor) -> None:
    """Write uncompressed coordinates, [B, width]."""
    places, inside = _raw_places(blocks, values.shape[1], values.element_size())
    wire[places] = bytes_of(values[inside])


def unpack_raw(wire: Tensor, blocks: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """Returns the uncompressed coordinates, [B, width]; 0 beyond the end of a block."""
    places, inside = _raw_places(blocks, width, dtype.itemsize)
    values = torch.zeros(inside.shape, dtype=dtype, device=wire.device)
    values[inside] = wire[places].contiguous().view(dtype).flatten()
    return values


def positions(blocks: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Returns the numbers 0 to width - 1 of coordinates, [1, width], and whether each block has such a coordinate, [B,
    width]."""
    j = torch.arange(width, device=blocks.device)[None]
    return j, j < blocks[:, LENGTH, None]


def bytes_of(x: Tensor) -> Tensor:
    """Returns the bytes of each number: uint8 [..., itemsize]."""
    return x.contiguous().view(torch.uint8).reshape(*x.shape, x.element_size())


def write_scales(scale_codes: Tensor, blocks: Tensor, wire: Tensor, form: ScaleFormat) -> None:
    """Write the codes of scales, int64 [B], of the blocks whose scale has a place in the table."""
    sent = blocks[:, SCALE] >= 0
    for byte in range(form.nbytes):
        wire[blocks[sent, SCALE] + byte] = (scale_codes[sent] >> 8 * byte & 0xFF).to(torch.uint8)


def read_scales(wire: Tensor, blocks: Tensor, form: ScaleFormat) -> Tensor:
    """Returns the codes of scales on the wire, int64 [B]."""
    scale_codes = torch.zeros_like(blocks[:, SCALE])
    for byte in range(form.nbytes):
        scale_codes |= wire[blocks[:, SCALE] + byte].long() << 8 * byte
    return scale_codes


class _Run(NamedTuple):
    """Words that hold ``width`` bits of every code of a block, starting at bit ``low`` of the code.

    Attributes:
        nbytes: bytes of a word.
        first: byte position of the first word after the start of the block's codes, [B].
        words: number of words, [B].
    """

    low: int
    width: int
    nbytes: int
    first: Tensor
    words: Tensor


def _runs(blocks: Tensor, bits: int, *, summable: bool) -> list[_Run]:
    length = blocks[:, LENGTH]
    zero = torch.zeros_like(blocks[:, LENGTH])
    # Lanes of 3 bits, for example, do not fill a byte. A 64-bit word leaves few bits unused, and a sum cannot carry
    # from one word into the next.
    if summable and 8 % bits:
        return [_Run(0, bits, 8, zero, -(-length // (64 // bits)))]
    # Codes of 5 bits, for example, have a plane of 4 bits and a plane of 1 bit. Each plane fills whole bytes.
    runs: list[_Run] = []
    first = zero
    low = 0
    for plane in PLANES:
        if bits & plane:
            runs.append(_Run(low, plane, 1, first, -(-length * plane // 8)))
            first = first + runs[-1].words
            low = low + plane
    return runs


def _raw_places(blocks: Tensor, width: int, itemsize: int) -> tuple[Tensor, Tensor]:
    j, inside = positions(blocks, width)
    first = (blocks[:, CODES, None] + j * itemsize)[inside]
    return first[:, None] + torch.arange(itemsize, device=blocks.device), inside
