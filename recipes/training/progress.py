"""Progress of a whole run: a live line on a terminal, plain lines in log files and pipes."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from rich.progress import BarColumn, Progress, TextColumn

from recipes.measuring import names
from recipes.measuring.amounts import megabytes_in_words
from recipes.measuring.metrics import Metric
from recipes.pace import LINE_EVERY_S, Clock, RunPace


class PlainProgress(Callback):
    """Prints a line after each validation, and now and then between validations that are far apart."""

    def __init__(self, metric: Metric, clock: Clock = time.monotonic) -> None:
        self._metric, self._clock = metric, clock
        self._said = 0.0
        self._pace = RunPace(0, clock=clock)

    @rank_zero_only
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count seconds."""
        self._pace = RunPace(trainer.estimated_stepping_batches, trainer.global_step, self._clock)
        self._said = self._clock()

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Print a line if the last one was long ago."""
        if self._clock() - self._said >= LINE_EVERY_S:
            self._print(f"{self._pace.text(trainer.global_step)}, {_epoch(trainer)}", trainer)

    @rank_zero_only
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print epoch, step, the time left and the latest metrics."""
        self._print(f"{_epoch(trainer)}, {self._pace.text(trainer.global_step)}", trainer)

    def _print(self, place: str, trainer: Trainer) -> None:
        self._said = self._clock()
        print(", ".join([place, *_numbers(trainer, self._metric)]), flush=True)


class LiveProgress(Callback):
    """Shows one bar for the whole run on a terminal."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._pace = RunPace(0)
        self._bar: Progress | None = None

    @rank_zero_only
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the bar."""
        self._pace = RunPace(trainer.estimated_stepping_batches, trainer.global_step)
        self._bar = Progress(BarColumn(), TextColumn("{task.fields[status]}"))
        self._task = self._bar.add_task("", total=1.0, status="first step")
        self._bar.start()

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the bar."""
        self._show(trainer)

    @rank_zero_only
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the metric."""
        self._show(trainer)

    @rank_zero_only
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the bar as it is."""
        self._stop()

    @rank_zero_only
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the terminal back."""
        self._stop()

    def _show(self, trainer: Trainer) -> None:
        if self._bar is None:
            return
        status = ", ".join(
            [_epoch(trainer), self._pace.text(trainer.global_step), *_numbers(trainer, self._metric)[1:3]]
        )
        self._bar.update(self._task, completed=self._pace.share(trainer.global_step), status=status)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _epoch(trainer: Trainer) -> str:
    most = trainer.max_epochs
    return f"epoch {trainer.current_epoch + 1}" + (f"/{most}" if most is not None and most > 0 else "")


def _numbers(trainer: Trainer, metric: Metric) -> list[str]:
    """Seconds of training, loss, metric and megabytes, as far as they have been logged."""
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    texts = (
        (names.TRAIN_TIME, lambda value: f"{value:.1f} s of training"),
        (names.TRAIN_LOSS, lambda value: f"loss {value:.4f}"),
        (metric.val, lambda value: f"{metric.label} {metric.shown(value)}"),
        (names.MB_SENT, lambda value: f"{megabytes_in_words(value)} MB sent"),
    )
    return [text(logged[name]) for name, text in texts if name in logged]
