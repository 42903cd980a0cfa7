"""The errors that end a run with one line instead of a traceback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def typed(value: Any) -> str:
    """A value as it is typed on a command line, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return str(value).replace(" ", "").replace("'", "")
    return str(value)


class RecipeError(RuntimeError):
    """A run that cannot be made as asked; the message names the reason and the remedy.

    Attributes:
        of_one_process: whether one process alone finds it; all others are found by every process of a run.
    """

    of_one_process = False


class DivergedError(RecipeError):
    """A training whose loss or weights ended as no finite numbers; the message names the remedy."""


class DataError(RecipeError):
    """Data that are absent, or are not what the configuration says; the message names the remedy."""


class OtherDataError(DataError):
    """A process has other data than process 0; the message names both."""

    of_one_process = True


class ModelError(RecipeError, ValueError):
    """A network that cannot be built as asked; the message names the setting."""


class OverrideError(RecipeError):
    """An override that no configuration has; the message names the override that was probably meant."""
