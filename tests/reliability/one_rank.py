"""What the state machine does on one rank: the public surface of the package on a small model."""

from __future__ import annotations

import copy
import gc
import hashlib
import io
import os
import pickle
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.functional import all_reduce, close
from lightning_gqsgd.hook import GQSGDState, register_gqsgd
from tests.distributed.models import batch, fingerprint, mlp
from tests.reliability.pool import initialise


class OneRank:
    """One rank's model, hook and states. Every method is an operation; see `pool.Pool`."""

    def __init__(self, rank: int, ranks: int, folder: Path, timeout_s: float) -> None:
        self.rank, self.ranks, self.folder, self.timeout_s = rank, ranks, folder, timeout_s
        self.model: DistributedDataParallel | None = None
        self.state: GQSGDState | None = None
        self.groups = 1
        self.steps = 0

    # --- life of a hook -----------------------------------------------------------------------------------------------

    def wrap(self) -> None:
        """Make a new model, without a hook."""
        self.model, self.state = None, None
        gc.collect()
        self.model = DistributedDataParallel(mlp(64), bucket_cap_mb=0.02)

    def register(self, fields: dict[str, Any]) -> str:
        """Register the hook on the model."""
        self.state = register_gqsgd(self.model, **fields)
        return fingerprint(self._model)

    def close(self) -> None:
        """Close the hook."""
        if self.state is not None:
            self.state.close()

    def drop(self) -> None:
        """Forget the model and the hook."""
        self.model = self.state = None
        gc.collect()

    def rewrap(self, freeze: bool) -> str:
        """Freeze or unfreeze the first layer, and go on with a new DDP model."""
        for parameter in self._model.module[0].parameters():
            parameter.requires_grad_(not freeze)
        self.model = self._state.rewrap(lambda module: DistributedDataParallel(module, bucket_cap_mb=0.02))
        return fingerprint(self._model)

    # --- training -----------------------------------------------------------------------------------------------------

    def train(self, steps: int, accumulate: bool = False, fails_in: str = "") -> str:
        """Train; the last step may fail in ``"forward"``, ``"backward"`` or ``"hook"``. Returns a hash of the bits."""
        optimizer = torch.optim.SGD([p for p in self._model.parameters() if p.requires_grad], lr=0.05)
        for number in range(steps):
            self.steps += 1
            fails = fails_in if number == steps - 1 else ""
            optimizer.zero_grad()
            if accumulate:
                with self._model.no_sync():
                    self._loss("").backward()
            self._backward(fails)
            optimizer.step()
        return fingerprint(self._model)

    def _backward(self, fails: str) -> None:
        handle = None
        if fails == "hook":
            last = [p for p in self._model.parameters() if p.requires_grad][0]
            handle = last.register_hook(_fail)
        try:
            with nullcontext():
                loss = self._loss(fails)
                if fails == "backward":
                    loss = _FailsInBackward.apply(loss)
                loss.backward()
        finally:
            if handle is not None:
                handle.remove()

    def _loss(self, fails: str) -> torch.Tensor:
        x, y = batch(self.rank, self.steps)
        if fails == "forward":
            raise ArithmeticError("the forward pass fails, as asked for")
        return nn.functional.cross_entropy(self._model(x), y)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self) -> bytes:
        """What a checkpoint of this rank would have, as torch.save writes it."""
        file = io.BytesIO()
        torch.save({"model": self._model.module.state_dict(), "hook": self._state.state_dict()}, file)
        return file.getvalue()

    def load(self, data: bytes, change: str = "") -> str:
        """Load a checkpoint; ``change``: what is wrong with it."""
        saved = torch.load(io.BytesIO(data), weights_only=True)
        hook = saved["hook"]
        if change == "truncated":
            del hook["seed"]
        elif change == "schema":
            hook["schema"] = 99
        elif change == "seed":
            hook["seed"] += 1
        elif change == "step":
            hook["step"] += 5
        self._state.load_state_dict(hook)
        self._model.module.load_state_dict(saved["model"])
        return fingerprint(self._model)

    # --- copies -------------------------------------------------------------------------------------------------------

    def copies(self) -> str:
        """Copy, pickle and save the model and the state; train nothing of it."""
        copied = copy.deepcopy(self._model)
        pickle.loads(pickle.dumps(self._state))  # noqa: S301 - its own bytes
        file = io.BytesIO()
        torch.save(self._model, file)
        file.seek(0)
        torch.load(file, weights_only=False)
        del copied
        gc.collect()
        return fingerprint(self._model)

    def fork(self) -> int:
        """Fork a child that uses nothing, collects garbage and ends; returns its exit code."""
        child = os.fork()
        if child == 0:
            try:
                gc.collect()
                os._exit(17 if self.state is not None and not self.state.is_closed else 0)
            finally:
                os._exit(18)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(child, 9)
        os.waitpid(child, 0)
        raise TimeoutError("a forked child did not end")

    # --- all_reduce ---------------------------------------------------------------------------------------------------

    def reduce(self, numels: list[int], dtypes: list[str], fields: dict[str, Any], at_once: bool) -> str:
        """Means of tensors, one after the other or all at once; returns a hash of their bits."""
        generator = torch.Generator().manual_seed(self.rank)
        tensors = [
            torch.randn(numel, generator=generator).to(getattr(torch, dtype))
            for numel, dtype in zip(numels, dtypes, strict=True)
        ]
        if at_once:
            means = [
                reduction.wait() for reduction in [all_reduce(tensor, async_op=True, **fields) for tensor in tensors]
            ]
        else:
            means = [all_reduce(tensor, **fields) for tensor in tensors]
        for mean, tensor in zip(means, tensors, strict=True):
            if tensor.is_floating_point() and not mean.isfinite().all():
                raise ArithmeticError("the mean is not finite")
        return hashlib.sha256(
            b"".join(mean.view(-1).view(torch.uint8).numpy().tobytes() for mean in means if mean.numel())
        ).hexdigest()

    def close_all_reduce(self) -> None:
        """Close what all_reduce has made."""
        close()

    # --- the process group --------------------------------------------------------------------------------------------

    def reinitialise(self) -> None:
        """Destroy the default process group, and make a new one."""
        dist.destroy_process_group()
        initialise(self.rank, self.ranks, self.folder, self.groups, self.timeout_s)
        self.groups += 1

    def rest(self) -> dict[str, int]:
        """What the process holds when nothing is under way."""
        gc.collect()
        names = [thread.name for thread in threading.enumerate()]
        return {
            "sequencers": names.count("gqsgd-sequencer"),
            "threads": psutil.Process().num_threads(),
            "files": psutil.Process().num_fds(),
        }

    @property
    def _model(self) -> DistributedDataParallel:
        assert self.model is not None
        return self.model

    @property
    def _state(self) -> GQSGDState:
        assert self.state is not None
        return self.state


def _fail(gradient: torch.Tensor) -> None:
    raise ArithmeticError("a gradient's hook fails, as asked for")


class _FailsInBackward(torch.autograd.Function):
    """The identity, whose backward pass fails."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        """The identity."""
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Raises ArithmeticError."""
        raise ArithmeticError("the backward pass fails, as asked for")
