"""How a training says what `auto` has decided, where no framework prints for it."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

logger = logging.getLogger(__name__)


def say(text: str) -> None:
    """Log a line at level INFO, or print it to stderr where no logging was set up.

    Decisions change the results of a training, so that they should be seen by default. Python itself drops what is
    logged at level INFO where nothing was set up.
    """
    if logger.hasHandlers():
        logger.info("%s", text)
    else:
        print_to_stderr(text)


def print_to_stderr(text: str) -> None:
    """Print a line to stderr, if that is open: a training should not end because nobody can read of it."""
    with suppress(OSError, ValueError):  # closed at its other end, or at this one
        print(text, file=sys.stderr, flush=True)
