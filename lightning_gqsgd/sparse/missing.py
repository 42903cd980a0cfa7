"""Empty gradients for tables that a rank has not used in a step, with `find_unused_parameters=True`.

If DDP expects a sparse gradient of a parameter and there is none, the backward pass raises an error, even if DDP looks
for unused parameters. An empty gradient avoids the error: it says that the rank has touched no row.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from lightning_gqsgd.session.copies import OwnHook
from lightning_gqsgd.sparse.tables import gradient_of


def fill_missing_gradients(model: DistributedDataParallel, tables: Iterable[Tensor]) -> None:
    """From now on, give each table that has no gradient an empty one when a backward pass begins.

    This is the latest moment before DDP checks. Gradients may be set to None between the forward and the backward pass.
    """
    weak_model = weakref.ref(model)
    weak_tables = [weakref.ref(table) for table in tables]

    def fill(_: Tensor) -> None:
        owner = weak_model()
        if owner is None or not owner.require_backward_grad_sync:
            return
        for weak_table in weak_tables:
            table = weak_table()
            if table is not None and table.grad is None:
                table.grad = empty_gradient(table)

    def watch(_model: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = [tensor for tensor in _find_tensors(output) if tensor.requires_grad]
        if tensors:
            register_multi_grad_hook(tensors, fill, mode="any")

    model.register_forward_hook(OwnHook(model, watch))


def empty_gradient(table: Tensor) -> Tensor:
    """Returns a sparse gradient of a table that has no rows."""
    rows = torch.zeros(0, dtype=torch.int64, device=table.device)
    values = torch.zeros(0, *table.shape[1:], dtype=table.dtype, device=table.device)
    return gradient_of(rows, values, table)
