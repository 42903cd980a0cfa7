"""Optimizers, from the settings of `optimizer` in the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recipes.errors import RecipeError
from recipes.models.sparse_gradients import gives_sparse_gradients
from recipes.tasks.adam_of_tables import AdamOfTables
from recipes.tasks.names import OPTIMIZERS
from recipes.tasks.schedules import make_schedule


class OptimizerError(RecipeError):
    """An optimizer that cannot train this network; the message names the remedy."""


@dataclass(frozen=True)
class OptimizerSettings:
    """The node `optimizer` of the configuration, field by field; conf/config.yaml explains each of them.

    Raises:
        ValueError: an unknown optimizer.
    """

    name: str
    lr: float
    momentum: float
    nesterov: bool
    betas: tuple[float, float]
    weight_decay: float
    schedule: str
    warmup: float
    milestones: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ValueError(f"optimizer.name={self.name!r} is not one of {', '.join(OPTIMIZERS)}")


def make_optimizer(module: nn.Module, settings: OptimizerSettings, steps: float) -> dict[str, Any]:
    """Optimizer and schedule, as Lightning's `configure_optimizers` returns them.

    Weight decay applies to matrices. Biases and the parameters of normalisations are not decayed, because decay does
    not regularise them.

    Args:
        module: what is trained.
        settings: the settings.
        steps: number of optimizer steps of the whole run.

    Raises:
        OptimizerError: the network gives sparse gradients, which the optimizer does not take.
    """
    tables = _tables(module, settings)
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = _optimizer([group for group in groups if group["params"]], tables, settings)
    schedule = make_schedule(optimizer, settings.schedule, steps, settings.warmup, settings.milestones)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _tables(module: nn.Module, settings: OptimizerSettings) -> list[nn.Parameter]:
    """The parameters with sparse gradients.

    Raises:
        OptimizerError: see `make_optimizer`.
    """
    tables = {name: child.weight for name, child in module.named_modules() if gives_sparse_gradients(child)}
    # torch would refuse sparse gradients as well, but at the first step, and because of an addition, not of the decay.
    if tables and (settings.name == "adamw" or settings.weight_decay):
        raise OptimizerError(
            f"{next(iter(tables))} gives sparse gradients, which optimizer.name={settings.name} "
            f"optimizer.weight_decay={settings.weight_decay} cannot take; set model.sparse=false, "
            "or optimizer.name=adam or sgd and optimizer.weight_decay=0"
        )
    return list(tables.values())


def _optimizer(groups: list[dict[str, Any]], tables: list[nn.Parameter], settings: OptimizerSettings) -> Optimizer:
    if settings.name == "sgd":
        nesterov = settings.nesterov and settings.momentum > 0
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, nesterov=nesterov)
    if tables:
        return AdamOfTables(groups, tables, lr=settings.lr, betas=settings.betas)
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return kind(groups, lr=settings.lr, betas=settings.betas)
