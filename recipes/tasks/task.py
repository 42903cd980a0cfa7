"""What all tasks have in common as LightningModules."""

from __future__ import annotations

from typing import Any, ClassVar

import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from recipes.measuring import names
from recipes.measuring.metrics import Metric
from recipes.tasks.optimizers import OptimizerSettings, OwnOptimizer, make_optimizer

#: Inputs and targets.
Batch = tuple[Any, Tensor]


class Task(LightningModule):
    """Trains a network on batches (inputs, targets), and judges the network by one metric.

    A subclass says what the loss is and what evaluates the metric. The number of targets of a batch, ``len(batch[1])``,
    is its number of samples.

    Attributes:
        metric: what the task is judged by; logged as ``val/KEY`` and ``test/KEY``.
    """

    metric: ClassVar[Metric]

    def __init__(self, network: nn.Module, settings: OptimizerSettings | OwnOptimizer) -> None:
        super().__init__()
        self.network = network
        self.settings = settings
        # Each split has its own, because torchmetrics adds up what it has seen, over batches and processes.
        self.val_metric = self.evaluator()
        self.test_metric = self.evaluator()

    def evaluator(self) -> torchmetrics.Metric:
        """A new object of torchmetrics whose value is that of `metric`; it is updated with (outputs, targets)."""
        raise NotImplementedError

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss that validation reports: a scalar."""
        raise NotImplementedError

    def training_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss that training minimises: a scalar; that of validation, unless a task says otherwise."""
        return self.loss(outputs, targets)

    def training_metric(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """`metric` on one training batch, a scalar; None where a batch says nothing about it."""
        return None

    def judge(self, outputs: Tensor, targets: Tensor, split: str) -> None:
        """Log more of a batch than loss and metric; nothing, unless a task says otherwise."""

    def forward(self, inputs: Any) -> Tensor:
        """The network's outputs."""
        outputs: Tensor = self.network(inputs)
        return outputs

    def judged(self, inputs: Any) -> Tensor:
        """The outputs that validation and test judge: the network's, unless a task says otherwise."""
        outputs: Tensor = self(inputs)
        return outputs

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a training batch; logs loss, metric and learning rate."""
        inputs, targets = batch
        outputs = self(inputs)
        loss = self.training_loss(outputs, targets)
        size = len(targets)
        self.log(names.TRAIN_LOSS, loss.detach(), prog_bar=True, batch_size=size)
        value = self.training_metric(outputs.detach(), targets)
        if value is not None:
            self.log(self.metric.train, value, batch_size=size)
        self.log(names.LEARNING_RATE, self.trainer.optimizers[0].param_groups[0]["lr"], batch_size=size)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to loss and metric of a validation."""
        self._evaluate(batch, names.VAL_LOSS, self.metric.val, self.val_metric)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to loss and metric of the test."""
        self._evaluate(batch, names.TEST_LOSS, self.metric.test, self.test_metric)

    def configure_optimizers(self) -> Any:
        """Optimizer and schedule for the whole run, see `make_optimizer`."""
        return make_optimizer(self, self.settings, self.trainer.estimated_stepping_batches)

    def _evaluate(self, batch: Batch, loss_name: str, metric_name: str, metric: torchmetrics.Metric) -> None:
        inputs, targets = batch
        outputs = self.judged(inputs)
        metric.update(outputs, targets)
        loss, size = self.loss(outputs, targets), len(targets)
        self.log(loss_name, loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=size)
        self.judge(outputs, targets, metric_name.partition("/")[0])
        self.log(metric_name, metric, on_step=False, on_epoch=True, prog_bar=True, batch_size=size)
