"""Language modelling: every token is predicted from the tokens before it."""

from __future__ import annotations

import torch
import torchmetrics
from torch import Tensor
from torch.nn import functional as F

from recipes.measuring.metrics import PERPLEXITY
from recipes.tasks.task import Task


class LanguageModel(Task):
    """Cross-entropy per token on batches (ids (N, T), next ids (N, T)), judged by perplexity."""

    metric = PERPLEXITY

    def evaluator(self) -> torchmetrics.Metric:
        """See `Task.evaluator`."""
        return Perplexity()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `Task.loss`."""
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Perplexity(torchmetrics.Metric):
    """exp of the mean cross-entropy over all tokens, of all batches and processes.

    torchmetrics has a perplexity of its own, which computes probabilities first. A probability that is rounded to zero
    makes that result infinite; here logits go straight into the cross-entropy.
    """

    total: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "tokens"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch: logits (N, T, V) and targets int64 (N, T)."""
        self.total += F.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        self.tokens += targets.numel()

    def compute(self) -> Tensor:
        """The perplexity of all that was added: a scalar, float64."""
        return (self.total / self.tokens).exp()
