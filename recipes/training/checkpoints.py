"""The checkpoint that a run goes on from, and what is said of it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig

from recipes.errors import RecipeError
from recipes.files import FULL_DISK, RESULT_FILE, WANDB_ID_FILE, denied, read_json

CHECKPOINTS = "checkpoints"
#: Folder in that of a run, in which W&B keeps what it has not uploaded.
WANDB = "wandb"
LAST = "last.ckpt"


class FullDiskError(RecipeError):
    """A training that has found no more room for its files; the message names the remedy."""


def find_checkpoint(cfg: DictConfig, folder: Path) -> str | None:
    """The checkpoint to go on from, or None for a new run.

    With ``resume=true`` this is the checkpoint in the run's own folder, or else the newest one in the folders of
    earlier runs of the same experiment, strategy and seed.

    Raises:
        RecipeError: a checkpoint is asked for, and there is none.
    """
    if cfg.ckpt_path:
        if denied(Path(cfg.ckpt_path)):
            raise RecipeError(f"ckpt_path={cfg.ckpt_path} may not be read by this user; ask its owner, or copy it")
        if not Path(cfg.ckpt_path).is_file():
            raise RecipeError(f"ckpt_path={cfg.ckpt_path} is not a file; name a {LAST}, or take resume=true")
        return str(cfg.ckpt_path)
    if not cfg.resume:
        return None
    own = folder / CHECKPOINTS / LAST
    if own.is_file():
        return str(own)
    earlier = sorted(Path(cfg.run_root).glob(f"*/{CHECKPOINTS}/{LAST}"), key=lambda file: file.stat().st_mtime)
    if not earlier:
        raise RecipeError(
            f"resume=true: there is no {CHECKPOINTS}/{LAST} in {folder} nor in any folder of {cfg.run_root}; "
            "leave resume out for a new run, or name a file with ckpt_path=PATH"
        )
    return str(earlier[-1])


def carry_wandb_id(checkpoint: str | None, folder: Path) -> None:
    """Give a run that goes on the id of the W&B run that it continues, and links to what waits for an upload of it.

    The command that uploads the offline runs of its folder then uploads the whole W&B run. A new run has no id.
    """
    own = folder / WANDB_ID_FILE
    if checkpoint is None:
        own.unlink(missing_ok=True)
        return
    earlier = Path(checkpoint).parents[1] / WANDB_ID_FILE
    if earlier.is_file() and not own.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        own.write_text(earlier.read_text())
        _link_offline_runs(earlier.parent / WANDB, folder / WANDB, own.read_text().strip())


def _link_offline_runs(earlier: Path, own: Path, run: str) -> None:
    """Make links to the offline parts of a W&B run that an earlier training has left."""
    for part in earlier.glob(f"offline-run-*-{run}"):
        own.mkdir(exist_ok=True)
        link = own / part.name
        if not link.exists():
            link.unlink(missing_ok=True)  # a link to what is gone
            link.symlink_to(os.path.relpath(part.resolve(), own.resolve()))


def clear_earlier_run(checkpoint: str | None, folder: Path) -> None:
    """Remove what an earlier run has left in a folder, and what would be taken for this run's if this run is killed.

    The checkpoint that this run goes on from stays.
    """
    (folder / RESULT_FILE).unlink(missing_ok=True)
    if checkpoint is None:
        (folder / CHECKPOINTS / LAST).unlink(missing_ok=True)


def finished_message(cfg: DictConfig, checkpoint: str) -> str | None:
    """What is said of a checkpoint whose run has nothing left to train; None if there is something left."""
    result = Path(checkpoint).parents[1] / RESULT_FILE
    facts = read_json(result)
    if not isinstance(facts, dict):
        return None  # the run has not ended, or its end has not been written whole
    max_epochs, max_steps = cfg.trainer.max_epochs, cfg.trainer.max_steps
    all_epochs = max_epochs not in (None, -1) and facts["epochs"] >= max_epochs
    all_steps = max_steps not in (None, -1) and facts["steps"] >= max_steps
    if not all_epochs and not all_steps:
        return None
    limit = f"trainer.max_epochs={max_epochs}" if all_epochs else f"trainer.max_steps={max_steps}"
    return (
        f"nothing to go on with: the run of {checkpoint} is finished ({limit}), and nothing has been written; its "
        f"result is {result}; raise {limit.partition('=')[0]} to train longer"
    )


@contextmanager
def full_disk_in_one_line(folder: Path) -> Iterator[None]:
    """A context in which a disk that takes no more bytes ends a training with one line, that of `FullDiskError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        checkpoint = folder / CHECKPOINTS / LAST
        remedy = f"go on with ckpt_path={checkpoint}" if checkpoint.is_file() else "start again"
        raise FullDiskError(
            f"no more room for the files of {folder} ({error.strerror}); make room, and {remedy}"
        ) from error


def goes_on_with(folder: Path, command: Sequence[str]) -> str:
    """Where the checkpoint of an interrupted run is, and the command that goes on from it."""
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
