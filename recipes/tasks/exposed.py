"""The part of communication that backward did not hide."""

from __future__ import annotations

from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from numpy.typing import NDArray
from torch import Tensor

from recipes.tasks import names
from recipes.tasks.clock import is_logging_step
from recipes.tasks.stopwatch import Stopwatch


class ExposedCommunication(Callback):
    """Logs ``perf/exposed_s``: seconds from the last gradient of a step to the end of its backward pass.

    In between, DDP has nothing to do but to wait for what is still on its way, whatever hook sends it; so the number
    means the same for every strategy.
    """

    def __init__(self) -> None:
        self._durations: list[float] = []
        self._pending: list[tuple[Any, Any]] = []
        self._last_gradient: Any = None
        self._handles: list[Any] = []

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Exposed seconds of every synchronised step of this run."""
        self._read()
        return np.asarray(self._durations)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch = Stopwatch(trainer.strategy.root_device)
        parameters = [p for p in pl_module.parameters() if p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(self._gradient_is_here) for p in parameters]

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Without synchronisation gradients stay here: all but the last of accumulated batches.
        if getattr(trainer.strategy.model, "require_backward_grad_sync", False):
            self._pending.append((self._last_gradient, self._watch.mark()))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_logging_step(trainer) and self._pending:
            self._read()
            pl_module.log(names.EXPOSED_S, self._durations[-1])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for handle in self._handles:
            handle.remove()

    def _gradient_is_here(self, parameter: Tensor) -> None:
        self._last_gradient = self._watch.mark()

    def _read(self) -> None:
        self._durations += [self._watch.seconds(start, end) for start, end in self._pending]
        self._pending.clear()
