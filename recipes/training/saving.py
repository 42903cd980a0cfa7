"""Checkpoints that replace an earlier one only when they are whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO


class WholeCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint beside its place, and moves it there afterwards.

    Lightning writes it to the folder of temporary files. From another file system, that file is copied over the earlier
    checkpoint, and a run that is killed meanwhile, or that finds no room, leaves neither.
    """

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint to a path; one that is no path of this machine is left to Lightning."""
        if "://" in str(path):
            super().save_checkpoint(dict(checkpoint), path, storage_options)
            return
        part = Path(f"{path}.part")
        try:
            super().save_checkpoint(dict(checkpoint), part, storage_options)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
