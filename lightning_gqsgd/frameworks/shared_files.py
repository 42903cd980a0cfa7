"""Files that every process of a training has to see, under Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather

from lightning_gqsgd.errors import ConfigError


def is_seen(file: Path, accelerator: Any) -> bool:
    """Returns whether all processes see a file; False if none does. A collective.

    With dither that differs among ranks, no rank could decode the messages of the others.

    Args:
        file: the path, the same in all processes.
        accelerator: the `accelerate.Accelerator` of the training.

    Raises:
        ConfigError: some processes see the file, and others do not.
    """
    seen = gather(torch.tensor([int(file.is_file())], device=accelerator.device)).tolist()
    if len(set(seen)) > 1:
        seeing = [rank for rank, sees in enumerate(seen) if sees]
        raise ConfigError(
            f"of {len(seen)} ranks only {seeing} see {file}, and all have to continue from it; "
            "resume from a folder that all see, or that was copied to every machine"
        )
    return bool(seen[0])
