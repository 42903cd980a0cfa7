"""Stochastic rounding of fp32 numbers to bf16, in readable form; `codecs.floats` says how the numbers are used."""

from __future__ import annotations

import torch
from torch import Tensor

#: Coordinates of a block, at most.
BLOCK = 1024

#: Bits of infinity, and of all numbers without their sign.
_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
#: What makes the upper half of a NaN a NaN, whatever the lower half was.
_QUIET = 0x40


def rounded(values: Tensor, random: Tensor, limit: int) -> Tensor:
    """Returns the bf16 numbers that fp32 numbers are rounded to.

    Args:
        values: fp32, any shape.
        random: uniform integers from 0 to 2^16 - 1, int64, of the same shape.
        limit: bits of the largest magnitude, see `codecs.floats`.
    """
    bits = values.view(torch.int32).long()
    magnitude = bits & _MAGNITUDE
    upper = (magnitude.clamp(max=limit) + random) >> 16
    special = (magnitude >> 16) | torch.where(magnitude > _INFINITY, _QUIET, 0)
    upper = torch.where(magnitude >= _INFINITY, special, upper) | ((bits >> 16) & 0x8000)
    return upper.to(torch.int32).to(torch.int16).view(torch.bfloat16)
