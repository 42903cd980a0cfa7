"""A comparison in W&B: a run with its table and plots, a workspace, and one folder with every offline run."""

from __future__ import annotations

import csv
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_gqsgd.errors import first_line
from recipes.comparison.finished import Finished, Found
from recipes.comparison.grouping import grouping
from recipes.comparison.plan import Plan
from recipes.comparison.workspace import PLOTS, TABLE, Definition, save_workspace
from recipes.errors import RecipeError
from recipes.loggers.chosen import wandb_settings
from recipes.loggers.labels import Labels
from recipes.loggers.wandb_client import start_wandb, wandb_mode
from recipes.measuring.metrics import Metric

JOB_TYPE = "comparison"
WORKSPACE_FILE = "workspace.json"


def publish(plan: Plan, metric: Metric, title: str, files: Sequence[Path], console: Console) -> None:
    """Log a comparison whose cells were logged to W&B, and print where it is, or how to upload it.

    Nothing happens if the cells were not logged to W&B. The files of the comparison, ``table.csv`` among them, are only
    read. An error of W&B becomes one printed line, never an exception.
    """
    cells = [cell for cell in plan.cells if wandb_settings(cell.config) is not None and cell.is_finished()]
    if cells:
        config = cells[0].config
        by = grouping([cell.config for cell in cells])
        shown = Shown(wandb_settings(config)["group"], plan.folder, [cell.folder for cell in cells], config, by)
        publish_runs(shown, metric, title, files, console)


@dataclass(frozen=True)
class Shown:
    """Finished runs that were logged to W&B, and that a comparison shows together.

    Attributes:
        group: W&B group of the comparison's own run, which is also the name of the workspace.
        folder: folder of the comparison.
        runs: folders of the runs.
        config: configuration of one of the runs: project, entity and tags are the same for all.
        by: keys of the configuration; runs with equal values share a line of the workspace.
        more_groups: further W&B groups that runs are in.
    """

    group: str
    folder: Path
    runs: Sequence[Path]
    config: Mapping[str, Any]
    by: tuple[str, ...]
    more_groups: tuple[str, ...] = ()


def publish_runs(shown: Shown, metric: Metric, title: str, files: Sequence[Path], console: Console) -> None:
    """Log a comparison of runs that were logged to W&B, see `publish`."""
    if wandb_mode() == "disabled":
        console.print("W&B: WANDB_MODE=disabled, nothing is logged", highlight=False)
        return
    for step in (
        lambda: _log(shown, title, files),
        lambda: _gather(shown.folder, shown.runs),
        lambda: _workspace(shown, metric, files),
    ):
        try:
            lines = step()
        except Exception as error:  # W&B and its transports raise several families of errors
            console.print(f"W&B: {first_line(error)}", style="yellow", highlight=False)
            continue
        for line in lines:
            console.print(f"W&B: {line}", highlight=False)


def publish_finished(finished: Finished, folder: Path, files: Sequence[Path], console: Console) -> None:
    """Log a comparison of finished runs, as far as the runs were logged to W&B, see `publish`."""
    logged = [found for found in finished.chosen if wandb_settings(found.config) is not None]
    projects = dict.fromkeys((each["entity"], each["project"]) for each in map(_settings, logged))
    if len(projects) > 1:
        named = ", ".join("/".join(filter(None, project)) for project in projects)
        console.print(f"W&B: the runs are in {len(projects)} projects ({named}), and a workspace shows one")
        return
    config = logged[0].config
    groups = [*dict.fromkeys(_settings(each)["group"] or each.config["title"] for each in logged)]
    own = groups[0] if len(groups) == 1 else f"compare-{folder.name}"
    by = (*finished.keys, *_hardware_keys([found.config for found in logged]))
    more = () if len(groups) == 1 else tuple(groups)
    shown = Shown(own, folder, [found.folder for found in logged], config, by, more)
    publish_runs(shown, logged[0].run.metric, finished.title, files, console)


def _settings(found: Found) -> Any:
    return wandb_settings(found.config)


def _hardware_keys(configs: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Keys of the configuration that tell kinds of hardware apart."""
    values = {
        "hardware.name": [config["hardware"]["name"] for config in configs],
        "hardware.rate": [config["hardware"].get("rate") for config in configs],
        "trainer.num_nodes": [config["trainer"]["num_nodes"] for config in configs],
        "trainer.devices": [repr(config["trainer"]["devices"]) for config in configs],
    }
    return tuple(key for key, each in values.items() if len({*each}) > 1)


def _log(shown: Shown, title: str, files: Sequence[Path]) -> list[str]:
    """Make the comparison's run, with table, pictures, and all files as an artifact.

    The offline run of an earlier comparison is removed from ``folder``: that run described other files and cells.

    Returns:
        The run's URL as the only entry; nothing if the run is offline.
    """
    import wandb

    folder, config = shown.folder, shown.config
    _clear(folder / "wandb")
    # W&B keeps copies for a later upload here; its default is the home directory.
    os.environ.setdefault("WANDB_DATA_DIR", str(folder / "wandb"))
    settings = wandb_settings(config)
    labels = Labels(title, shown.group, config["title"], JOB_TYPE, config["hardware"]["name"])
    run = start_wandb(
        str(folder),
        silent=True,
        project=settings["project"],
        entity=settings["entity"],
        name=labels.name,
        group=labels.group,
        job_type=JOB_TYPE,
        tags=list(dict.fromkeys([*labels.tags, *settings["tags"]])),
        # A workspace groups runs by the strategy's name, so the comparison's run needs a name as well.
        config={"title": config["title"], "strategy": {"name": JOB_TYPE}, "hardware": config["hardware"]},
    )
    try:
        artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", labels.group, flags=re.ASCII), type=JOB_TYPE)
        # The artifact holds copies: an offline run reads its files when it is uploaded, and a later comparison may have
        # overwritten the originals by then.
        kept = Path(run.dir).parent / JOB_TYPE
        for file in files:
            name = file.relative_to(folder)
            (kept / name).parent.mkdir(parents=True, exist_ok=True)
            copy = str(shutil.copy(file, kept / name))
            artifact.add_file(copy, name=str(name), policy="immutable", skip_cache=True)
        tables = {name: _table(file) for name, file in zip(_tables(folder, files), _table_files(files), strict=True)}
        pictures = {f"{PLOTS}/{name}": wandb.Image(str(folder / f"{name}.png")) for name in _plots(folder, files)}
        run.log({**tables, **pictures})
        run.log_artifact(artifact)
        return [] if run.offline else [str(run.url)]
    finally:
        run.finish()


def _table_files(files: Sequence[Path]) -> list[Path]:
    return [file for file in files if file.name == "table.csv"]


def _tables(folder: Path, files: Sequence[Path]) -> tuple[str, ...]:
    """Every ``table.csv`` by its name in W&B; the name of a table in the folder of a link has the link in it."""
    places = [file.parent.relative_to(folder) for file in _table_files(files)]
    return tuple("/".join([TABLE, *place.parts]) for place in places)


def _plots(folder: Path, files: Sequence[Path]) -> tuple[str, ...]:
    """Names of all pictures below ``folder``, without their suffix."""
    return tuple(str(file.relative_to(folder).with_suffix("")) for file in files if file.suffix == ".png")


def _table(file: Path) -> Any:
    """``table.csv`` as a W&B table, with numbers in the columns that hold nothing else."""
    import wandb

    with open(file, newline="") as lines:
        head, *rows = csv.reader(lines)
    columns = [_numbers(column) for column in zip(*rows, strict=True)]
    return wandb.Table(columns=[*head], data=[list(row) for row in zip(*columns, strict=True)])


def _numbers(column: Sequence[str]) -> list[Any]:
    try:
        return [float(value) for value in column]
    except ValueError:
        return list(column)


def _clear(folder: Path) -> None:
    for old in (*folder.glob("offline-run-*"), *folder.glob("artifacts")):
        if old.is_symlink():
            old.unlink()
        else:
            shutil.rmtree(old)


def _gather(folder: Path, runs: Sequence[Path]) -> list[str]:
    """Link the runs' offline folders into ``folder``/wandb.

    Returns:
        A line with the command that uploads all of them; nothing if there is no offline run.
    """
    together = folder / "wandb"
    together.mkdir(exist_ok=True)
    for run in runs:
        for offline in (run / "wandb").glob("offline-run-*"):
            link = together / offline.name
            if not link.is_symlink():  # a run that goes on has links to the earlier parts of its W&B run
                link.symlink_to(os.path.relpath(offline, together))
    if not any(together.glob("offline-run-*")):
        return []
    return [f"upload what is offline with: wandb sync {shlex.quote(str(together))}/offline-run-*"]


def _workspace(shown: Shown, metric: Metric, files: Sequence[Path]) -> list[str]:
    """Create the workspace, or write its file; returns lines that say where it is, or how to create it later."""
    logger, folder = wandb_settings(shown.config), shown.folder
    definition = Definition(
        shown.group,
        metric.key,
        logger["project"],
        logger["entity"],
        by=shown.by,
        plots=_plots(folder, files),
        tables=_tables(folder, files),
        more_groups=shown.more_groups,
    )
    file = folder / WORKSPACE_FILE
    try:
        url = save_workspace(definition, file)
    except RecipeError as error:
        raise RecipeError(f"{error}; again with: {definition.command}") from error
    if url:
        return [f"workspace {url}"]
    return [f"workspace {file}", f"create the workspace after `wandb login` with: {definition.command}"]
