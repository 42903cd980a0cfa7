"""Folders that a command is about to write to. Nothing heavy is imported: folders are checked before torch is."""

from __future__ import annotations

import tempfile
from pathlib import Path

from recipes.errors import RecipeError


class FolderError(RecipeError):
    """A folder that nothing can be written to; the message names the remedy."""


def check_writable(key: str, folder: str | Path) -> None:
    """Check that a folder can be made, or is there, and takes files. Nothing is left in it.

    Args:
        key: the setting that names the folder.
        folder: the folder; it need not exist.

    Raises:
        FolderError: the folder, or one above it, is a file, or takes no files.
    """
    path = Path(folder).absolute()
    try:
        existing = next(place for place in (path, *path.parents) if place.exists())
        if not existing.is_dir():
            raise FolderError(f"{key}={folder}: {existing} is no folder; name a folder that can be written to")
        # Permissions alone do not tell: root has them in /proc, and on a disk that is full or read-only.
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise FolderError(f"{key}={folder} cannot be written to ({reason}); name a folder that can") from error
