"""The proximal step of an L1 penalty, and the measure of what the penalty is for."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def soft_threshold(x: Tensor, threshold: float | Tensor) -> Tensor:
    """Returns the proximal step of the penalty t |x|_1: sign(x) max(|x| - t, 0), which minimises t |z|_1 + ½ |z - x|²
    over z.

    Args:
        x: floating-point tensor of any shape.
        threshold: t, at least 0; a number, or a tensor that broadcasts to the shape of ``x``.

    Returns:
        A new tensor of the shape and dtype of ``x``. Coordinates with |x| <= t are exactly zero.
    """
    limit = torch.as_tensor(threshold, dtype=x.dtype, device=x.device)
    return x - torch.clamp(x, -limit, limit)


@torch.no_grad()
def sparsity(parameters: Iterable[Tensor]) -> float:
    """Returns the share of coordinates that are exactly zero, 0 to 1.

    Args:
        parameters: tensors of any shape, e.g. ``model.parameters()``.

    Raises:
        ValueError: the parameters have no coordinate.
    """
    zeros = total = 0
    for parameter in parameters:
        zeros += parameter.numel() - int(parameter.count_nonzero())
        total += parameter.numel()
    if not total:
        raise ValueError("the sparsity of no coordinate is undefined; give at least one parameter that is not empty")
    return zeros / total
