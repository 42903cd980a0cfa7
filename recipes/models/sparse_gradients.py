"""Tables whose gradients are sparse."""

from __future__ import annotations

from torch import nn


def sparse_tables(network: nn.Module) -> dict[str, nn.Parameter]:
    """The tables of a network that get sparse gradients, by the names of their modules."""
    return {
        name: module.get_parameter("weight")
        for name, module in network.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
