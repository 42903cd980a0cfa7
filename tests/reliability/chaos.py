"""A training with checkpoints under torchrun's agent, to which faults happen."""

from __future__ import annotations

import os
import resource
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.hook import GQSGDState, register_gqsgd
from tests.distributed.models import batch, fingerprint, mlp

#: The hook's timeout in seconds, and that of the process group, which is made while the other rank is being started.
TIMEOUT_S, GROUP_TIMEOUT_S = 8.0, 60.0
#: Steps of a training, and between two checkpoints.
STEPS, SAVED_EVERY = 40, 8
#: Bytes of a file at most, where the disk is to be full: less than a checkpoint has.
FULL_DISK_BYTES = 2000


def launch(folder: Path, ranks: int, restarts: int, fault: dict[str, int | str]) -> None:
    """Train under torchrun's agent, in this process and its children; see `train`."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=folder.name,
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="fork",
    )
    try:
        elastic_launch(config, train)(folder, fault)
    except BaseException:
        (folder / "launcher-error").write_text(traceback.format_exc())
        raise


def train(folder: Path, fault: dict[str, int | str]) -> None:
    """Train on one rank, from the latest checkpoint on, and write what became of it.

    Args:
        folder: where the files go: process numbers, progress, checkpoints, errors, and a hash of the result.
        fault: what happens by itself in the first attempt: its ``kind``, the ``rank`` and the ``step``. Kinds:
            ``"raise"``, ``"slow"``, ``"full disk"`` and ``""``.
    """
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (folder / f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
        model = DistributedDataParallel(mlp(64), bucket_cap_mb=0.02)
        fields = {"codec": "linear", "memory": "diana", "reducer": "two_shot"}
        state = register_gqsgd(model, timeout=timedelta(seconds=TIMEOUT_S), **fields)
        first = _resume(folder, model, state)
        for step in range(first, STEPS):
            _fail(fault, rank, attempt, step)
            x, y = batch(rank, step)
            model.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.05 * parameter.grad  # type: ignore[operator]
            time.sleep(0.03)
            if (step + 1) % SAVED_EVERY == 0:
                _save(folder, model, state, step + 1)
            (folder / f"progress-{rank}").write_text(str(step + 1))
        (folder / f"result-{rank}").write_text(fingerprint(model))
        state.close()
    except BaseException:
        (folder / f"error-{attempt}-{rank}").write_text(traceback.format_exc())
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _fail(fault: dict[str, int | str], rank: int, attempt: int, step: int) -> None:
    if attempt or rank != fault.get("rank"):
        return
    if fault["kind"] == "slow":
        time.sleep(0.3)
    elif step == fault["step"] and fault["kind"] == "raise":
        raise ArithmeticError("this rank fails, as asked for")
    elif step == fault["step"] and fault["kind"] == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, FULL_DISK_BYTES))


def _save(folder: Path, model: DistributedDataParallel, state: GQSGDState, step: int) -> None:
    """Write a checkpoint beside its place, and then put it there. A collective."""
    hook = state.state_dict()
    if dist.get_rank() == 0:
        beside = folder / "checkpoint.new"
        torch.save({"step": step, "model": model.module.state_dict(), "hook": hook}, beside)
        beside.replace(folder / f"checkpoint-{step:03d}.pt")


def _resume(folder: Path, model: DistributedDataParallel, state: GQSGDState) -> int:
    """Load the latest checkpoint, if there is one; the number of the next step."""
    files = sorted(folder.glob("checkpoint-*.pt"))
    if not files:
        return 0
    saved = torch.load(files[-1], weights_only=True)
    model.module.load_state_dict(saved["model"])
    state.load_state_dict(saved["hook"])
    step: int = saved["step"]
    return step
