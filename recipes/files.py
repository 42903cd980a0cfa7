"""The files in the folder of a run: their names, and reading those that need not be there."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

#: Every logged metric, a row per logging step.
METRICS_FILE = "metrics.csv"
#: The finished run in numbers.
RESULT_FILE = "result.json"
#: The id of the run in W&B, under which a resumed run continues.
WANDB_ID_FILE = "wandb_id.txt"
#: What a write to a place that takes no more bytes ends with.
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def metrics_bytes(folder: Path) -> int:
    """Returns the length of a run's ``metrics.csv`` in bytes; 0 if the run has logged nothing."""
    file = folder / METRICS_FILE
    return file.stat().st_size if file.is_file() else 0


def denied(place: Path) -> bool:
    """Returns whether a file or folder may not be read by this user, so that nobody can say whether it exists or what
    it holds."""
    try:
        place.stat()
    except FileNotFoundError:
        return False
    except OSError as error:
        return isinstance(error, PermissionError)
    return not os.access(place, os.R_OK | (os.X_OK if place.is_dir() else 0))


def read_json(file: Path) -> Any:
    """What a JSON file holds; None if there is no such file, or if it holds something else."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None
