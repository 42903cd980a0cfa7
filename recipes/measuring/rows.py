"""Rows of runs that are shorter than the interval between rows."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback


class RowOfShortRun(Callback):
    """Lets a run with fewer steps than ``trainer.log_every_n_steps`` write a row after its last step."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shorten the interval to the length of the run."""
        steps = trainer.estimated_stepping_batches
        if steps < trainer.log_every_n_steps:  # type: ignore[attr-defined]
            trainer.log_every_n_steps = max(1, int(steps))  # type: ignore[attr-defined]
