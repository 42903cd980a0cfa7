"""Image classification as a LightningModule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from recipes.tasks import names
from recipes.tasks.schedules import make_schedule

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class SGDSettings:
    """SGD with momentum; the fields are those of `optimizer` in the configuration."""

    lr: float
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    label_smoothing: float = 0.0
    schedule: str = "onecycle"
    warmup: float = 0.2


class ImageClassifier(LightningModule):
    """Trains a network on batches (images (N, C, H, W), labels (N,)) with cross-entropy and SGD."""

    def __init__(self, network: nn.Module, num_classes: int, settings: SGDSettings) -> None:
        super().__init__()
        self.network = network
        self.settings = settings
        # Accuracy over all samples: "macro", the default, would average over classes.
        self.val_acc = MulticlassAccuracy(num_classes, average="micro")
        self.test_acc = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.settings.label_smoothing)
        self.log(names.TRAIN_LOSS, loss.detach(), prog_bar=True)
        self.log(names.TRAIN_ACC, (logits.argmax(1) == labels).float().mean())
        self.log(names.LEARNING_RATE, self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, names.VAL_LOSS, names.VAL_ACC, self.val_acc)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, names.TEST_LOSS, names.TEST_ACC, self.test_acc)

    def configure_optimizers(self) -> Any:
        settings = self.settings
        weights = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]  # batch norm and biases: decay does not regularise them
        optimizer = torch.optim.SGD(
            [{"params": weights, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=settings.lr,
            momentum=settings.momentum,
            nesterov=settings.nesterov and settings.momentum > 0,
        )
        steps = self.trainer.estimated_stepping_batches
        schedule = make_schedule(optimizer, settings.schedule, steps, settings.warmup)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _evaluate(self, batch: Batch, loss_name: str, acc_name: str, accuracy: MulticlassAccuracy) -> None:
        images, labels = batch
        logits = self(images)
        accuracy.update(logits, labels)
        self.log(loss_name, F.cross_entropy(logits, labels), on_step=False, on_epoch=True, sync_dist=True)
        self.log(acc_name, accuracy, on_step=False, on_epoch=True, prog_bar=True)
