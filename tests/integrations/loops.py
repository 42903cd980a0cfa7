"""Small modules and a Trainer for tests of what training loops do; every rank calls `fitted`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_gqsgd
from tests.distributed.models import fingerprint

#: One of each reducer, and one that remembers.
STRATEGIES: list[dict[str, Any]] = [
    {"reducer": "sum"},
    {"reducer": "two_shot", "bits": 4},
    {"reducer": "gather"},
    {"preset": "signsgd_ef"},
]
NATIVE: dict[str, Any] = {"reducer": "native"}


def data(batches: int = 8, seed: int = 1, batch_size: int = 16) -> DataLoader:
    """So many batches on each of two ranks."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * batches * batch_size, 32, generator=generator)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=batch_size)


class Classifier(pl.LightningModule):
    """Backbone and head, so that `BackboneFinetuning` finds its way."""

    def __init__(self, seed: int = 0, momentum: float = 0.9) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.lr, self.momentum = 0.1, momentum
        self.backbone = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.validation_step(batch, index)

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr, momentum=self.momentum)


class Gan(pl.LightningModule):
    """Two optimizers by hand, each with the other's parameters frozen; ``accumulate`` batches between steps."""

    def __init__(self, accumulate: int = 1, clip: float | None = None, toggle: bool = True, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.automatic_optimization = False
        self.accumulate, self.clip, self.toggle = accumulate, clip, toggle
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
        self.discriminator = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: Any, index: int) -> Tensor:
        real = batch[0]
        noise = real[:, :16].roll(1, 0)
        steps = (index + 1) % self.accumulate == 0
        losses = []
        for optimizer, faked in zip(self.optimizers(), (True, False), strict=True):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            fake = self.discriminator(self.generator(noise))
            loss = nn.functional.softplus(-fake).mean()
            if not faked:
                loss = nn.functional.softplus(fake).mean() + nn.functional.softplus(-self.discriminator(real)).mean()
            if steps:
                self.manual_backward(loss)
            else:
                with self.trainer.strategy.block_backward_sync():
                    self.manual_backward(loss)
            if steps:
                if self.clip is not None:
                    self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
            if self.toggle:
                self.untoggle_optimizer(optimizer)
            losses.append(loss.detach())
        self.log("loss", losses[1])
        return torch.stack(losses).sum()

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.discriminator)
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in parts], []


class Installed(pl.Callback):
    """DDP itself reports our hook, in every batch."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        hook = trainer.strategy.model._get_ddp_logging_data().get("comm_hook", "none")
        assert (hook == "gqsgd_hook") == hasattr(trainer.strategy, "gqsgd_state"), hook


class Seen(pl.Callback):
    """What a rank saw: losses, and what the strategy said."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.said: list[str] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if hasattr(trainer.strategy, "gqsgd_state"):
            trainer.strategy._rank_zero_info = self.said.append

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float((outputs or trainer.callback_metrics)["loss"]))


#: Options of a Trainer on two CPU processes that writes nothing.
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 2,
    "max_epochs": 1,
    "logger": False,
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


def trainer_of(strategy: Any, callbacks: Sequence[Any] = (), **options: Any) -> pl.Trainer:
    """A quiet Trainer on two CPU processes; a strategy is a name, an instance, or arguments of ours."""
    if isinstance(strategy, dict):
        strategy = lightning_gqsgd.GQSGDStrategy(**strategy)
    return pl.Trainer(strategy=strategy, callbacks=[*callbacks, Installed()], **{**QUIET, **options})


def fitted(
    module: Any, strategy: Any, callbacks: Sequence[Any] = (), batches: DataLoader | None = None, **options: Any
) -> dict[str, Any]:
    """Fit on two ranks; what to compare, with the Trainer."""
    seen = Seen()
    trainer = trainer_of(strategy, [*callbacks, seen], **options)
    trainer.fit(module, batches or data())
    state = getattr(trainer.strategy, "gqsgd_state", None)
    return {
        "bits": fingerprint(module),
        "losses": seen.losses,
        "said": seen.said,
        "hook_steps": None if state is None else state.step,
        "steps": trainer.global_step,
        "trainer": trainer,
    }
