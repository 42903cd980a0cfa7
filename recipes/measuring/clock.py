"""Training seconds, samples and step times, and the steps after which they are logged."""

from __future__ import annotations

from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from numpy.typing import NDArray

from recipes.measuring import names
from recipes.measuring.stopwatch import Stopwatch


class TrainingClock(Callback):
    """Logs ``train_time``, ``samples`` and ``perf/step_s``.

    A training step lasts from the moment at which its batch is on the device to the end of the optimizer step. A step
    of accumulated batches lasts as long as all of them together. Data loading, logging, other callbacks, validation and
    checkpoints lie between batches and do not count. The totals are part of the checkpoint.

    Attributes:
        train_time: seconds in training steps since the start of training, those of resumed runs included.
        samples: number of samples that all processes together have seen.
    """

    def __init__(self) -> None:
        self.train_time = 0.0
        self.samples = 0
        self._durations: list[float] = []  # of this run
        self._pending: list[tuple[Any, Any, bool]] = []  # marks of batches that are not read yet, and which end a step
        self._begun = 0.0  # seconds of the batches of a step that has not ended
        self._steps_read = 0  # optimizer steps at the end of the last batch
        self._start: Any = None

    @property
    def step_seconds(self) -> NDArray[np.float64]:
        """Seconds of every step of this run (steps,); those of a resumed run are left out."""
        self._read()
        return np.asarray(self._durations)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Go in front of the callbacks that a strategy has inserted: what they do after a step is no training."""
        # A new list, because Lightning is walking through the old one.
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [self, *others]  # type: ignore[attr-defined]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make a stopwatch for the device."""
        self._watch = Stopwatch(trainer.strategy.root_device)
        self._steps_read = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Mark the start of a batch."""
        self._start = self._watch.mark()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Mark the end of a batch, and log the totals where Lightning writes a row."""
        stepped = trainer.global_step != self._steps_read
        self._steps_read = trainer.global_step
        self._pending.append((self._start, self._watch.mark(), stepped))
        self.samples += len(batch[1]) * trainer.world_size
        if stepped and is_logging_step(trainer):
            self._read()
            pl_module.log_dict({names.STEP_S: self._durations[-1], **self._totals()})

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the totals in the row of the metric: dashboards plot two metrics against each other by shared rows."""
        self._read()
        pl_module.log_dict(self._totals())

    on_test_epoch_end = on_validation_epoch_end

    def state_dict(self) -> dict[str, Any]:
        """The totals, for a checkpoint."""
        self._read()
        return {"train_time": self.train_time, "samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the totals of a checkpoint."""
        self.train_time, self.samples = state_dict["train_time"], state_dict["samples"]

    def _totals(self) -> dict[str, float]:
        return {names.TRAIN_TIME: self.train_time, names.SAMPLES: float(self.samples)}

    def _read(self) -> None:
        for start, end, stepped in self._pending:
            seconds = self._watch.seconds(start, end)
            self.train_time += seconds
            self._begun += seconds
            if stepped:
                self._durations.append(self._begun)
                self._begun = 0.0
        self._pending.clear()


def is_logging_step(trainer: Trainer) -> bool:
    """Whether Lightning writes a row after the optimizer step that has just ended."""
    every: int = getattr(trainer, "log_every_n_steps", 0)  # Lightning does not declare the attribute
    return bool(every) and trainer.global_step % every == 0


class RowOfShortRun(Callback):
    """Lets a run with fewer steps than ``trainer.log_every_n_steps`` write a row after its last step."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Shorten the interval to the length of the run."""
        steps = trainer.estimated_stepping_batches
        if steps < trainer.log_every_n_steps:  # type: ignore[attr-defined]
            trainer.log_every_n_steps = max(1, int(steps))  # type: ignore[attr-defined]
