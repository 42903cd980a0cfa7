"""The exceptions of the package, and helpers that build and check their messages."""

from __future__ import annotations

import difflib
import importlib
import json
import math
import numbers
from collections.abc import Iterable
from typing import Any, TypeGuard

#: The largest integer in configurations, states and files: numbers of steps, seeds and levels have 63 bits.
MAX_INTEGER = 2**63 - 1


class ConfigError(ValueError):
    """Raised for a configuration that cannot work. The message names the value, the limit and the remedy."""


class CollectiveError(RuntimeError):
    """Raised if a collective fails. The message names the rank, the collective and the remedy."""


class PackageError(ConfigError, ImportError):
    """Raised if a package that a feature needs is not installed, or cannot be loaded."""


def import_optional(module: str, package: str, feature: str, instead: str) -> Any:
    """Returns a module of a package that few features need.

    Args:
        module: the module's full name.
        package: the package's name on PyPI.
        feature: what needs it, for the message.
        instead: what to do without it, for the message.

    Raises:
        PackageError: the package is not installed, or cannot be loaded.
    """
    top = module.partition(".")[0]
    try:
        importlib.import_module(top)
        return importlib.import_module(module)
    except Exception as error:  # e.g. a RuntimeError of torchvision next to another torch
        raise PackageError(f"{feature} needs {package}, which {lack_of(top, error)} {package}, or {instead}") from error


def lack_of(package: str, error: Exception) -> str:
    """Returns why the import of a package has failed, and the command that mends it, without the name to install."""
    # Where only a part of the package is missing, such as its compiled code, the package is there.
    if isinstance(error, ModuleNotFoundError) and error.name == package:
        return "is not installed: pip install"
    return f"cannot be loaded ({first_line(error)}): pip install --force-reinstall"


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Returns the choice nearest to an unknown name, as the end of a sentence; empty if no choice is near. Upper and
    lower case are alike."""
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


def describe_difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Returns the entries in which two flat dictionaries differ, as ``name: mine != theirs``."""
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    return ", ".join(f"{name}: {json.dumps(mine.get(name))} != {json.dumps(theirs.get(name))}" for name in names)


def listed(names: list[str]) -> str:
    """Returns the first three names in quotes, and the number of the others."""
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Returns a number and its noun, in the plural unless the number is one: ``1 tensor``, ``2,000 tensors``.

    Args:
        number: the number.
        noun: the noun in the singular.
        plural: the noun in the plural, if it is not the singular plus an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text; the error's type if it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def check_one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    """Raise ConfigError for a value that is not among the allowed ones."""
    allowed = tuple(allowed)
    if value not in allowed:
        hint = did_you_mean(value, allowed) if isinstance(value, str) else ""
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}{hint}")


def plain_integer(value: Any) -> Any:
    """Returns a Python integer for an integer of another library, such as NumPy, and any other value unchanged."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value


def check_positive(**values: object) -> None:
    """Raise ConfigError for a value that is no finite number above 0."""
    for name, value in values.items():
        if not (_is_finite(value) and value > 0):
            raise ConfigError(f"{name}={value!r} must be a finite number above 0")


def check_at_least(low: float, **values: object) -> None:
    """Raise ConfigError for a value that is no finite number of at least ``low``."""
    for name, value in values.items():
        if not (_is_finite(value) and value >= low):
            raise ConfigError(f"{name}={value!r} must be a finite number of at least {low}")


def check_whole(low: int = 1, high: int = MAX_INTEGER, /, **values: object) -> None:
    """Check several values; see `check_integer`."""
    for name, value in values.items():
        check_integer(name, value, low, high)


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raise ConfigError for a value that is no integer, or outside a range that includes both ends."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} must be an integer from {low} to {high}")
    if not low <= value <= high:
        raise ConfigError(f"{name}={value} is out of range: {low} to {high}")


def check_real(name: str, value: object, low: float, high: float) -> None:
    """Raise ConfigError for a value that is no number, or outside a range that includes both ends."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name}={value!r} must be a number from {low} to {high}")
    if not low <= value <= high:
        raise ConfigError(f"{name}={value} is out of range: {low} to {high}")


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
