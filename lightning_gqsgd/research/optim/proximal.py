"""The proximal step of an L1 penalty, SGD with this step, and the share of parameters that are zero."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_gqsgd.research.optim.closures import ClosureOptimizer


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


class ProximalSGD(ClosureOptimizer):
    """Minimises the loss plus the penalty λ |x|_1: x ← soft(x - η g, η λ), with soft of `soft_threshold`.

    DIANA (arXiv 1901.09269) makes this step with the gradients that it decodes.

    Args:
        params: parameters, or parameter groups with their own numbers.
        lr: η, at least 0.
        l1: λ, at least 0.

    Raises:
        ValueError: if a number is out of its range.
    """

    def __init__(self, params: ParamsT, lr: float, l1: float) -> None:
        for name, value in (("learning rate", lr), ("l1 value", l1)):
            if not value >= 0.0:
                raise ValueError(f"Invalid {name}: {value}")
        super().__init__(params, {"lr": lr, "l1": l1})

    def _update(self) -> None:
        for group in self.param_groups:
            lr, l1 = group["lr"], group["l1"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.copy_(soft_threshold(parameter - lr * parameter.grad, lr * l1))


@torch.no_grad()
def sparsity(parameters: Iterable[Tensor]) -> float:
    """Returns the share of coordinates that are exactly zero, 0 to 1.

    Args:
        parameters: tensors of any shape, e.g. ``model.parameters()``.

    Raises:
        ValueError: if the parameters have no coordinate.
    """
    zeros = total = 0
    for parameter in parameters:
        zeros += parameter.numel() - int(parameter.count_nonzero())
        total += parameter.numel()
    if not total:
        raise ValueError("the sparsity of no coordinate is undefined; give at least one parameter that is not empty")
    return zeros / total
