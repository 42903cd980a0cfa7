"""What a run says when somebody interrupts it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from recipes.training.checkpoints import CHECKPOINTS, LAST


def goes_on_with(folder: Path, command: Sequence[str]) -> str:
    """Where the checkpoint of an interrupted run is, and the command that goes on from it.

    Args:
        folder: folder of the run.
        command: script and arguments of the run, as they were typed.
    """
    script, *arguments = command
    kept = [word for word in arguments if word.partition("=")[0].lstrip("+") not in ("resume", "ckpt_path")]
    checkpoint = folder / CHECKPOINTS / LAST
    if not checkpoint.is_file():
        again = shlex.join(["python", script, *arguments])
        return (
            f"\ninterrupted before the first checkpoint, which follows the first validation; to start again:\n  {again}"
        )
    again = shlex.join(["python", script, *kept, f"ckpt_path={checkpoint}"])
    return f"\ninterrupted; the checkpoint of the last validation is {checkpoint}\nto go on from it:\n  {again}"
