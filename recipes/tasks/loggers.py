"""Loggers that plot against training seconds."""

from __future__ import annotations

import csv
import netrc
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console

from recipes.tasks import names
from recipes.tasks.metrics import Metric
from recipes.tasks.ranks import is_rank_zero

METRICS_FILE = "metrics.csv"


@dataclass(frozen=True)
class Labels:
    """What a run is called, and what it can be found by.

    Attributes:
        name: of this run.
        group: what it belongs to: a comparison, or all runs with its title.
        experiment, strategy: names from the configuration.
        hardware: name of the hardware profile, if there is one.
    """

    name: str
    group: str
    experiment: str
    strategy: str
    hardware: str | None = None

    @property
    def tags(self) -> list[str]:
        """Experiment, strategy and hardware."""
        return [self.experiment, self.strategy, *([self.hardware] if self.hardware else [])]


class ContinuedCSVLogger(CSVLogger):
    """``metrics.csv`` in a folder, preceded by the rows of the run that this one resumes.

    Args:
        folder: where the file goes.
        earlier: the file of the resumed run; may be the same one.
        before_step: rows of the earlier run from this step on are left out: they are trained again.
    """

    def __init__(self, folder: Path, earlier: Path | None = None, before_step: int = 0) -> None:
        super().__init__(str(folder), name=None, version="")
        self._earlier, self._before_step = earlier, before_step

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is None:
            rows = _rows_before(self._earlier, self._before_step) if self._earlier else []
            with warnings.catch_warnings():
                # The folder is not empty: Hydra's files are there. An old metrics.csv is read above and written again.
                warnings.simplefilter("ignore")
                writer: Any = super().experiment
            writer.metrics.extend(rows)
        return self._experiment


def _rows_before(file: Path, step: int) -> list[dict[str, str]]:
    if not file.exists():
        return []
    with open(file, newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if int(row["step"]) < step]
    return [{name: value for name, value in row.items() if value != ""} for row in rows]


class TimedTensorBoardLogger(TensorBoardLogger):
    """Losses and the task's metric get a second tag, ``time/val_acc``, whose step is the milliseconds of training.

    TensorBoard cannot plot one metric against another.
    """

    def __init__(self, folder: str, metric: Metric) -> None:
        super().__init__(folder, name="tensorboard", version="", default_hp_metric=False)
        self._metric = metric

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        if names.TRAIN_TIME in metrics:
            milliseconds = int(1000 * metrics[names.TRAIN_TIME])
            for name in (names.TRAIN_LOSS, names.VAL_LOSS, self._metric.val, self._metric.test):
                if name in metrics:
                    self.experiment.add_scalar(f"time/{name.replace('/', '_')}", metrics[name], milliseconds)


def tensorboard_logger(folder: str, labels: Labels, metric: Metric) -> TimedTensorBoardLogger:
    """Event files in ``folder``/tensorboard."""
    return TimedTensorBoardLogger(folder, metric)


def wandb_logger(
    folder: str,
    labels: Labels,
    metric: Metric,
    project: str,
    entity: str | None = None,
    tags: list[str] | None = None,
) -> WandbLogger:
    """A W&B run whose metrics are plotted against training seconds; offline unless a key is configured.

    The run is made here and not by WandbLogger, which would define a step for "*": W&B applies one of several matching
    patterns at random, and only exact names are certain.
    """
    if not is_rank_zero():
        return WandbLogger(project=project, save_dir=folder)  # never makes a run: only rank zero does
    run = start_wandb(
        folder,
        project=project,
        entity=entity,
        tags=list(dict.fromkeys([*labels.tags, *(tags or [])])),
        name=labels.name,
        group=labels.group,
        job_type=labels.strategy,
    )
    run.define_metric(names.TRAIN_TIME)
    for name in names.against_time(metric):
        of_metric = name in (metric.train, metric.val, metric.test)
        best = ("max" if metric.higher_is_better else "min") if of_metric else None
        run.define_metric(name, step_metric=names.TRAIN_TIME, summary=best)
    return WandbLogger(project=project, save_dir=folder, experiment=run)


def start_wandb(folder: str, silent: bool = False, **arguments: Any) -> Any:
    """A new W&B run that writes below ``folder``/wandb, in the mode of `wandb_mode`, or offline if that fails.

    Args:
        folder: an existing one.
        silent: nothing is said on the console, except that W&B cannot be reached.
        **arguments: of ``wandb.init``.
    """
    import wandb

    mode = wandb_mode()
    if mode == "offline" and os.environ.get("WANDB_MODE") != "offline" and not silent:
        _say("no W&B key is configured: this run is logged offline; `wandb login`, then `wandb sync`, uploads it")
    # A run that cannot upload ends all the same; what is left lies in the folder.
    settings = wandb.Settings(console="off", init_timeout=30, finish_timeout=300, silent=silent)
    try:
        return wandb.init(dir=folder, mode=mode, settings=settings, **arguments)
    except wandb.errors.Error as error:
        if mode != "online":
            raise
        _say(f"W&B cannot be reached ({error}); this run is logged offline")
        return wandb.init(dir=folder, mode="offline", settings=settings, **arguments)


def wandb_mode() -> Any:
    """``"online"`` if a key is configured, else ``"offline"``; WANDB_MODE decides among what is possible."""
    wanted = os.environ.get("WANDB_MODE", "online")
    if wanted == "disabled":
        return "disabled"
    return "online" if wanted in ("online", "shared") and _has_key() else "offline"


def _has_key() -> bool:
    """Whether wandb will find credentials; their values are not looked at."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb

    server = os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url
    try:
        return bool({urlsplit(server).netloc, "api.wandb.ai"} & netrc.netrc(os.environ.get("NETRC")).hosts.keys())
    except (OSError, netrc.NetrcParseError):
        return False


def _say(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(text, style="yellow", highlight=False)
