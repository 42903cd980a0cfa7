"""Modules whose parameters get sparse gradients."""

from __future__ import annotations

from torch import nn


def gives_sparse_gradients(module: nn.Module) -> bool:
    """Whether the parameters of a module itself, not those of its children, get sparse gradients."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
