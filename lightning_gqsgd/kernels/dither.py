"""The dither in readable PyTorch: uniform random numbers that depend only on a key and on a coordinate's place.

`wire` has the formula of the hash. Common arguments: ``blocks`` is a block table, int64 [B, `layout.COLUMNS`]; ``key``
is the pair of 32-bit keys of a stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gqsgd.kernels.layout import INDEX, LENGTH, PARAMETER
from lightning_gqsgd.kernels.wire import DITHER_FIRST, DITHER_UNIT, GOLDEN, MULTIPLY_1, MULTIPLY_2, Key

_MASK = 0xFFFFFFFF


def uniform(blocks: Tensor, key: Key, width: int) -> Tensor:
    """Returns the dither v of the first ``width`` coordinates of each block, uniform on (0, 1): fp32 [B, width]."""
    # One hash gives the dither of two coordinates, 16 bits each. The two coordinates are half a block apart, so that
    # vectorised kernels read consecutive coordinates in both halves.
    half = (blocks[:, LENGTH] + 1) // 2
    j = torch.arange(width, device=blocks.device)
    in_second_half = j >= half[:, None]
    h = words(blocks, key, torch.where(in_second_half, j - half[:, None], j))
    k = torch.where(in_second_half, h >> 16, h & 0xFFFF)
    return k.float() * DITHER_UNIT + DITHER_FIRST


def words(blocks: Tensor, key: Key, places: Tensor) -> Tensor:
    """Returns uniform 32-bit integers, int64 [B, width].

    Args:
        blocks, key: see the module's docstring.
        places: numbers that are hashed with the block, int64 [width] or [B, width].
    """
    parameter = blocks[:, PARAMETER]
    index = blocks[:, INDEX]
    # PyTorch has hardly any arithmetic on uint32, so 64-bit integers are masked after each operation.
    a = _mix((_mix(key[0] ^ parameter) + GOLDEN * index) & _MASK)
    b = _mix(_mix((key[1] + parameter) & _MASK) ^ index)
    return _finish(_start((a[:, None] + places) & _MASK) ^ b[:, None])


def _start(h: Tensor) -> Tensor:
    return ((h ^ (h >> 16)) * MULTIPLY_1) & _MASK


def _finish(h: Tensor) -> Tensor:
    h = ((h ^ (h >> 15)) * MULTIPLY_2) & _MASK
    return h ^ (h >> 16)


def _mix(h: Tensor) -> Tensor:
    return _finish(_start(h))
