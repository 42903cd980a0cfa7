"""Progress as plain lines, for logs and pipes."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

from recipes.tasks import names
from recipes.tasks.metrics import Metric


class PlainProgress(Callback):
    """One line after each validation, with the task's metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    @rank_zero_only
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = trainer.callback_metrics
        numbers = [
            f"{name} {float(metrics[name]):{form}}{unit}"
            for name, form, unit in (
                (names.TRAIN_TIME, ".1f", " s"),
                (names.TRAIN_LOSS, ".4f", ""),
                (self._metric.val, ".4f", ""),
                (names.MB_SENT, ".1f", " MB"),
            )
            if name in metrics
        ]
        epoch = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}, step {trainer.global_step}"
        print(", ".join([epoch, *numbers]), flush=True)
