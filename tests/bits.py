"""A digest of tensors, which tests compare where they compare bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def bits_of(tensors: Iterable[Tensor]) -> str:
    """A digest of the bits of tensors, one after the other."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
