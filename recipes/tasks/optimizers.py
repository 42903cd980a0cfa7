"""Optimizers, from the settings of `optimizer` in the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gqsgd.sparse.options import tables_of
from recipes.errors import RecipeError
from recipes.limits import OPTIMIZERS
from recipes.tasks.adam_of_tables import AdamOfTables
from recipes.tasks.schedules import make_schedule


@dataclass(frozen=True)
class OptimizerSettings:
    """The node `optimizer` of the configuration, field by field; conf/optimizer/default.yaml explains each of them.

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
    scale_lr: int | None = None

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ValueError(f"optimizer.name={self.name!r} is not one of {', '.join(OPTIMIZERS)}")


@dataclass(frozen=True)
class OwnOptimizer:
    """An optimizer of the user's own, from the node `optimizer` with a `_target_`.

    Attributes:
        target: the class, which is called with the parameters and with ``arguments``.
        arguments: keywords of the class.
        schedule, warmup, milestones, scale_lr: as in `OptimizerSettings`.
    """

    target: Any
    arguments: Mapping[str, Any] = field(default_factory=dict)
    schedule: str = "onecycle"
    warmup: float = 0.2
    milestones: tuple[float, ...] = ()
    scale_lr: int | None = None

    @classmethod
    def of(cls, target: Any, node: Mapping[str, Any]) -> OwnOptimizer:
        """The optimizer of a node."""
        own = {entry.name for entry in fields(cls)} - {"target", "arguments"}
        left_out = {*own, "name", "_target_"}
        arguments = {key: value for key, value in node.items() if key not in left_out}
        return cls(target, arguments, **{key: value for key, value in node.items() if key in own})

    @property
    def lr(self) -> float | None:
        """The rate, if the node names one."""
        return self.arguments.get("lr")


def scaled(settings: OptimizerSettings | OwnOptimizer, samples: int) -> OptimizerSettings | OwnOptimizer:
    """The settings with the rate of a global batch, by the linear rule of Goyal et al. 2017 (arXiv 1706.02677).

    Without ``scale_lr`` they stay as they are. A batch has the samples of all processes.

    Raises:
        RecipeError: there is no rate to be scaled.
    """
    if settings.scale_lr is None:
        return settings
    if settings.lr is None:
        raise RecipeError(f"optimizer.scale_lr={settings.scale_lr} scales optimizer.lr, and there is none; set it")
    lr = settings.lr * (samples / settings.scale_lr)
    if isinstance(settings, OwnOptimizer):
        return replace(settings, arguments={**settings.arguments, "lr": lr})
    return replace(settings, lr=lr)


def make_optimizer(module: nn.Module, settings: OptimizerSettings | OwnOptimizer, steps: float) -> dict[str, Any]:
    """Optimizer and schedule, as Lightning's `configure_optimizers` returns them.

    Weight decay applies to matrices. Biases and the parameters of normalisations are not decayed, because decay does
    not regularise them.

    Raises:
        RecipeError: the network gives sparse gradients, which the optimizer does not take.
    """
    if isinstance(settings, OwnOptimizer):
        optimizer = settings.target([p for p in module.parameters() if p.requires_grad], **settings.arguments)
        return _with_schedule(optimizer, settings, steps)
    tables = _tables(module, settings)
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = _optimizer([group for group in groups if group["params"]], tables, settings)
    return _with_schedule(optimizer, settings, steps)


def _with_schedule(optimizer: Optimizer, settings: OptimizerSettings | OwnOptimizer, steps: float) -> dict[str, Any]:
    schedule = make_schedule(optimizer, settings.schedule, steps, settings.warmup, settings.milestones)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _tables(module: nn.Module, settings: OptimizerSettings) -> list[Tensor]:
    """The parameters with sparse gradients."""
    tables = tables_of(module, frozen=True)
    # torch would refuse sparse gradients as well, but at the first step, and because of an addition, not of the decay.
    if tables and (settings.name == "adamw" or settings.weight_decay):
        first = next(iter(tables)).removesuffix(".weight")
        raise RecipeError(
            f"{first} gives sparse gradients, which optimizer.name={settings.name} "
            f"optimizer.weight_decay={settings.weight_decay} cannot take; set model.sparse=false, "
            "or optimizer.name=adam or sgd and optimizer.weight_decay=0"
        )
    return list(tables.values())


def _optimizer(groups: list[dict[str, Any]], tables: list[Tensor], settings: OptimizerSettings) -> Optimizer:
    if settings.name == "sgd":
        nesterov = settings.nesterov and settings.momentum > 0
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, nesterov=nesterov)
    if tables:
        return AdamOfTables(groups, tables, lr=settings.lr, betas=settings.betas)
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return kind(groups, lr=settings.lr, betas=settings.betas)
