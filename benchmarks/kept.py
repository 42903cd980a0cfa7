"""Results of trainings that take long: each is kept in a file, and a later call reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def kept(file: Path, is_late: bool, make: Callable[[], Result]) -> Result | None:
    """Returns the result in a file, or makes it and writes the file.

    Args:
        file: JSON.
        is_late: whether nothing is to be made any more.
        make: makes the result, in values that JSON has.

    Returns:
        None if the file is not there, and it is late.
    """
    if file.exists():
        found: Result = json.loads(file.read_text())
        return found
    if is_late:
        return None
    made = make()
    # An interrupt must not leave half a file, which no later call could read.
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(made))
    beside.replace(file)
    return made
