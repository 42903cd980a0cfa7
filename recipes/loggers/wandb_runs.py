"""The W&B logger of a training, whose metrics are plotted against training seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger

from recipes.files import WANDB_ID_FILE
from recipes.launch.ranks import is_rank_zero
from recipes.loggers.labels import Labels
from recipes.loggers.wandb_client import start_wandb
from recipes.measuring import names
from recipes.measuring.metrics import Metric


def wandb_logger(
    folder: str,
    labels: Labels,
    metric: Metric,
    project: str,
    entity: str | None = None,
    tags: list[str] | None = None,
) -> WandbLogger:
    """The logger of ``logger=wandb``; its run is offline unless a key is configured.

    The run is made here and not by WandbLogger, which would define a step for the pattern "*". Where several patterns
    match a name, W&B applies one of them at random; only exact names are certain.

    Args:
        folder: folder of the run.
        labels: name, group and tags of the run.
        metric: what the task is judged by.
        project: W&B project.
        entity: W&B user or team; None: the default of the key.
        tags: tags beside those of ``labels``.
    """
    if not is_rank_zero():
        return WandbLogger(project=project, save_dir=folder)  # makes no run: Lightning logs on rank zero only
    known = Path(folder, WANDB_ID_FILE)
    # A run that goes on from a checkpoint has the file of the run that has written the checkpoint.
    continued: dict[str, Any] = {"id": known.read_text().strip(), "resume": "allow"} if known.is_file() else {}
    run = start_wandb(
        folder,
        **continued,
        project=project,
        entity=entity,
        tags=list(dict.fromkeys([*labels.tags, *(tags or [])])),
        name=labels.name,
        group=labels.group,
        job_type=labels.strategy,
    )
    known.write_text(f"{run.id}\n")
    run.define_metric(names.TRAIN_TIME)
    for name in names.against_time(metric):
        of_metric = name in (metric.train, metric.val, metric.test)
        best = ("max" if metric.higher_is_better else "min") if of_metric else None
        run.define_metric(name, step_metric=names.TRAIN_TIME, summary=best)
    return WandbLogger(project=project, save_dir=folder, experiment=run)
