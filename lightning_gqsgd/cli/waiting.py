"""What a terminal shows of a command that takes a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

#: Seconds after which a command says what it does.
PATIENCE_S = 2.0


@contextmanager
def status(first: str, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """A context in which a terminal shows a line with what is under way, once it takes longer than `PATIENCE_S`.

    Args:
        first: what is under way at first.
        console: where the line is; None: standard error. Nothing is shown where that is no terminal.

    Yields:
        A function that takes the words for what comes next.
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
