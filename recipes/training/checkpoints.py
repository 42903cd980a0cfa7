"""The checkpoint that a run goes on from."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from recipes.errors import RecipeError

CHECKPOINTS = "checkpoints"
LAST = "last.ckpt"


class CheckpointError(RecipeError):
    """A run that is to go on from a checkpoint that does not exist; the message names the remedy."""


def find_checkpoint(cfg: DictConfig, folder: Path) -> str | None:
    """The checkpoint to go on from, or None for a new run.

    With ``resume=true`` this is the checkpoint in the run's own folder, or else the newest one in the folders of
    earlier runs of the same experiment, strategy and seed.

    Args:
        cfg: configuration of the run.
        folder: folder of the run.

    Raises:
        CheckpointError: a checkpoint is asked for, and there is none.
    """
    if cfg.ckpt_path:
        if not Path(cfg.ckpt_path).is_file():
            raise CheckpointError(f"ckpt_path={cfg.ckpt_path} is no file; name a {LAST}, or take resume=true")
        return str(cfg.ckpt_path)
    if not cfg.resume:
        return None
    own = folder / CHECKPOINTS / LAST
    if own.is_file():
        return str(own)
    earlier = sorted(Path(cfg.run_root).glob(f"*/{CHECKPOINTS}/{LAST}"), key=lambda file: file.stat().st_mtime)
    if not earlier:
        raise CheckpointError(
            f"resume=true: there is no {CHECKPOINTS}/{LAST} in {folder} nor in any folder of {cfg.run_root}; "
            "leave resume out for a new run, or name a file with ckpt_path=PATH"
        )
    return str(earlier[-1])
