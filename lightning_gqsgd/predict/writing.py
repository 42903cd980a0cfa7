"""Whether a file can be written, asked before the work whose result it is to hold."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_gqsgd.errors import ConfigError


def check_writable(option: str, file: Path) -> None:
    """Check that a file can be created or replaced. Nothing is written.

    Args:
        option: where the file's name is from, for messages.
        file: the file.

    Raises:
        ConfigError: there is no such folder, the file is no regular one, or neither may be written to.
    """
    reason = _reason_against(file)
    if reason:
        raise ConfigError(f"{option} {file} cannot be written: {reason}; name a file in a folder that you may write to")


def _reason_against(file: Path) -> str:
    """Why a file cannot be written; empty if nothing is known against it."""
    try:
        if not file.parent.is_dir():
            return f"there is no folder {file.parent}"
        if file.is_dir():
            return "it is a folder"
        if file.exists():
            # A device such as /dev/full can be opened, and fails when the work is done.
            return "" if file.is_file() and os.access(file, os.W_OK) else "it is no regular file that may be replaced"
        return "" if os.access(file.parent, os.W_OK | os.X_OK) else f"the folder {file.parent} is not writable"
    except (OSError, ValueError) as error:  # e.g. a name that is too long, or has a null byte
        return str(getattr(error, "strerror", None) or error)
