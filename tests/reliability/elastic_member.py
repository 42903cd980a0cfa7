"""A member of the chaos of `test_elastic_chaos`: Lightning's Trainer, until a file says that it is over.

python -m tests.reliability.elastic_member FOLDER NAME WIDTH TIMEOUT_S
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gqsgd import GQSGDStrategy


class Module(pl.LightningModule):
    """A network with buffers of both kinds.

    Args:
        width: of its hidden layers.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 4),
        )

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """A step that takes a while."""
        time.sleep(0.01)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Journal(pl.Callback):
    """Writes down each merge, and stops when it is over.

    Args:
        folder: where files are.
        name: of this member.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._over = folder / "over"
        self._file = (folder / f"{name}.jsonl").open("a", buffering=1)
        self._steps = (folder / f"{name}.steps").open("wb", buffering=0)
        self._merges = 0
        self._began: float | None = None
        self._longest = 0.0

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Count the step that begins, where a signal cannot make it forgotten."""
        self._steps.seek(0)
        self._steps.write(struct.pack("q", trainer.global_step + 1))
        now = time.monotonic()
        self._longest = max(self._longest, now - (self._began or now))
        self._began = now

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Look for a new merge."""
        averages = trainer.strategy.gqsgd_state
        shared = averages._shared
        with shared.lock:
            line = {"merge": shared.merges, "checksum": shared.checksum(), "samples": shared.samples}
        if shared.merges != self._merges:
            self._merges = line["merge"]
            if averages._thread.latest is not None:  # or it has what another member had when this one came
                line |= {"time": time.time(), "members": averages.world_size, "failed": averages.failed}
                line |= {"step": trainer.global_step, "longest": self._longest}
                self._longest = 0.0
            self._file.write(json.dumps(line) + "\n")
        if self._over.exists():
            trainer.should_stop = True

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Write down how this has ended."""
        self._file.write(json.dumps({"end": type(exception).__name__, "words": str(exception)[:300]}) + "\n")


def main() -> None:
    """Train."""
    folder = Path(sys.argv[1])
    name = sys.argv[2]
    timeout = timedelta(seconds=float(sys.argv[4]))
    torch.set_num_threads(1)
    x = torch.randn(4096, 16)
    journal = Journal(folder, name)
    trainer = pl.Trainer(
        strategy=GQSGDStrategy(local_steps="1s", delay=1, elastic=True, bits=4, timeout=timeout),
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        logger=False,
        callbacks=[journal],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(int(sys.argv[3]))
    trainer.fit(module, DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=16))
    averages: Any = trainer.strategy.gqsgd_state  # type: ignore[attr-defined]
    bits = [tensor.double().sum().item() for tensor in (*module.parameters(), *module.buffers())]
    journal._file.write(json.dumps({"finished": bits, "samples": averages.samples, "pid": os.getpid()}) + "\n")


if __name__ == "__main__":
    main()
