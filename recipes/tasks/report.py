"""What a run says at its start and leaves at its end."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.markup import escape

from recipes.comparison.plots import save_curves
from recipes.comparison.results import Run
from recipes.tasks.clock import TrainingClock
from recipes.tasks.communication import CommunicationCounter
from recipes.tasks.data import TaskData
from recipes.tasks.exposed import ExposedCommunication
from recipes.tasks.hardware import hardware_facts
from recipes.tasks.task import Task

RESULT_FILE = "result.json"


class StartupSummary(Callback):
    """Prints once, on rank 0, what is about to be trained."""

    def __init__(self, title: str, facts: dict[str, str]) -> None:
        self._title, self._facts = title, facts

    @rank_zero_only
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        facts = {**self._facts, "processes": f"{trainer.world_size} ({trainer.num_nodes} x {trainer.num_devices})"}
        _print(self._title, facts)


def run_facts(
    config: dict[str, Any],
    data: TaskData,
    module: Task,
    trainer: Trainer,
    callbacks: tuple[TrainingClock, CommunicationCounter, ExposedCommunication],
) -> dict[str, Any]:
    """Everything about a finished run that a comparison needs; plain numbers and strings."""
    clock, counter, exposed = callbacks
    steps, waits = clock.step_seconds, exposed.seconds
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    device = torch.cuda.get_device_name() if trainer.strategy.root_device.type == "cuda" else platform.machine()
    return {
        "title": config["title"],
        "data": data.data_name,
        "metric": module.metric.key,
        "train_samples": data.train_count,
        "model": config["model"]["name"],
        "parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "strategy": config["strategy"]["name"],
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
        "step_s": _quantiles(steps),
        "exposed_s": _quantiles(waits),
        "mb_sent": counter.bytes_sent / 1e6,
        "bits_per_coordinate": counter.bits_per_coordinate(trainer.world_size),
        "metrics": metrics,
        "versions": {"torch": torch.__version__, "lightning": lightning.__version__},
    }


def finish(folder: Path, facts: dict[str, Any], checkpoint: str | None) -> None:
    """Write ``result.json`` and a plot of the metric and say where everything lies."""
    (folder / RESULT_FILE).write_text(json.dumps(facts, indent=2) + "\n")
    run = Run.load(folder)
    lines = {}
    metric = run.metric
    if metric.test in facts["metrics"]:
        lines[f"test {metric.label}"] = f"{facts['metrics'][metric.test]:.4f}"
    if run.value.size:
        lines[f"validation {metric.label}"] = f"{run.value[-1]:.4f} (best {run.best:.4f})"
        plot = folder / f"{metric.label.lower()}.png"
        title = f"{facts['title']} on {facts['data']}, {facts['strategy']}"
        save_curves({facts["strategy"]: [run]}, "time", title, plot)
        lines["plot"] = str(plot)
    median = 1000 * facts["step_s"].get("median", float("nan"))
    lines["training"] = f"{facts['train_time']:.1f} s, {facts['steps']} steps, median {median:.1f} ms"
    if facts["bits_per_coordinate"] is not None:
        lines["sent"] = f"{facts['mb_sent']:.1f} MB per process, {facts['bits_per_coordinate']:.2f} bits per coordinate"
    lines["metrics"] = str(folder / "metrics.csv")
    lines["result"] = str(folder / RESULT_FILE)
    if checkpoint:
        lines["checkpoint"] = checkpoint
    _print(f"{facts['title']} on {facts['data']}: done", lines)


def _quantiles(seconds: Any) -> dict[str, float]:
    if not len(seconds):
        return {}
    values = torch.as_tensor(seconds).quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return dict(zip(("p10", "median", "p90"), values, strict=True))


def _print(title: str, facts: dict[str, str]) -> None:
    # Not a table: that would break paths in two.
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"\n[bold]{escape(title)}[/]")
    for name, value in facts.items():
        console.print(f"  [dim]{name:<{max(map(len, facts))}}[/]  {escape(value)}")
