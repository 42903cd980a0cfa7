"""A comparison in W&B: a run with its table and plots, a workspace, and one folder with all that is still offline."""

from __future__ import annotations

import csv
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from recipes.comparison.plan import Cell, Plan
from recipes.comparison.workspace import PLOTS, TABLE, Definition, WorkspaceError, save_workspace
from recipes.tasks.loggers import start_wandb, wandb_mode
from recipes.tasks.metrics import Metric

JOB_TYPE = "comparison"
WORKSPACE_FILE = "workspace.json"


def publish(plan: Plan, metric: Metric, title: str, files: Sequence[Path], console: Console) -> None:
    """Log a comparison whose cells were logged to W&B; prints where it is, or how to upload it. Else nothing happens.

    The comparison's files are only read. Whatever W&B does, there is one line about it and no exception.

    Args:
        plan: whose finished cells belong together.
        metric: of the task.
        title: of the comparison's run.
        files: its tables and pictures; ``table.csv`` is among them.
        console: where the lines go.
    """
    cells = [cell for cell in plan.cells if cell.config["logger"]["name"] == "wandb" and cell.is_finished()]
    if not cells:
        return
    if wandb_mode() == "disabled":
        console.print("W&B: WANDB_MODE=disabled, nothing is logged", highlight=False)
        return
    folder = plan.folder / "wandb"
    _clear(folder)
    try:
        url = _log(plan, cells[0], title, files)
    except Exception as error:  # W&B and its transports have several families of errors
        console.print(f"W&B: the table is not logged: {_first_line(error)}", style="yellow", markup=False)
        url = None
    if url:
        console.print(f"W&B: {url}", highlight=False)
    if _gather(folder, cells):
        console.print(f"W&B: upload what is offline with: {_sync_command(folder)}", highlight=False, markup=False)
    logger = cells[0].config["logger"]
    plots = tuple(file.stem for file in files if file.suffix == ".png")
    definition = Definition(
        logger["group"], metric.key, logger["project"], logger["entity"], grouping([c.config for c in cells]), plots
    )
    _workspace(definition, plan.folder / WORKSPACE_FILE, console)


def grouping(configs: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Keys of the configuration that tell variants apart: strategy.name, then what else differs, seeds left out.

    A group of the configuration that has a name stands for all that is in it.
    """
    flat = [dict(_flattened(config)) for config in configs]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    differing = [key for key in keys if len({repr(one.get(key)) for one in flat}) > 1]
    named = {key.removesuffix("name") for key in differing if key.endswith(".name")}
    rest = [key for key in differing if key.endswith(".name") or not any(key.startswith(name) for name in named)]
    return ("strategy.name", *(key for key in rest if key not in ("strategy.name", "run_root", *SEEDS)))


#: What follows from the seed.
SEEDS = ("seed", "data.seed")


def _flattened(config: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs = []
    for key, value in config.items():
        if isinstance(value, dict):
            pairs += _flattened(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs


def _log(plan: Plan, cell: Cell, title: str, files: Sequence[Path]) -> str | None:
    """The comparison's run: table, pictures, and all files as an artifact; returns its URL, None offline."""
    import wandb

    settings = cell.config["logger"]
    run = start_wandb(
        str(plan.folder),
        silent=True,
        project=settings["project"],
        entity=settings["entity"],
        name=title,
        group=settings["group"],
        job_type=JOB_TYPE,
        tags=list(dict.fromkeys([cell.config["title"], JOB_TYPE, *settings["tags"]])),
        # A workspace groups by the strategy's name: the comparison's run gets one as well.
        config={"title": cell.config["title"], "compare": cell.config["compare"], "strategy": {"name": JOB_TYPE}},
    )
    try:
        artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", settings["group"], flags=re.ASCII), type=JOB_TYPE)
        # Copies: an artifact of an offline run is read when it is uploaded, and a later comparison writes new files.
        kept = Path(run.dir).parent / JOB_TYPE
        kept.mkdir()
        for file in files:
            artifact.add_file(str(shutil.copy(file, kept)), policy="immutable", skip_cache=True)
        run.log(
            {
                TABLE: _table(next(file for file in files if file.name == "table.csv")),
                **{f"{PLOTS}/{file.stem}": wandb.Image(str(file)) for file in files if file.suffix == ".png"},
            }
        )
        run.log_artifact(artifact)
        return str(run.url) if run.url else None
    finally:
        run.finish()


def _table(file: Path) -> Any:
    """``table.csv`` as a W&B table: numbers where a column holds nothing else."""
    import wandb

    with open(file, newline="") as lines:
        head, *rows = csv.reader(lines)
    columns = [_numbers(column) for column in zip(*rows, strict=True)]
    return wandb.Table(columns=head, data=[list(row) for row in zip(*columns, strict=True)])


def _numbers(column: Sequence[str]) -> list[Any]:
    try:
        return [float(value) for value in column]
    except ValueError:
        return list(column)


def _clear(folder: Path) -> None:
    """Take away what an earlier comparison has left to upload: it was of other files and cells."""
    for old in folder.glob("offline-run-*"):
        if old.is_symlink():
            old.unlink()
        else:
            shutil.rmtree(old)


def _gather(folder: Path, cells: Sequence[Cell]) -> bool:
    """Link the cells' offline runs into ``folder``; returns whether there is any offline run in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        for run in (cell.folder / "wandb").glob("offline-run-*"):
            link = folder / run.name
            if not link.exists():
                link.symlink_to(os.path.relpath(run, folder))
    return any(folder.glob("offline-run-*"))


def _sync_command(folder: Path) -> str:
    return f"wandb sync {shlex.quote(str(folder))}/offline-run-*"


def _workspace(definition: Definition, file: Path, console: Console) -> None:
    try:
        url = save_workspace(definition, file)
    except Exception as error:  # a comparison never fails because of its dashboard
        reason = str(error) if isinstance(error, WorkspaceError) else f"workspace: {_first_line(error)}"
        console.print(f"W&B: {reason}; again with: {definition.command}", style="yellow", markup=False)
        return
    console.print(f"W&B workspace: {url or file}", highlight=False, markup=False)
    if url is None:
        console.print(f"W&B: create it after `wandb login` with: {definition.command}", highlight=False, markup=False)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
