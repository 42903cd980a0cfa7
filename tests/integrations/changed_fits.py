"""Fits of Lightning's Trainer in which a callback changes the model at random; every rank calls `fits`."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_gqsgd.errors import ConfigError
from tests.distributed.models import fingerprint, mlp
from tests.distributed.random_changes import CHANGES, HOOKS, STEPS
from tests.integrations.loops import data, fitted


class _Changed(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y % 10)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Changes(pl.Callback):
    """Changes the model before each batch, and trains what is new as well."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.seen: list[str] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # An exception in a backward pass ends a fit.
        name = self.chance.choice([name for name in CHANGES if name != "interrupt"])
        CHANGES[name](pl_module.net, self.chance)
        (optimizer,) = trainer.optimizers
        optimizer.param_groups[0]["params"] = list(pl_module.parameters())
        self.seen.append(name)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.seen.append(fingerprint(pl_module))


def fits(_: int, seeds: range) -> list[list[str]]:
    """What a rank sees of each fit: the changes, the bits after each batch, and the error, if there is one."""
    results = []
    for seed in seeds:
        chance = random.Random(seed)  # noqa: S311 - no secrets
        changes = _Changes(chance)
        module = _Changed()
        hook = {**chance.choice(HOOKS), "find_unused_parameters": chance.random() < 0.5}
        try:
            fitted(module, hook, [changes], batches=data(STEPS), max_epochs=1)
        except (ConfigError, RuntimeError) as error:
            changes.seen.append(f"{type(error).__name__}: {str(error)[:60]}")
        changes.seen.append(fingerprint(module))
        results.append(changes.seen)
    return results
