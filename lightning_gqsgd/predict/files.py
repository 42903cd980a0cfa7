"""Reads JSON files, and checks their values, and whether a file can be written.

Each check of a value returns it with the type in the function's name. ``value`` is the value in the file, and ``what``
is its place there, for errors. If the value has another type or is out of range, the check raises a ConfigError that
names the place and the value.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from lightning_gqsgd.errors import MAX_INTEGER, ConfigError

T = TypeVar("T")

#: Bytes of the largest file that is read. A probe with timelines of several large models has less than 1 MB.
MOST_BYTES = 16 << 20


def json_in(path: Path, remedy: str) -> Any:
    """Returns the contents of a JSON file.

    Raises:
        ConfigError: if it cannot be read, is no regular file, e.g. a device that never ends, is too large, or is no
            JSON. The message ends with ``remedy``.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            problem = "is not a regular file"
        elif status.st_size > MOST_BYTES:
            problem = f"has {status.st_size:,} bytes, more than {MOST_BYTES:,}"
        else:
            return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        problem = "is not JSON"
    raise ConfigError(f"{path} {problem}; {remedy}")


def entries(value: object, what: str, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Returns a dictionary.

    Args:
        value: the value in the file.
        what: its place there, for errors.
        names: the exact keys of the dictionary; None allows any keys.
    """
    if not isinstance(value, Mapping):
        raise _error(value, what, "a dictionary")
    if names is not None and set(value) != set(names):
        missing = [name for name in names if name not in value]
        unknown = [str(name) for name in value if name not in names]
        words = [f"without {', '.join(missing)}"] if missing else []
        words += [f"with the unknown {', '.join(unknown)}"] if unknown else []
        raise ConfigError(f"{what} is a dictionary {' and '.join(words)}")
    return dict(value)


def rows(value: object, what: str, length: int | None = None) -> list[Any]:
    """Returns a list; ``length`` is its required length."""
    if not isinstance(value, list) or (length is not None and len(value) != length):
        raise _error(value, what, "a list" if length is None else f"a list of {length} values")
    return value


def number(value: object, what: str) -> float:
    """Returns a finite number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise _error(value, what, "a finite number from 0 on")
    return value


def above_0(value: object, what: str) -> float:
    """Returns a finite number above 0."""
    found = number(value, what)
    if found == 0:
        raise _error(value, what, "a number above 0")
    return found


def integer(value: object, what: str, least: int = 0) -> int:
    """Returns an integer of 63 bits that is at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_INTEGER:
        raise _error(value, what, f"an integer from {least} on")
    return value


def flag(value: object, what: str) -> bool:
    """Returns True or False, or 1 or 0."""
    if value not in (0, 1) or not isinstance(value, int):
        raise _error(value, what, "true or false")
    return bool(value)


def text(value: object, what: str) -> str:
    """Returns a string."""
    if not isinstance(value, str):
        raise _error(value, what, "a string")
    return value


def numbers(kind: type[T], value: object, what: str) -> T:
    """Returns a dataclass whose fields are all numbers, see `number` and `arguments`."""
    return kind(**{name: number(entry, f"{what}.{name}") for name, entry in arguments(kind, value, what).items()})


def arguments(kind: type[Any], value: object, what: str) -> dict[str, Any]:
    """Returns the arguments of a dataclass, which are a dictionary. Fields with a default may be missing."""
    given = entries(value, what)
    wanted = tuple(field.name for field in fields(kind) if field.default is MISSING or field.name in given)
    return entries(given, what, wanted)


def _error(value: object, what: str, expected: str) -> ConfigError:
    return ConfigError(f"{what} is {value!r:.100}, and not {expected}")


def check_writable(option: str, file: Path) -> None:
    """Check that a file can be created or replaced, before its contents are computed. Nothing is written.

    Args:
        option: the option that names the file, for errors.
        file: the file.

    Raises:
        ConfigError: if there is no such folder, if the file is no regular file, or if one of them is not writable.
    """
    reason = _reason_against(file)
    if reason:
        raise ConfigError(f"{option} {file} cannot be written: {reason}; name a file in a folder that you may write to")


def _reason_against(file: Path) -> str:
    """Returns the reason why a file cannot be written; empty if none is known."""
    try:
        if not file.parent.is_dir():
            return f"there is no folder {file.parent}"
        if file.is_dir():
            return "it is a folder"
        if file.exists():
            # A device such as /dev/full can be opened, and fails when the work is done.
            return (
                "" if file.is_file() and os.access(file, os.W_OK) else "it is not a regular file that may be replaced"
            )
        return "" if os.access(file.parent, os.W_OK | os.X_OK) else f"the folder {file.parent} is not writable"
    except (OSError, ValueError) as error:  # e.g. a name that is too long, or has a null byte
        return str(getattr(error, "strerror", None) or error)
