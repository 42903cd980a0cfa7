"""Adam for networks of which some parameters have sparse gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class AdamOfTables(torch.optim.Adam):
    """Adam, and `torch.optim.SparseAdam` for tables: one optimizer, as Lightning's automatic optimisation needs.

    SparseAdam moves the touched rows only. Adam itself also moves rows that were touched earlier, by their momentum.
    """

    def __init__(
        self, params: Any, tables: Iterable[Tensor], lr: float, betas: tuple[float, float] = (0.9, 0.999)
    ) -> None:
        super().__init__(params, lr=lr, betas=betas)
        self._tables = torch.optim.SparseAdam(list(tables), lr=lr, betas=betas)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        (group,) = self._tables.param_groups
        gradients = {table: table.grad for table in group["params"]}
        for table in gradients:
            table.grad = None  # Adam leaves out what has no gradient
        try:
            super().step()
        finally:
            for table, gradient in gradients.items():
                table.grad = gradient
        # Schedules change the groups of this optimizer, and loading a checkpoint replaces its state.
        group["lr"] = self.param_groups[0]["lr"]
        self._tables.state = self.state
        for table in gradients:
            if self.state[table]:  # Adam makes tensors of the numbers of steps that it loads, which round otherwise
                self.state[table]["step"] = int(self.state[table]["step"])
        self._tables.step()
        return loss
