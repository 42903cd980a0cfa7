"""SIGTERM in the middle of a training, as schedulers and ``timeout`` send it."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from recipes.launch.processes import external_rank


class TerminatedTraining(Callback):
    """Ends a training of several processes at SIGTERM as an interrupt does.

    Lightning's own handler broadcasts from rank 0 at once, whatever the ranks are doing. A rank that is in another
    collective then waits for ever, and the others wait for that rank. A training of one process keeps Lightning's
    handler.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the handler that Lightning has installed a moment ago."""
        _handle(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the handler that Lightning has installed a moment ago, again: each fit and test installs one."""
        _handle(trainer)


def _handle(trainer: Trainer) -> None:
    """Replace Lightning's handler of SIGTERM; Lightning restores at the end what there was before its own."""
    if trainer.world_size == 1 or threading.current_thread() is not threading.main_thread():
        return
    if trainer.is_global_zero:
        signal.signal(signal.SIGTERM, _interrupt)
    else:
        # Rank 0 ends the ranks that Lightning has started. A launcher outside sends the signal to each of its ranks.
        by_lightning = external_rank(os.environ) is None
        signal.signal(signal.SIGTERM, signal.SIG_IGN if by_lightning else signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt the ending
    raise KeyboardInterrupt
