"""An interrupt while the processes of a run are starting."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from recipes.launch.interrupts import goes_on_with
from recipes.opening import INTERRUPTED, say

#: Seconds in which Python itself may notice an interrupt.
_GRACE_S = 0.5


class InterruptedStart(Callback):
    """Ends a run at once that is interrupted before its processes have met.

    The first process waits for the others, which are loading torch, and it waits inside of torch: Python would notice
    the interrupt only when the others are there. A thread notices the interrupt instead.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._over = threading.Event()
        self._before: set[int | signal.Signals] | None = None

    @contextmanager
    def watched(self, trainer: Trainer) -> Iterator[None]:
        """A context that watches until the processes have met; only where this process has started the others."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or not hasattr(trainer.strategy.launcher, "procs"):
            yield
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=self._wait, args=(reader, trainer), daemon=True, name="interrupted-start")
        thread.start()
        # Processes inherit what their parent's thread blocks. Without this, one that is interrupted in its first
        # moments, before it can ignore interrupts, would print a traceback. Here, the thread above gets the signal.
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            self._met()
            signal.set_wakeup_fd(before)
            writer.close()  # ends the thread
            thread.join()
            reader.close()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The processes have met: from here on, Lightning ends an interrupted run in good order."""
        self._met()

    def _met(self) -> None:
        self._over.set()
        if self._before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
            self._before = None

    def _wait(self, reader: socket.socket, trainer: Trainer) -> None:
        while number := reader.recv(1):
            if number[0] == signal.SIGINT and not self._over.wait(_GRACE_S):
                launcher: Any = trainer.strategy.launcher
                launcher.kill(signal.SIGKILL)
                say(goes_on_with(self._folder, sys.argv))
                os._exit(INTERRUPTED)  # the main thread cannot be reached
