"""An interrupt, or SIGTERM, while the processes of a run are starting."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from recipes.opening import say
from recipes.training.checkpoints import goes_on_with

#: Signals that end a run at once. By itself, SIGTERM would end the first process alone.
_ENDED_BY = (signal.SIGINT, signal.SIGTERM)

#: Seconds in which the processes that are being started are all known.
_STARTED_S = 5.0


class InterruptedStart(Callback):
    """Ends a run at once that is interrupted before its processes have met.

    The first process waits for the others, which are loading torch, and it waits inside of torch: Python would notice
    the interrupt only when the others are there. A thread notices the interrupt instead, and SIGTERM as well.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._watch = ExitStack()

    @contextmanager
    def watched(self, trainer: Trainer) -> Iterator[None]:
        """A context that watches until the processes have met; only where this process has started the others."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or not hasattr(trainer.strategy.launcher, "procs"):
            yield
            return
        with self._watch:
            self._begin(trainer.strategy.launcher)
            yield

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The processes have met: from here on, Lightning ends an interrupted run in good order."""
        self._watch.close()

    def _begin(self, launcher: Any) -> None:
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        thread = threading.Thread(target=self._wait, args=(reader, launcher), daemon=True, name="interrupted-start")
        thread.start()
        self._watch.callback(reader.close)
        self._watch.callback(thread.join)
        self._watch.callback(writer.close)  # ends the thread
        woken = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._watch.callback(signal.set_wakeup_fd, woken)
        # Not a KeyboardInterrupt as well: it could come after a process is started and before Lightning knows it, and
        # Python takes seconds to end in good order.
        for number in _ENDED_BY:
            handler = signal.signal(number, lambda *_: None)
            self._watch.callback(signal.signal, number, handler)
        # Processes inherit what their parent's thread blocks. Without this, one that is interrupted in its first
        # moments, before it can ignore interrupts, would print a traceback. Here, the thread above gets the signal.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._watch.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)

    def _wait(self, reader: socket.socket, launcher: Any) -> None:
        while number := reader.recv(1):
            if number[0] in _ENDED_BY:
                ends = time.monotonic() + _STARTED_S
                while len(launcher.procs) < launcher.num_processes - 1 and time.monotonic() < ends:
                    time.sleep(0.01)
                launcher.kill(signal.SIGKILL)
                say(goes_on_with(self._folder, sys.argv))
                os._exit(128 + number[0])  # as shells have it; the main thread cannot be reached
