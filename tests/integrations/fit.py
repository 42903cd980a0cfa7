"""One training run for all Lightning tests.

As a script (Lightning's popen launcher starts it again for the other ranks): options as JSON in argv[1], what a rank
saw as JSON into a folder. As a function, `fits`: in processes that exist already, as under torchrun.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.bits import bits_of

FLAVOUR = os.environ.get("FIT_FLAVOUR", "lightning.pytorch")
pl = importlib.import_module(FLAVOUR)


class Model(pl.LightningModule):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10))
        self.hooks: list[str] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.hooks = [self.trainer.strategy.model._get_ddp_logging_data().get("comm_hook", "none")]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def data() -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 32, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()), batch_size=16)


def fit(run: dict[str, Any], folder: Path) -> tuple[Any, Any]:
    strategy: Any = run["strategy"]
    if isinstance(strategy, dict):
        import lightning_gqsgd

        strategy = lightning_gqsgd.GQSGDStrategy(**strategy)
    logger = importlib.import_module(f"{FLAVOUR}.loggers").CSVLogger(folder, name="csv") if run.get("csv") else False
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=run.get("accelerator", "cpu"),
        devices=run.get("devices", 2),
        max_epochs=run.get("max_epochs", 1),
        max_steps=run.get("max_steps", -1),
        logger=logger,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        deterministic=True,
        **run.get("trainer", {}),
    )
    model = Model()
    trainer.fit(model, data(), ckpt_path=run.get("ckpt_path"))
    if run.get("save"):
        trainer.save_checkpoint(run["save"])
    return trainer, model


def fits(_: int, folder: Path, *runs: dict[str, Any]) -> list[dict[str, Any]]:
    """What a rank saw in each run."""
    results = []
    for run in runs:
        trainer, model = fit(run, folder)
        state = getattr(trainer.strategy, "gqsgd_state", None)
        results.append(
            {
                "rank": trainer.global_rank,
                "world": trainer.world_size,
                "step": trainer.global_step,
                "hooks": model.hooks,
                "strategy": type(trainer.strategy).__module__,
                "bits": bits_of(model.parameters()),
                "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
                "hook_step": None if state is None else state.step,
                "config": None if state is None else state.config.to_dict(),
            }
        )
    return results


def main() -> None:
    options = json.loads(sys.argv[1])
    folder = Path(options["folder"])
    torch.set_num_threads(1)
    results = fits(0, folder, *options["runs"])
    rank = os.environ.get("LOCAL_RANK", "0")
    (folder / f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
