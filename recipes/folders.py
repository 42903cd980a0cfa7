"""Folders that a command is about to write to. Nothing heavy is imported: folders are checked before torch is."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes.errors import RecipeError


def check_writable(key: str, folder: str | Path) -> None:
    """Check that a folder can be made, or is there, and takes files. Nothing is left in it."""
    path = Path(folder).absolute()
    try:
        existing = next(place for place in (path, *path.parents) if place.exists())
        if not existing.is_dir():
            raise RecipeError(f"{key}={folder}: {existing} is not a folder; name a folder that can be written to")
        # Permissions alone do not tell: root has them in /proc, and on a disk that is full or read-only.
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise RecipeError(f"{key}={folder} cannot be written to ({reason}); name a folder that can") from error


@contextmanager
def claimed(key: str, folder: Path) -> Iterator[None]:
    """A context in which no other process can claim a folder. Two runs in one folder would mix their files.

    The claim is a lock of the folder itself, which ends with this process, however it ends. A file system that has no
    such locks keeps no other process out.
    """
    place = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecipeError(
                f"{folder} is in use: another process writes to it; wait until that has ended, or name another folder "
                f"with {key}=FOLDER"
            ) from error
        except OSError:
            pass  # no locks here
        yield
    finally:
        os.close(place)
