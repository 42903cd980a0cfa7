"""Optimizers that torch lacks: Adagrad with an L1 penalty, for models most of whose coordinates are exactly zero."""

from lightning_gqsgd.research.optim.adagrad import CMDAdagrad, RDAAdagrad
from lightning_gqsgd.research.optim.proximal import soft_threshold, sparsity

__all__ = ["CMDAdagrad", "RDAAdagrad", "soft_threshold", "sparsity"]
