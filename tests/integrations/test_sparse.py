"""Tables with sparse gradients under Lightning, Fabric and Accelerate, with clipped and accumulated gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_gqsgd import GQSGDFabricStrategy, GQSGDKwargs, GQSGDStrategy
from tests.distributed.models import fingerprint
from tests.distributed.ranks import run
from tests.integrations.loops import QUIET

FIELDS: dict[str, Any] = {"sparse": "gather", "min_numel": 1, "bits": 4}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(200, 8, sparse=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).mean(1)).square().mean()


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.network(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


def _batches() -> list[Tensor]:
    return list(torch.randint(0, 200, (24, 8, 3), generator=torch.Generator().manual_seed(1)))


def _lightning(rank: int) -> list[str]:
    strategy = GQSGDStrategy(**FIELDS)
    trainer = pl.Trainer(strategy=strategy, gradient_clip_val=0.01, accumulate_grad_batches=2, **QUIET)
    module = Module()
    before = fingerprint(module)
    trainer.fit(module, torch.utils.data.DataLoader(_batches(), batch_size=None))  # type: ignore[arg-type]
    assert strategy.gqsgd_state is not None
    assert strategy.gqsgd_state.step == 6  # of 24 batches over 2 ranks, two for each step
    return [before, fingerprint(module)]


def _fabric(rank: int) -> list[str]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=GQSGDFabricStrategy(**FIELDS))
    fabric.launch()
    network = Network()
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.1))
    before = fingerprint(network)
    for batch in _batches()[rank::2]:
        optimizer.zero_grad()
        fabric.backward(model(batch))
        optimizer.step()
    return [before, fingerprint(network)]


def _accelerate(rank: int) -> list[str]:
    handler = GQSGDKwargs(**FIELDS)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler], gradient_accumulation_steps=2)
    network = Network()
    model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))
    before = fingerprint(network)
    for batch in _batches()[rank::2]:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    return [before, fingerprint(network)]


@pytest.mark.slow
@pytest.mark.parametrize("train", [_lightning, _fabric, _accelerate])
def test_tables_are_trained_to_the_same_bits_on_all_ranks(train: Any, tmp_path: Path) -> None:
    (before, mine), (_, other) = run(train, 2, tmp_path, initialise=False)
    assert mine == other
    assert mine != before
