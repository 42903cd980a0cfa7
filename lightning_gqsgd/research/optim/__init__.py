"""Optimizers that torch lacks: Adagrad with an L1 penalty, for models most of whose coordinates are exactly zero; Muon
together with AdamW, for local steps; and Dion, which itself averages factors of low rank."""

from lightning_gqsgd.research.optim.adagrad import CMDAdagrad, RDAAdagrad
from lightning_gqsgd.research.optim.dion import Dion
from lightning_gqsgd.research.optim.muon import MuonAdamW, matrices_of
from lightning_gqsgd.research.optim.proximal import ProximalSGD, soft_threshold, sparsity

__all__ = ["CMDAdagrad", "Dion", "MuonAdamW", "ProximalSGD", "RDAAdagrad", "matrices_of", "soft_threshold", "sparsity"]
