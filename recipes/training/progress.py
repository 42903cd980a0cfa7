"""Progress as plain lines, for log files and pipes."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

from recipes.measuring import names
from recipes.measuring.metrics import Metric


class PlainProgress(Callback):
    """Prints one line after each validation.

    Args:
        metric: what the task is judged by; its value is part of the line.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    @rank_zero_only
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print epoch, step and the latest metrics."""
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
