"""What a run says at its start and leaves at its end."""

from __future__ import annotations

import json
import math
import platform
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape

from lightning_gqsgd import __version__
from lightning_gqsgd.errors import counted
from lightning_gqsgd.wire.processors import processors
from netlab.machine import device_name
from recipes.comparison.plots import save_curves
from recipes.comparison.results import Run, read_rows
from recipes.data.task_data import TaskData
from recipes.files import METRICS_FILE, RESULT_FILE, metrics_bytes
from recipes.launch.hardware import hardware_facts
from recipes.measuring import names
from recipes.measuring.amounts import megabytes_in_words
from recipes.measuring.clock import TrainingClock
from recipes.measuring.communication import CommunicationCounter
from recipes.measuring.exposed import ExposedCommunication
from recipes.strategies.baselines import BaselineDDPStrategy
from recipes.strategies.choices import steps_of_round
from recipes.tasks.task import Task


class StartupSummary(Callback):
    """Prints once, on rank 0, what is about to be trained."""

    def __init__(self, title: str, facts: dict[str, str]) -> None:
        self._title, self._facts = title, facts

    @rank_zero_only
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Print the summary, with the number of processes that the trainer knows by now; the strategy speaks next."""
        if stage != "fit":
            return
        facts = {**self._facts, "processes": f"{trainer.world_size} ({trainer.num_nodes} x {trainer.num_devices})"}
        if isinstance(trainer.strategy, BaselineDDPStrategy) and trainer.strategy.is_one_bucket:
            facts["buckets"] = "one, sent after the backward pass: torch's PowerSGD hangs or aborts over Gloo with more"
        _print(self._title, facts)


def machine_facts(accelerator: str) -> dict[str, Any]:
    """What computes a run, for dashboards: device, number of cores, threads per process, and versions."""
    on_cuda = accelerator in ("gpu", "cuda", "auto") and torch.cuda.is_available()
    return {
        "device": device_name(on_cuda=on_cuda),
        "cores": processors(),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "lightning_gqsgd": __version__,
        },
    }


def run_facts(
    config: dict[str, Any],
    data: TaskData,
    module: Task,
    trainer: Trainer,
    callbacks: tuple[TrainingClock, CommunicationCounter, ExposedCommunication],
) -> dict[str, Any]:
    """Everything about a finished run that a comparison needs: plain numbers and strings."""
    clock, counter, exposed = callbacks
    device = device_name(on_cuda=trainer.strategy.root_device.type == "cuda")
    return {
        "title": config["title"],
        "data": data.data_name,
        "metric": module.metric.key,
        "judged_by": asdict(module.metric),
        "train_samples": data.train_count,
        "model": config["model"]["name"],
        "parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "strategy": config["strategy"]["name"],
        "strategies": counter.strategies,
        "seed": config["seed"],
        "processes": trainer.world_size,
        "nodes": trainer.num_nodes,
        "threads": torch.get_num_threads(),
        "device": device,
        "hardware": hardware_facts(config["hardware"], trainer.num_nodes, trainer.num_devices, device),
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "samples": clock.samples,
        "train_time": clock.train_time,
        "step_s": _quantiles(over_rounds(clock.step_seconds, steps_of_round(config["strategy"]))),
        "exposed_s": _quantiles(exposed.seconds),
        "mb_sent": counter.bytes_sent / 1e6,
        "bits_per_coordinate": counter.bits_per_coordinate(trainer.world_size),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "diverged": _divergence(module, trainer),
        # The time of the file would be that of its copy, once the folder is copied to another machine.
        "ended": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "versions": {"torch": torch.__version__, "lightning": lightning.__version__},
    }


def _divergence(module: Task, trainer: Trainer) -> str | None:
    """What is not finite at the end of a training, in words; None if all is well."""
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for name in (names.TRAIN_LOSS, names.VAL_LOSS, names.TEST_LOSS):
        if not math.isfinite(logged.get(name, 0.0)):
            return f"{name} is {logged[name]}"
    # A gradient that was not finite in the last step is in the weights, and in no loss that was logged before.
    for name, parameter in module.named_parameters():
        if not bool(torch.isfinite(parameter.detach()).all()):
            return f"{name} has values that are not finite"
    return None


def finish(folder: Path, facts: dict[str, Any], checkpoint: Path | None) -> None:
    """Write ``result.json`` and a plot of the metric beside a complete ``metrics.csv``, and say where all files are.

    Nothing is said of a checkpoint that does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)  # a run without a step has logged nothing
    facts = {**facts, "metrics_bytes": metrics_bytes(folder)}  # a comparison sees by it whether the file is whole
    (folder / RESULT_FILE).write_text(json.dumps(strict(facts), indent=2, allow_nan=False) + "\n")
    run = Run.load(folder)
    lines = {}
    metric = run.metric
    if metric.test in facts["metrics"]:
        lines[f"test {metric.label}"] = metric.shown(facts["metrics"][metric.test])
    if f"test/{names.TOP5}" in facts["metrics"]:
        lines["test top-5"] = metric.shown(facts["metrics"][f"test/{names.TOP5}"])
    # Not the points of the run, which are those of the test if there was no validation.
    validations = [row[metric.val] for row in read_rows(folder / METRICS_FILE) if metric.val in row]
    if validations:
        best = metric.worst_first(validations)[-1]
        lines[f"validation {metric.label}"] = f"{metric.shown(validations[-1])} (best {metric.shown(best)})"
    if run.value.size and facts["steps"] and not facts["diverged"]:
        plot = folder / f"{metric.file}.png"
        title = f"{facts['title']} on {facts['data']}, {facts['strategy']}"
        save_curves({facts["strategy"]: [run]}, "time", title, plot)
        lines["plot"] = str(plot)
    median = f", median {1000 * facts['step_s']['median']:.1f} ms" if facts["step_s"] else ""
    if len(facts.get("strategies", [])) > 1:
        lines["strategies"] = ", then ".join(facts["strategies"])
    lines["training"] = f"{facts['train_time']:.1f} s, {counted(facts['steps'], 'step')}{median}"
    if facts["bits_per_coordinate"] is not None:
        sent = megabytes_in_words(facts["mb_sent"])
        lines["sent"] = f"{sent} MB per process, {facts['bits_per_coordinate']:.2f} bits per coordinate"
    if (folder / METRICS_FILE).is_file():
        lines["metrics"] = str(folder / METRICS_FILE)
    lines["result"] = str(folder / RESULT_FILE)
    if checkpoint is not None and checkpoint.is_file():
        lines["checkpoint"] = str(checkpoint)
    _print(f"{facts['title']} on {facts['data']}: {'diverged' if facts['diverged'] else 'done'}", lines)


def strict(value: Any) -> Any:
    """A value with None for numbers that JSON does not know: NaN and infinities."""
    if isinstance(value, dict):
        return {key: strict(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [strict(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def over_rounds(seconds: NDArray[np.float64], steps: int) -> NDArray[np.float64]:
    """The mean step of each round (rounds,), as only some of a round's steps wait for an average.

    Args:
        seconds: of each step.
        steps: number of steps in a round; 1 if all steps are alike.
    """
    rounds = len(seconds) // steps
    if not rounds:
        return seconds.mean(keepdims=True) if len(seconds) else seconds
    # Wherever a round is said to begin, it has as many averages. The first steps are longer than later ones.
    return seconds[len(seconds) - rounds * steps :].reshape(rounds, steps).mean(1)


def _quantiles(seconds: Any) -> dict[str, float]:
    if not len(seconds):
        return {}
    values = torch.as_tensor(seconds).quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return dict(zip(("p10", "median", "p90"), values, strict=True))


def _print(title: str, facts: dict[str, str]) -> None:
    # Plain lines and no table: a table would break long paths in two.
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"\n[bold]{escape(title)}[/]")
    for name, value in facts.items():
        console.print(f"  [dim]{name:<{max(map(len, facts))}}[/]  {escape(value)}")
