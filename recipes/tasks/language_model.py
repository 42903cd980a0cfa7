"""Language modelling: every token is predicted from those before it."""

from __future__ import annotations

import torch
import torchmetrics
from torch import Tensor
from torch.nn import functional as F

from recipes.tasks.metrics import PERPLEXITY
from recipes.tasks.task import Task


class LanguageModel(Task):
    """Cross-entropy per token on batches (ids (N, T), next ids (N, T)), judged by perplexity."""

    metric = PERPLEXITY

    def evaluator(self) -> torchmetrics.Metric:
        return Perplexity()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Perplexity(torchmetrics.Metric):
    """exp of the mean cross-entropy over all tokens, of all batches and processes.

    Unlike torchmetrics' own, from logits without a detour over probabilities: one that is rounded to zero would make
    the result infinite.
    """

    total: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "tokens"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add logits (N, T, V) and targets (N, T)."""
        self.total += F.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        self.tokens += targets.numel()

    def compute(self) -> Tensor:
        return (self.total / self.tokens).exp()
