"""The errors that end a run with one line instead of a traceback."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
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

    Args:
        message: the message.
        of_one_process: whether one process alone may find it; all others are found by every process of a run.
    """

    def __init__(self, message: str, *, of_one_process: bool = False) -> None:
        super().__init__(message)
        self.of_one_process = of_one_process


class DivergedError(RecipeError):
    """A training whose loss or weights ended as no finite numbers; the message names the remedy."""


def check_installed(module: str, what: str, package: str, extra: str) -> None:
    """Refuse what needs a module of a package that is not installed; the module is not imported."""
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        is_there = False
    if not is_there:
        raise RecipeError(f"{what} needs {package}; install it: uv sync --extra {extra}, or pip install {package}")
