"""Small trainings with checkpoints, to which faults happen: one function for each way to train.

python -m tests.reliability.trainings FOLDER WAY ATTEMPT

Each rank writes files into the folder: its process number, its progress, the first step of each attempt, its error, and
a hash of its result. Data and faults depend on the step alone, so a training that was interrupted ends with the bits of
one that was not, wherever it goes on: that it goes on from the latest checkpoint is seen in its first step.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd import GQSGDKwargs
from lightning_gqsgd.ddp.hook import register_gqsgd
from lightning_gqsgd.local_steps.optimizer import LocalSteps
from tests.distributed.models import batch, fingerprint, mlp

#: Seconds that a process group waits while ranks are being started. The hook of `with_hook` has a shorter timeout.
GROUP_TIMEOUT_S = 60.0
#: Steps of a training, and between two checkpoints.
STEPS, SAVED_EVERY = 40, 8
#: Bytes of a file at most, where the disk is to be full: less than a checkpoint has, more than an error's traceback.
FULL_DISK_BYTES = 20_000
#: Compression with two memories, so that a checkpoint has much to forget.
FIELDS: dict[str, Any] = {"codec": "linear", "memory": "diana", "reducer": "two_shot"}


@dataclass(frozen=True)
class Run:
    """One rank of one attempt.

    Attributes:
        folder: where all files go.
        rank: number of the rank.
        ranks: number of ranks.
        attempt: 0, or how often the training was started again.
        fault: what happens by itself in the first attempt: its ``kind``, the ``rank`` and the ``step``. Kinds:
            ``"raise"``, ``"slow"``, ``"full disk"`` and ``""``.
    """

    folder: Path
    rank: int
    ranks: int
    attempt: int
    fault: dict[str, int | str] = field(default_factory=dict)

    @classmethod
    def of_environment(cls, folder: Path, attempt: int, fault: dict[str, int | str]) -> Run:
        """The run that torchrun's environment variables name."""
        return cls(folder, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), attempt, fault)

    def begin(self, step: int) -> None:
        """Say which step is the first of this attempt, and let the fault of a step happen."""
        first = self.folder / f"first-{self.attempt}-{self.rank}"
        if not first.exists():
            first.write_text(str(step))
        if self.attempt or self.rank != self.fault.get("rank"):
            return
        if self.fault["kind"] == "slow":
            time.sleep(0.3)
        elif step == self.fault["step"] and self.fault["kind"] == "raise":
            self.strike()
            raise ArithmeticError("this rank fails, as asked for")
        elif step == self.fault["step"] and self.fault["kind"] == "full disk":
            self.strike()
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, FULL_DISK_BYTES))

    def strike(self) -> None:
        """Say which checkpoint is there when a fault happens."""
        (self.folder / "struck").write_text(str(latest_step(self.folder, self.ranks)))

    def end(self, step: int) -> None:
        """Say that a step is over."""
        time.sleep(0.03)
        (self.folder / f"progress-{self.rank}").write_text(str(step + 1))

    def save(self, state: dict[str, Any], step: int, name: str = "") -> None:
        """Write a checkpoint beside its place, and then put it there."""
        beside = self.folder / f"new{name}"
        torch.save({"step": step, **state}, beside)
        beside.replace(self.folder / f"checkpoint-{step:03d}{name}.pt")

    def latest(self, *names: str) -> list[Path]:
        """The files of the latest step that has one of each name; empty: there is no such step."""
        for step in range(STEPS, 0, -1):
            files = [self.folder / f"checkpoint-{step:03d}{name}.pt" for name in names]
            if all(file.exists() for file in files):
                return files
        return []


def latest_step(folder: Path, ranks: int) -> int:
    """The step of the latest complete checkpoint by the names of all files, of any way to train; 0: there is none.

    The trainings look for their checkpoints in other ways, which this is to be compared with.
    """
    matches = [re.fullmatch(r"checkpoint-(\d{3})(-\d+)?", file.stem) for file in folder.glob("checkpoint-*")]
    files = Counter((int(match[1]), bool(match[2])) for match in matches if match)
    whole = [step for (step, is_of_rank), number in files.items() if number == (ranks if is_of_rank else 1)]
    return max(whole, default=0)


def last_words(error: BaseException) -> str:
    """The exception and the first line of its message, without its traceback and the exceptions before it."""
    return traceback.format_exception_only(error)[-1].splitlines()[0]


def train(way: str, run: Run) -> None:
    """Train on one rank, from the latest checkpoint on, and write what became of it."""
    (run.folder / f"pid-{run.attempt}-{run.rank}").write_text(str(os.getpid()))
    (run.folder / f"found-{run.attempt}-{run.rank}").write_text(str(latest_step(run.folder, run.ranks)))
    try:
        torch.set_num_threads(1)
        (run.folder / f"result-{run.rank}").write_text(fingerprint(WAYS[way].train(run)))
    except BaseException as error:
        (run.folder / f"words-{run.attempt}-{run.rank}").write_text(last_words(error))
        (run.folder / f"error-{run.attempt}-{run.rank}").write_text(traceback.format_exc())
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def with_hook(run: Run) -> nn.Module:
    """DDP with the hook."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    return _with_hook(run, timeout=timedelta(seconds=WAYS["hook"].timeout_s), **FIELDS)


def with_auto(run: Run) -> nn.Module:
    """DDP with a hook that tries widths, and may make place for plain DDP, which has the process group's timeout."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=WAYS["auto"].timeout_s))
    return _with_hook(run, auto=True, allow=(32, 8, 4))


def _with_hook(run: Run, **fields: Any) -> nn.Module:
    model = DistributedDataParallel(mlp(64), bucket_cap_mb=0.02)
    state, first = register_gqsgd(model, **fields), 0
    for file in run.latest(""):
        saved = torch.load(file, weights_only=True)
        model.module.load_state_dict(saved["model"])
        state.load_state_dict(saved["hook"])
        first = saved["step"]
    for step in range(first, STEPS):
        run.begin(step)
        model.zero_grad()
        _loss(model, run, step).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad  # type: ignore[operator]
        if (step + 1) % SAVED_EVERY == 0:
            hook = state.state_dict()  # a collective
            if run.rank == 0:
                run.save({"model": model.module.state_dict(), "hook": hook}, step + 1)
        run.end(step)
    state.close()
    return model


def with_local_steps(run: Run) -> nn.Module:
    """Local steps; every rank saves its own state."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    model, first = mlp(64), 0
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = LocalSteps(
        model,
        inner,
        every=5,
        outer_after=10,
        fragments=2,
        delay=1,
        timeout=timedelta(seconds=WAYS["local steps"].timeout_s),
    )
    files = run.latest(*(f"-{rank}" for rank in range(run.ranks)))
    if files:
        saved = torch.load(files[run.rank], weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first, STEPS):
        run.begin(step)
        optimizer.zero_grad()
        _loss(model, run, step).backward()
        optimizer.step()
        if (step + 1) % SAVED_EVERY == 0:
            run.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step + 1, f"-{run.rank}")
        run.end(step)
    optimizer.finish()
    optimizer.close()
    return model


def with_lightning(run: Run) -> nn.Module:
    """Lightning's Trainer with the strategy, and its own checkpoints."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from lightning_gqsgd import GQSGDStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = mlp(64)

        def training_step(self, _: object, index: int) -> torch.Tensor:
            run.begin(self.global_step)
            return _loss(self.network, run, self.global_step)

        def on_train_batch_end(self, *_: object) -> None:
            run.end(self.global_step - 1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    node = int(os.environ["LOCAL_WORLD_SIZE"])
    saving = ModelCheckpoint(
        run.folder,
        "checkpoint-{step:03d}",
        auto_insert_metric_name=False,
        every_n_train_steps=SAVED_EVERY,
        save_top_k=-1,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=node,
        num_nodes=run.ranks // node,
        strategy=GQSGDStrategy(**FIELDS, timeout=timedelta(seconds=WAYS["Lightning"].timeout_s), bucket_cap_mb=0.02),
        callbacks=[saving],
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Module()
    files = sorted(run.folder.glob("checkpoint-*.ckpt"))
    trainer.fit(module, DataLoader(torch.zeros(STEPS)), ckpt_path=files[-1] if files else None, weights_only=True)
    return module


def with_accelerate(run: Run) -> nn.Module:
    """Accelerate with the handler; `save_state` writes a folder, which is put in its place when it is whole."""
    from accelerate import Accelerator, InitProcessGroupKwargs

    timeout = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=WAYS["Accelerate"].timeout_s))
    handler = GQSGDKwargs(**FIELDS, bucket_cap_mb=1)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler, timeout])
    accelerator.register_for_checkpointing(handler)
    model = mlp(64)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    folders, first = sorted(run.folder.glob("checkpoint-*")), 0
    if folders:
        accelerator.load_state(str(folders[-1]))
        first = int(folders[-1].name.split("-")[1])
    for step in range(first, STEPS):
        run.begin(step)
        optimizer.zero_grad()
        accelerator.backward(_loss(model, run, step))
        optimizer.step()
        if (step + 1) % SAVED_EVERY == 0:
            accelerator.save_state(str(run.folder / "new"))
            accelerator.wait_for_everyone()
            if run.rank == 0:
                (run.folder / "new").rename(run.folder / f"checkpoint-{step + 1:03d}")
        run.end(step)
    accelerator.end_training()
    return model


def _loss(model: nn.Module, run: Run, step: int) -> torch.Tensor:
    x, y = batch(run.rank, step)
    return nn.functional.cross_entropy(model(x), y)


def _steps_of_files(folder: Path) -> list[int]:
    """The steps of the checkpoints that `Run.save` wrote, which are read whole."""
    return [torch.load(file, weights_only=True)["step"] for file in sorted(folder.glob("checkpoint-*.pt"))]


def _steps_of_lightning(folder: Path) -> list[int]:
    return [torch.load(file, weights_only=True)["global_step"] for file in sorted(folder.glob("checkpoint-*.ckpt"))]


def _steps_of_accelerate(folder: Path) -> list[int]:
    from safetensors.torch import load_file

    folders = sorted(folder.glob("checkpoint-*"))
    assert all(load_file(each / "model.safetensors") for each in folders)
    return [int(each.name.split("-")[1]) for each in folders]


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        train: trains on one rank; returns the model.
        steps: reads all checkpoints of a folder; returns their steps.
        timeout_s: seconds that a collective of a step waits.
        waits: how many collectives of a step may wait as long, one after the other.
        is_exact: whether results are the same in every run; with auto, they depend on what was measured.
        is_ours: whether all collectives are the package's, whose errors say what happened; others are a framework's.
    """

    train: Callable[[Run], nn.Module]
    steps: Callable[[Path], list[int]] = _steps_of_files
    timeout_s: float = 8.0
    waits: int = 1
    is_exact: bool = True
    is_ours: bool = True

    @property
    def patience_s(self) -> float:
        """Seconds after which a rank whose peer stands still has an error."""
        return self.timeout_s * self.waits


WAYS = {
    "hook": Way(with_hook),
    "local steps": Way(with_local_steps),
    # Ranks meet within the same time as they wait for each other later, so this is longer.
    "auto": Way(with_auto, timeout_s=20.0, is_exact=False, is_ours=False),
    # Lightning begins every step with a broadcast of its own, and goes on when it has waited in vain.
    "Lightning": Way(with_lightning, _steps_of_lightning, timeout_s=20.0, waits=2, is_ours=False),
    "Accelerate": Way(with_accelerate, _steps_of_accelerate, timeout_s=20.0, is_ours=False),
}


if __name__ == "__main__":
    train(sys.argv[2], Run.of_environment(Path(sys.argv[1]), int(sys.argv[3]), {}))
