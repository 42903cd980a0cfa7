"""One training: from a configuration to metrics, a checkpoint and a result file."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import Logger, WandbLogger
from omegaconf import DictConfig, OmegaConf

import lightning_gqsgd  # noqa: F401  (registers its strategies)
from recipes.tasks.building import build
from recipes.tasks.clock import TrainingClock
from recipes.tasks.communication import CommunicationCounter
from recipes.tasks.data import TaskData
from recipes.tasks.errors import RecipeError
from recipes.tasks.exposed import ExposedCommunication
from recipes.tasks.hardware import described
from recipes.tasks.launch import local_processes, set_threads
from recipes.tasks.loggers import METRICS_FILE, ContinuedCSVLogger, Labels
from recipes.tasks.machine import machine_facts
from recipes.tasks.metrics import Metric
from recipes.tasks.optimizers import OptimizerSettings
from recipes.tasks.progress import PlainProgress
from recipes.tasks.ranks import cluster_environment, is_rank_zero
from recipes.tasks.report import StartupSummary, finish, run_facts
from recipes.tasks.task import Task

CHECKPOINTS = "checkpoints"
LAST = "last.ckpt"


class CheckpointError(RecipeError):
    """There is no checkpoint to go on from."""


def train(cfg: DictConfig, folder: Path) -> float:
    """Train as ``cfg`` says, with all files below ``folder``; returns the final value of the task's metric.

    Raises:
        RecipeError: with what to change.
    """
    threads = set_threads(
        cfg.threads, local_processes(cfg.trainer.accelerator, cfg.trainer.devices), environment=os.environ
    )
    seed_everything(cfg.seed, workers=True, verbose=False)
    _silence_known_messages()
    checkpoint = find_checkpoint(cfg, folder)

    data: TaskData = build(cfg.data)
    if is_rank_zero():
        # Before anything is named: the name of the data may turn out to be that of the fallback. The other processes
        # start later, or wait for this one to join the process group.
        data.prepare_data()
    config = _plain(cfg)
    config["data"]["name"] = data.data_name
    title = f"{cfg.title} on {data.data_name}"

    network = build(cfg.model, leave_out=("name",))
    module: Task = build(
        cfg.task, leave_out=("metric",), network=network, settings=OptimizerSettings(**config["optimizer"])
    )
    numbers = clock, counter, exposed = TrainingClock(), CommunicationCounter(), ExposedCommunication()
    parameters = sum(p.numel() for p in network.parameters())
    facts = {
        "data": f"{data.data_name}, {cfg.data.batch_size} samples per process and step",
        "model": f"{cfg.model.name}, {parameters / 1e6:.2f} M parameters",
        "strategy": _described(config["strategy"]),
        "hardware": described(config["hardware"]),
        "threads": f"{threads} per process",
        "folder": str(folder),
    }
    callbacks: list[Callback] = [clock, counter, exposed, StartupSummary(title, facts)]
    interactive = sys.stdout.isatty()
    callbacks.append(RichProgressBar() if interactive else PlainProgress(module.metric))
    if cfg.checkpoint:
        # One file, written over after each validation; saving is atomic.
        callbacks.append(
            ModelCheckpoint(folder / CHECKPOINTS, filename=Path(LAST).stem, save_top_k=1, enable_version_counter=False)
        )
    trainer = Trainer(
        **config["trainer"],
        strategy=build(cfg.strategy, leave_out=("name",)),
        plugins=cluster_environment(os.environ),
        logger=_loggers(
            cfg, config, folder, f"{title}, {cfg.strategy.name}, seed {cfg.seed}", module.metric, checkpoint
        ),
        callbacks=callbacks,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        enable_progress_bar=interactive,
        enable_checkpointing=bool(cfg.checkpoint),
    )
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    if cfg.test:
        trainer.test(module, datamodule=data, verbose=False)
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()
    result = run_facts(config, data, module, trainer, numbers)
    if trainer.is_global_zero:
        finish(folder, result, str(folder / CHECKPOINTS / LAST) if cfg.checkpoint else None)
    metrics = result["metrics"]
    return metrics.get(module.metric.test, metrics.get(module.metric.val, float("nan")))


def find_checkpoint(cfg: DictConfig, folder: Path) -> str | None:
    """The checkpoint to go on from, or None for a new run.

    Raises:
        CheckpointError: one is asked for and there is none.
    """
    if cfg.ckpt_path:
        if not Path(cfg.ckpt_path).is_file():
            raise CheckpointError(f"ckpt_path={cfg.ckpt_path} is no file; name a last.ckpt, or take resume=true")
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


def _loggers(
    cfg: DictConfig, config: dict[str, Any], folder: Path, name: str, metric: Metric, checkpoint: str | None
) -> list[Logger]:
    """The CSV logger, always, and the chosen one; both know the whole configuration and the machine."""
    if checkpoint:
        step = torch.load(checkpoint, map_location="cpu", weights_only=True)["global_step"]
        csv = ContinuedCSVLogger(folder, Path(checkpoint).parents[1] / METRICS_FILE, before_step=step)
    else:
        csv = ContinuedCSVLogger(folder)
    loggers: list[Logger] = [csv]
    if "_target_" in cfg.logger:
        labels = Labels(name, cfg.logger.get("group") or cfg.title, cfg.title, cfg.strategy.name, cfg.hardware.name)
        loggers.append(build(cfg.logger, leave_out=("name", "group"), folder=str(folder), labels=labels, metric=metric))
    recorded = {**config, "machine": machine_facts(cfg.trainer.accelerator)}
    for logger in loggers:
        logger.log_hyperparams(recorded)
    return loggers


def _plain(cfg: DictConfig) -> dict[str, Any]:
    config = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


def _described(strategy: dict[str, Any]) -> str:
    settings = ", ".join(f"{key}={value}" for key, value in strategy.items() if key not in ("name", "_target_"))
    return f"{strategy['name']} ({settings})" if settings else str(strategy["name"])


def _silence_known_messages() -> None:
    # Small data are in memory, without workers; image folders have as many as there are cores for.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # In evaluation, equal numbers of batches are wanted: DDP synchronises buffers in every forward pass.
    warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the dataloaders.*")
    # Time and bytes are those of one process, not means over processes.
    warnings.filterwarnings("ignore", message="It is recommended to use .self.log.*sync_dist=True.*")
    # A resumed run has a folder of its own.
    warnings.filterwarnings("ignore", message="The dirpath has changed from.*")
    # Lightning's own use of torch.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.. is deprecated.*")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
