"""One training: from a configuration to metrics, a checkpoint and a result file."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_module
from omegaconf import DictConfig, OmegaConf
from torch.distributed.constants import default_pg_timeout

import lightning_gqsgd  # noqa: F401  (registers its strategies)
from lightning_gqsgd.errors import counted
from recipes.data.task_data import TaskData
from recipes.errors import DivergedError, RecipeError
from recipes.files import METRICS_FILE, RESULT_FILE
from recipes.launch.environment import set_threads
from recipes.launch.hardware import described
from recipes.launch.processes import local_processes
from recipes.launch.ranks import cluster_environment, is_rank_zero, meeting_of_ranks, tell_lightning_the_rank
from recipes.loggers.chosen import chosen_loggers
from recipes.loggers.csv_rows import ContinuedCSVLogger
from recipes.loggers.labels import Labels
from recipes.measuring.amounts import parameters_in_words
from recipes.measuring.clock import RowOfShortRun, TrainingClock
from recipes.measuring.communication import CommunicationCounter
from recipes.measuring.exposed import ExposedCommunication
from recipes.measuring.metrics import Metric
from recipes.strategies.choices import timeout_for
from recipes.tasks.optimizers import OptimizerSettings, OwnOptimizer, scaled
from recipes.tasks.task import Task
from recipes.training.building import (
    ALLOWED_TARGETS,
    build,
    build_callbacks,
    build_data,
    build_network,
    build_optimizer,
    build_strategy,
    build_task,
    build_trainer,
    check_monitors,
    own_targets,
)
from recipes.training.checkpoints import CHECKPOINTS, LAST, carry_wandb_id, clear_earlier_run, find_checkpoint
from recipes.training.continuing import asked_by, check_continued
from recipes.training.progress import LiveProgress, PlainProgress
from recipes.training.refusals import refused_values
from recipes.training.report import StartupSummary, finish, machine_facts, run_facts
from recipes.training.saving import WholeCheckpoints
from recipes.training.starting import InterruptedStart
from recipes.training.terminating import TerminatedTraining


def train(cfg: DictConfig, folder: Path) -> float:
    """Train as a configuration says.

    Returns:
        The final value of the task's metric: of the test, or of the last validation without one; NaN without both.

    Raises:
        RecipeError: the run cannot be made as asked; the message says what to change.
        DivergedError: on rank 0, after everything is written: the loss or the weights are not finite.
    """
    on_this_machine = local_processes(cfg.trainer.accelerator, cfg.trainer.devices)
    tell_lightning_the_rank(os.environ, on_this_machine)
    threads = set_threads(cfg.threads, cfg.trainer.num_nodes * on_this_machine, on_this_machine, os.environ)
    seed_everything(cfg.seed, workers=True, verbose=False)
    _silence_expected_messages()
    checkpoint = find_checkpoint(cfg, folder)
    if checkpoint:
        check_continued(cfg, checkpoint)

    own = own_targets()
    data: TaskData = build_data(cfg.data, own)
    if is_rank_zero():
        # Before anything is named: other data may stand in, and the run is then called by their name. The other
        # processes start later, or wait for this process to join the process group.
        data.prepare_data()
    config = _plain(cfg)
    config["data"]["name"] = data.data_name
    title = f"{cfg.title} on {data.data_name}"

    network = build_network(cfg.model, own)
    settings = build_optimizer(config["optimizer"], own)
    global_batch = _global_batch(config, data, on_this_machine)
    module: Task = build_task(cfg.task, own, network=network, settings=scaled(settings, global_batch))
    # A run that goes on may wait for longer, and sends the same.
    sent_by = _described({key: value for key, value in config["strategy"].items() if key != "timeout"})
    numbers = (TrainingClock(), CommunicationCounter(sent_by), ExposedCommunication())
    described_rate = {} if settings.scale_lr is None else {"rate": _rate(settings, global_batch)}
    summary = StartupSummary(title, {**_summary(config, network, threads, folder), **described_rate})
    start = InterruptedStart(folder)
    chosen = build_callbacks(cfg.get("callbacks"), folder, own)
    check_monitors(chosen, module)
    callbacks: list[Callback] = [
        *(start, TerminatedTraining(), RowOfShortRun(), *numbers, summary),
        *_callbacks(cfg, folder, None if any(isinstance(each, ProgressBar) for each in chosen) else module.metric),
        *chosen,
    ]
    name = f"{title}, {cfg.strategy.name}, seed {cfg.seed}"
    trainer = build_trainer(
        config["trainer"],
        folder,
        own,
        strategy=build_strategy(cfg.strategy, network),
        plugins=[*cluster_environment(os.environ, on_this_machine), WholeCheckpoints()],
        logger=_loggers(cfg, config, (folder, checkpoint), name, module.metric, own),
        callbacks=callbacks,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        # The callbacks above show the whole run, unless a bar of Lightning's does.
        enable_progress_bar=any(isinstance(each, ProgressBar) for each in chosen),
        enable_checkpointing=bool(cfg.checkpoint) or any(isinstance(each, ModelCheckpoint) for each in chosen),
    )
    if is_rank_zero():
        clear_earlier_run(checkpoint, folder)

    def before_the_first_step() -> bool:
        return not trainer.global_step

    # Strategy, optimizer and data are set up before the first step; an error in a later step is no refusal.
    setup = refused_values("before the first step", applies=before_the_first_step)
    timeout = timeout_for(cfg.strategy).get("timeout", default_pg_timeout)
    meeting = meeting_of_ranks(os.environ, on_this_machine, timeout, applies=before_the_first_step)
    with start.watched(trainer), _interrupts(trainer), setup, meeting:
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
        if cfg.test:
            trainer.test(module, datamodule=data, verbose=False)
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()
    result = run_facts(config, data, module, trainer, numbers)
    if trainer.is_global_zero:
        finish(folder, result, folder / CHECKPOINTS / LAST if cfg.checkpoint else None)
        if result["diverged"]:
            # The other ranks end well: a launcher that sees one fail would end this one while it writes.
            raise DivergedError(
                f"the training diverged: {result['diverged']}; take an optimizer.lr below {settings.lr}, "
                f"or trainer.gradient_clip_val=0.5; what was measured is in {folder / RESULT_FILE}"
            )
    value = module.metric.of_run(result["metrics"])
    return float("nan") if value is None else value


@contextmanager
def _interrupts(trainer: Trainer) -> Iterator[None]:
    """Raise KeyboardInterrupt for an interrupted training; Lightning ends the process with exit code 1 instead."""
    try:
        yield
    except SystemExit:
        if trainer.interrupted:
            raise KeyboardInterrupt from None
        raise


def _summary(config: dict[str, Any], network: torch.nn.Module, threads: int, folder: Path) -> dict[str, str]:
    """What the start-up summary says."""
    parameters = sum(p.numel() for p in network.parameters())
    samples = counted(config["data"]["batch_size"], "sample")
    return {
        "data": f"{config['data']['name']}, {samples} per process and step",
        "model": f"{config['model']['name']}, {parameters_in_words(parameters)}",
        "strategy": _described(config["strategy"]),
        "hardware": described(config["hardware"]),
        "threads": f"{threads} per process",
        "folder": str(folder),
    }


def _global_batch(config: dict[str, Any], data: TaskData, on_this_machine: int) -> int:
    """Number of samples of an optimizer step, all processes together."""
    trainer = config["trainer"]
    return data.batch_size * on_this_machine * int(trainer["num_nodes"]) * int(trainer["accumulate_grad_batches"])


def _rate(settings: OptimizerSettings | OwnOptimizer, global_batch: int) -> str:
    """What the start-up summary says of a rate that belongs to a global batch."""
    lr = scaled(settings, global_batch).lr
    return f"{lr:g} = {settings.lr:g} x {counted(global_batch, 'sample')} of a step / {settings.scale_lr}"


def _callbacks(cfg: DictConfig, folder: Path, metric: Metric | None) -> list[Callback]:
    """The callbacks that show progress and keep checkpoints; without a metric, only the latter."""
    callbacks: list[Callback] = []
    if metric is not None:
        callbacks.append(LiveProgress(metric) if sys.stdout.isatty() else PlainProgress(metric))
    if cfg.checkpoint:
        # One file, which is written over after each validation.
        callbacks.append(
            ModelCheckpoint(folder / CHECKPOINTS, filename=Path(LAST).stem, save_top_k=1, enable_version_counter=False)
        )
    return callbacks


def _loggers(
    cfg: DictConfig,
    config: dict[str, Any],
    places: tuple[Path, str | None],
    name: str,
    metric: Metric,
    own: frozenset[str],
) -> list[Logger]:
    """The CSV logger, which every run has, and the chosen ones; all know the whole configuration and the machine.

    Args:
        cfg, config: the configuration, and the same as plain values.
        places: folder of the run, and the checkpoint that it goes on from.
        name: name of the run.
        metric: what the task is judged by.
        own: see `recipes.training.building.build`.
    """
    folder, checkpoint = places
    if checkpoint:
        step = _step_of(cfg, checkpoint)
        csv = ContinuedCSVLogger(folder, Path(checkpoint).parents[1] / METRICS_FILE, before_step=step)
    else:
        csv = ContinuedCSVLogger(folder)
    loggers: list[Logger] = [csv]
    if is_rank_zero():
        carry_wandb_id(checkpoint, folder)
    for node in chosen_loggers(cfg).values():
        if "_target_" not in node:
            continue
        labels = Labels(name, node.get("group") or cfg.title, cfg.title, cfg.strategy.name, cfg.hardware.name)
        given: dict[str, Any] = {"folder": str(folder), "labels": labels, "metric": metric}
        if node._target_ in ALLOWED_TARGETS:
            loggers.append(build(node, leave_out=("name", "group"), **given))
        else:  # a logger of the user's own has arguments of its own
            loggers.append(build(node, own=own, leave_out=("group",)))
    recorded = {**config, "machine": machine_facts(cfg.trainer.accelerator)}
    for logger in loggers:
        logger.log_hyperparams(recorded)
    return loggers


def _step_of(cfg: DictConfig, checkpoint: str) -> int:
    """The optimizer step at which a checkpoint was written."""
    try:
        return int(torch.load(checkpoint, map_location="cpu", weights_only=True)["global_step"])
    except Exception as error:  # torch raises several families of errors for files that are damaged inside
        raise RecipeError(
            f"{checkpoint} is not a checkpoint of a run, or is damaged ({type(error).__name__}); name another one, or "
            f"leave {asked_by(cfg)} out for a new run"
        ) from error


def _plain(cfg: DictConfig) -> dict[str, Any]:
    config = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(config, dict)
    for node in ("model", "data", "strategy"):  # a node of the user's own need not have a name
        config[node].setdefault("name", str(config[node]["_target_"]).rpartition(".")[2])
    return {str(key): value for key, value in config.items()}


def _described(strategy: dict[str, Any]) -> str:
    """Name and settings of a strategy; a preset of the same name goes without saying."""
    settings = {key: value for key, value in strategy.items() if key not in ("name", "_target_")}
    if settings.get("preset") == strategy["name"]:
        del settings["preset"]
    listed = ", ".join(f"{key}={value}" for key, value in settings.items())
    return f"{strategy['name']} ({listed})" if listed else str(strategy["name"])


def _silence_expected_messages() -> None:
    """Ignore warnings of Lightning and torch that are no news in a recipe."""
    # Small data are in memory and need no worker processes; image folders have as many as there are free cores.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # DDP synchronises buffers in every forward pass, so all processes need equal numbers of batches in evaluation, too.
    warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the dataloaders.*")
    # Time and bytes are logged for one process; they are not means over processes.
    warnings.filterwarnings("ignore", message="It is recommended to use .self.log.*sync_dist=True.*")
    # Rows are counted in steps of the run, across epochs, and `RowOfShortRun` sees to runs of few steps.
    warnings.filterwarnings("ignore", message="The number of training batches .* is smaller than the logging interval")
    # A resumed run has a folder of its own, or that of the run before it, with its checkpoint.
    warnings.filterwarnings("ignore", message="The dirpath has changed from.*")
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
    # Lightning itself uses what torch deprecates.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.. is deprecated.*")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning").handlers.clear()  # Hydra's handlers of the root print the same records
    # Strategies of this package speak through Lightning's logger of rank 0, e.g. of each decision of `auto`.
    rank_zero_module.log.setLevel(logging.INFO)
    rank_zero_module.log.addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record of Lightning's is a warning, or is from a strategy of this package."""
    return record.levelno > logging.INFO or record.getMessage().startswith("gqsgd")
