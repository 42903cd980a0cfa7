"""Stochastic rounding of fp32 numbers to bf16, in readable PyTorch; `codecs.floats.codec` describes it."""

from __future__ import annotations

import torch
from torch import Tensor

#: The bits of infinity in fp32, and a mask of all bits except for the sign.
INFINITY = 0x7F800000
MAGNITUDE = 0x7FFFFFFF
#: The sign of a bf16 number.
SIGN = 0x8000
#: This bit makes the upper half of a NaN a NaN for any lower half.
QUIET = 0x40


def rounded(values: Tensor, random: Tensor, limit: int) -> Tensor:
    """Returns fp32 numbers rounded stochastically to bf16.

    Args:
        values: fp32, any shape.
        random: uniform integers from 0 to 2^16 - 1, int64, of the same shape.
        limit: bits of the largest magnitude, see `codecs.floats.codec`.
    """
    bits = values.view(torch.int32).long()
    magnitude = bits & MAGNITUDE
    upper = (magnitude.clamp(max=limit) + random) >> 16
    special = (magnitude >> 16) | torch.where(magnitude > INFINITY, QUIET, 0)
    upper = torch.where(magnitude >= INFINITY, special, upper) | ((bits >> 16) & SIGN)
    return upper.to(torch.int32).to(torch.int16).view(torch.bfloat16)
