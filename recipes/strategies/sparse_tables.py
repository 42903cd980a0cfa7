"""What the strategy of a preset needs to train networks with sparse gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_gqsgd.sparse.options import tables_of
from recipes.strategies.choices import TARGET


def fields_for(strategy: Mapping[str, Any], network: nn.Module) -> dict[str, Any]:
    """Further arguments of a strategy for a network: a preset gathers the touched rows of tables.

    Args:
        strategy: the node of the strategy; what it says of sparse gradients itself stays.
        network: what is trained.
    """
    is_open = strategy["_target_"] == TARGET and not strategy.get("local_steps") and strategy.get("sparse") is None
    return {"sparse": "gather"} if is_open and tables_of(network, frozen=True) else {}
