"""The progress line of a command that takes a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

#: Seconds after which the line appears.
PATIENCE_S = 2.0


@contextmanager
def status(first: str, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Show a progress line in this context, once it takes longer than `PATIENCE_S`.

    Args:
        first: the words of the line at first.
        console: where the line is; None: standard error. Nothing is shown where that is no terminal.

    Yields:
        A function that changes the words.
    """
    console = Console(stderr=True) if console is None else console
    line = console.status(first)
    timer = threading.Timer(PATIENCE_S, line.start)
    timer.daemon = True
    if console.is_terminal:
        timer.start()
    try:
        yield lambda words: line.update(words)
    finally:
        timer.cancel()
        if timer.is_alive():
            timer.join()
        line.stop()
