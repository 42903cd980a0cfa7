"""Results of trainings that take long: each is kept in a file, and a later call reads it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def kept(file: Path, end: float, make: Callable[[], Result]) -> Result | None:
    """Returns the result in a file, or makes it and writes the file; None if it is not there, and ``end`` of the
    monotonic clock is over."""
    if file.exists():
        found: Result = json.loads(file.read_text())
        return found
    if time.monotonic() > end:
        return None
    made = make()
    # An interrupt must not leave half a file, which no later call could read.
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(made))
    beside.replace(file)
    return made
