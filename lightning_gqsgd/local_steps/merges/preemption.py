"""Handles SIGTERM, by which clouds and schedulers announce that a machine will be taken away."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class PreemptionNotice:
    """Listens for SIGTERM.

    An existing handler, such as Lightning's, is called as well. Python allows handlers only in the main thread; in
    other threads, no notice is ever given.

    Args:
        is_over: function that returns whether nobody looks at the notice any more. The signal then does what it would
            do without this.

    Attributes:
        was_given: whether SIGTERM was received.
    """

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self.was_given = False
        self._is_over = is_over
        self._process = os.getpid()
        self._before: Any = None
        self._listens = threading.current_thread() is threading.main_thread()
        if self._listens:
            self._before = signal.signal(signal.SIGTERM, self._take)

    def close(self) -> None:
        """Restore the previous handler, unless another handler was installed since."""
        if self._listens and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._take:
                signal.signal(signal.SIGTERM, self._before)
            self._listens = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        # A forked process does not train either.
        if os.getpid() != self._process or self._is_over():
            signal.signal(number, signal.SIG_DFL if self._before is None else self._before)
            signal.raise_signal(number)
            return
        self.was_given = True
        if callable(self._before):
            self._before(number, frame)
