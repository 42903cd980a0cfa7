"""The part of communication that backward did not hide."""

from __future__ import annotations

from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from numpy.typing import NDArray
from torch import Tensor

from recipes.measuring import names
from recipes.measuring.clock import is_logging_step
from recipes.measuring.stopwatch import Stopwatch


class ExposedCommunication(Callback):
    """Logs ``perf/exposed_s``: seconds from the last gradient of a step to the end of its backward pass.

    In between, DDP only waits for gradients that are still on their way, whatever hook sends them. So the number means
    the same for every strategy. Local steps wait for averages instead, and count these waits themselves.
    """

    def __init__(self) -> None:
        self._durations: list[float] = []
        self._pending: list[tuple[Any, Any]] = []  # marks of steps whose duration has not been read yet
        self._last_gradient: Any = None
        self._first_step = 0
        self._handles: list[Any] = []

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Exposed seconds of every synchronised step of this run (steps,); with local steps, their mean (1,)."""
        self._read()
        return np.asarray(self._durations)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch every parameter's gradient."""
        self._watch = Stopwatch(trainer.strategy.root_device)
        self._first_step = trainer.global_step
        parameters = [p for p in pl_module.parameters() if p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(self._mark_gradient) for p in parameters]

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Mark the end of backward."""
        # Of accumulated batches only the last is synchronised; the gradients of the others stay on their rank.
        if getattr(trainer.strategy.model, "require_backward_grad_sync", False):
            self._pending.append((self._last_gradient, self._watch.mark()))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the latest step where Lightning writes a row."""
        if is_logging_step(trainer) and self._pending:
            self._read()
            pl_module.log(names.EXPOSED_S, self._durations[-1])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch gradients no longer."""
        for handle in self._handles:
            handle.remove()
        state = getattr(trainer.strategy, "gqsgd_state", None)
        steps = trainer.global_step - self._first_step
        if state is not None and steps and not self.seconds.size:
            self._durations.append(float(state.telemetry.totals()["exposed_s"]) / steps)

    def _mark_gradient(self, parameter: Tensor) -> None:
        self._last_gradient = self._watch.mark()

    def _read(self) -> None:
        self._durations += [self._watch.seconds(start, end) for start, end in self._pending]
        self._pending.clear()
