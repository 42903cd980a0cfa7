"""The part of `step` that all optimizers of this package share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer


class ClosureOptimizer(Optimizer):
    """Base class whose step first calls the closure, if there is one, as torch's optimizers do."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss and its gradients again, and returns the loss.

        Returns:
            The result of the closure; None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._update()
        return loss

    @abstractmethod
    def _update(self) -> None:
        """Update all parameters that have a gradient; called without gradients."""
