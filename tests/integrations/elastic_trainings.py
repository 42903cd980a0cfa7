"""Trainings with members that come and go, in Lightning, Fabric, Accelerate and the HF Trainer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.local_models import bits_of_model

STEPS = 60


def network() -> nn.Module:
    """A small network."""
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def batches(rank: int) -> DataLoader[Any]:
    """A member's own data."""
    x = torch.randn(STEPS * 8, 16, generator=torch.Generator().manual_seed(rank))
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=8)


def _join(rank: int, lighthouse: str) -> None:
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse
    os.environ["MASTER_PORT"] = "0"
    torch.set_num_threads(1)
    torch.manual_seed(rank)


def _losses(rank: int, loader: Any, model: nn.Module, optimizer: Any, backward: Callable[..., None]) -> list[float]:
    """The losses of a loop that trains in all steps of the loader."""
    losses = []
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        backward(loss)
        time.sleep(0.02 if rank else 0.01)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _facts(model: nn.Module, averages: Any, losses: list[float]) -> dict[str, Any]:
    """What a member knows after its training."""
    return {
        "bits": bits_of_model(model),
        "steps": averages.step,
        "samples": averages.samples,
        "learns": losses[-1] < losses[0],
    }


def lightning(rank: int, lighthouse: str, folder: str, resumes: bool = False) -> dict[str, Any]:
    """Lightning's Trainer; with ``resumes``, from the checkpoint of the member's own run before."""
    import lightning.pytorch as pl

    from lightning_gqsgd import GQSGDStrategy

    _join(rank, lighthouse)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            time.sleep(0.02 if rank else 0.01)
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    module = Module()
    strategy = GQSGDStrategy(local_steps="300ms", elastic=True, delay=1, bits=4, validate_at="anchor")
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=3 if resumes else 2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=f"{folder}/{rank}",
    )
    checkpoints = sorted(Path(folder, str(rank)).rglob("*.ckpt"))
    trainer.fit(module, batches(rank), batches(9), ckpt_path=str(checkpoints[-1]) if resumes else None)
    return _facts(module.net, strategy.gqsgd_state, module.losses)


def terminated(_: int, lighthouse: str, folder: str, hook: str) -> dict[str, Any]:
    """Lightning's Trainer, which gets SIGTERM in a hook where no step comes before Lightning itself ends the fit."""
    import lightning.pytorch as pl

    from lightning_gqsgd import GQSGDStrategy
    from tests.integrations.loops import QUIET

    _join(0, lighthouse)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            if hook == "validation_step":
                os.kill(os.getpid(), signal.SIGTERM)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if index == 20 and hook == "on_train_batch_end":
                os.kill(os.getpid(), signal.SIGTERM)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    module = Module()
    strategy = GQSGDStrategy(local_steps="1h", elastic=True, delay=1, bits=4, validate_at="anchor", timeout="5s")
    trainer = pl.Trainer(strategy=strategy, default_root_dir=folder, **{**QUIET, "devices": 1, "max_epochs": 2})
    exits: Any = "none"
    try:
        trainer.fit(module, batches(0), batches(9))
    except SystemExit as exit:
        exits = exit.code
    averages = strategy.gqsgd_state
    anchor = averages.state_dict()["merged"]["anchors"]["net.0.weight"]
    return {
        "exits": exits,
        "steps": averages.step,
        "samples": averages.samples,
        "merged": torch.allclose(anchor, module.net[0].weight, atol=0.05),
    }


def fabric(rank: int, lighthouse: str, folder: str) -> dict[str, Any]:
    """Fabric."""
    from lightning.fabric import Fabric

    from lightning_gqsgd import GQSGDFabricStrategy

    _join(rank, lighthouse)
    strategy = GQSGDFabricStrategy(local_steps="300ms", elastic=True, delay=1, bits=4)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=1)
    fabric.launch()
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
    losses = _losses(rank, batches(rank), model, optimizer, fabric.backward)
    strategy.finish()
    (averages,) = strategy.gqsgd_states
    fabric.save(f"{folder}/fabric{rank}.ckpt", {"model": model, "optimizer": optimizer})
    averages.close()
    return _facts(model, averages, losses)


def accelerate(rank: int, lighthouse: str, folder: str) -> dict[str, Any]:
    """Accelerate."""
    from accelerate import Accelerator

    from lightning_gqsgd import LocalSteps

    _join(rank, lighthouse)
    accelerator = Accelerator(cpu=True)
    model = network()
    inner = LocalSteps(model, torch.optim.AdamW(model.parameters(), 1e-2), every="300ms", elastic=True, delay=1, bits=4)
    model, optimizer, loader = accelerator.prepare(model, inner, batches(rank))
    losses = _losses(rank, loader, model, optimizer, accelerator.backward)
    optimizer.optimizer.finish()
    inner.close()
    return _facts(model, inner.averages, losses)


def transformers(rank: int, lighthouse: str, folder: str) -> dict[str, Any]:
    """The HF Trainer."""
    from transformers import Trainer, TrainingArguments

    from lightning_gqsgd import enable

    _join(rank, lighthouse)

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            time.sleep(0.02 if rank else 0.01)
            return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

    x = torch.randn(STEPS * 8, 16, generator=torch.Generator().manual_seed(rank))
    rows = [{"x": row, "labels": int(row[:4].argmax())} for row in x]
    model = Classifier()
    arguments = TrainingArguments(
        f"{folder}/hf{rank}",
        per_device_train_batch_size=8,
        num_train_epochs=1,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=10,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    callback = enable(trainer, local_steps="300ms", elastic=True, delay=1, bits=4)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return _facts(model, callback.averages, losses)
