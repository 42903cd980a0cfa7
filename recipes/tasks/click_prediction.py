"""Prediction of clicks."""

from __future__ import annotations

import torchmetrics
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.classification import BinaryAUROC

from recipes.measuring.metrics import AUC
from recipes.tasks.task import Task


class ClickPredictor(Task):
    """Binary cross-entropy on batches (ids int64 (N, F), labels float (N,)), judged by AUC.

    The network gives one logit per sample, (N,). Training batches have no AUC of their own, because few of them hold
    enough clicks.
    """

    metric = AUC

    def evaluator(self) -> torchmetrics.Metric:
        """See `Task.evaluator`."""
        # Exact: this keeps all scores. For millions of test samples, thresholds=1000 would need constant memory.
        return BinaryAUROC(thresholds=None)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `Task.loss`."""
        return F.binary_cross_entropy_with_logits(outputs, targets)
