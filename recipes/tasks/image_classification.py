"""Image classification."""

from __future__ import annotations

import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from recipes.measuring.metrics import ACCURACY
from recipes.measuring.names import TOP5
from recipes.tasks.optimizers import OptimizerSettings
from recipes.tasks.task import Task

#: Fewest classes for which validation and test log the share of images whose class is among the 5 likeliest, too.
TOP5_FROM = 100


class ImageClassifier(Task):
    """Cross-entropy on batches (images (N, C, H, W), labels int64 (N,)), judged by accuracy.

    With 100 classes or more, validation and test log the top-5 accuracy as well, as ``val/acc5`` and ``test/acc5``.

    Args:
        network: gives logits (N, num_classes).
        settings: settings of the optimizer.
        num_classes: number of outputs of the network.
        label_smoothing: label smoothing of the loss in training, 0 to 1.
        both_sides: whether validation and test judge the mean of the logits of each image and its mirror image.
    """

    metric = ACCURACY

    def __init__(
        self,
        network: nn.Module,
        settings: OptimizerSettings,
        num_classes: int,
        label_smoothing: float = 0.0,
        both_sides: bool = False,
    ) -> None:
        self._num_classes, self._label_smoothing = num_classes, label_smoothing
        self._both_sides = both_sides
        super().__init__(network, settings)
        if num_classes >= TOP5_FROM:
            top5 = {name: MulticlassAccuracy(num_classes, top_k=5, average="micro") for name in ("val", "test")}
            self.top5 = nn.ModuleDict(top5)

    def evaluator(self) -> torchmetrics.Metric:
        """See `Task.evaluator`."""
        # "micro" is the accuracy over all samples; the default, "macro", would be the mean over classes.
        return MulticlassAccuracy(self._num_classes, average="micro")

    def judged(self, inputs: Tensor) -> Tensor:
        """See `Task.judged`."""
        outputs = super().judged(inputs)
        return (outputs + super().judged(inputs.flip(-1))) / 2 if self._both_sides else outputs

    def judge(self, outputs: Tensor, targets: Tensor, split: str) -> None:
        """See `Task.judge`: top-5 accuracy."""
        if self._num_classes < TOP5_FROM:
            return
        metric = self.top5[split]
        assert isinstance(metric, torchmetrics.Metric)
        metric.update(outputs, targets)
        self.log(f"{split}/{TOP5}", metric, on_step=False, on_epoch=True, batch_size=len(targets))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `Task.loss`."""
        return F.cross_entropy(outputs, targets)

    def training_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `Task.training_loss`: with label smoothing."""
        return F.cross_entropy(outputs, targets, label_smoothing=self._label_smoothing)

    def training_metric(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `Task.training_metric`."""
        return (outputs.argmax(1) == targets).float().mean()
