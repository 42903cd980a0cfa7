"""Optimizers that torch lacks: Adagrad with an L1 penalty, for models most of whose coordinates are exactly zero, and
Muon beside AdamW, for local steps."""

from lightning_gqsgd.research.optim.adagrad import CMDAdagrad, RDAAdagrad
from lightning_gqsgd.research.optim.muon import MuonAdamW, matrices_of
from lightning_gqsgd.research.optim.proximal import soft_threshold, sparsity

__all__ = ["CMDAdagrad", "MuonAdamW", "RDAAdagrad", "matrices_of", "soft_threshold", "sparsity"]
