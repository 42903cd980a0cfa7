"""What the state machine does on one rank: the public surface of the package on a small model."""

from __future__ import annotations

import gc
import io
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_gqsgd.ddp.functional import all_reduce, close
from lightning_gqsgd.ddp.hook import GQSGDState, register_gqsgd
from tests.bits import bits_of
from tests.distributed.models import batch, fingerprint, mlp, train
from tests.reliability.changes import change_state
from tests.reliability.copied import check_forked, check_spawned, copied_and_saved, trained_copy
from tests.reliability.pool import initialise

#: What `OneRank.remembered` gives where every memory is empty.
NOTHING_REMEMBERED = "nothing"


class OneRank:
    """One rank's model, hook and states. Every method is an operation; see `pool.Pool`."""

    def __init__(self, rank: int, ranks: int, folder: Path, timeout_s: float) -> None:
        self.rank, self.ranks, self.folder, self.timeout_s = rank, ranks, folder, timeout_s
        self.model: DistributedDataParallel | None = None
        self.state: GQSGDState | None = None
        self.second: tuple[DistributedDataParallel, GQSGDState] | None = None
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

    def register_torchs(self) -> None:
        """Register another hook than this package's on the model."""
        self._model.register_comm_hook(None, fp16_compress_hook)

    def rewrap(self, freeze: bool) -> str:
        """Freeze or unfreeze the first layer, and go on with a new DDP model."""
        for parameter in self._model.module[0].parameters():
            parameter.requires_grad_(not freeze)
        self.model = self._state.rewrap(lambda module: DistributedDataParallel(module, bucket_cap_mb=0.02))
        return fingerprint(self._model)

    # --- training -----------------------------------------------------------------------------------------------------

    def train(self, steps: int, accumulate: bool = False, fails_in: str = "") -> str:
        """Train; ``fails_in``: where the last step fails; see `_backward`. Returns a hash of the bits."""
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

    def train_without_sync(self, fails_in: str, zeroes: bool) -> str:
        """A `no_sync` block, which an exception may end, and a step after it; ``zeroes``: without its gradients."""
        optimizer = torch.optim.SGD([p for p in self._model.parameters() if p.requires_grad], lr=0.05)
        optimizer.zero_grad()
        self.steps += 1
        with suppress(ArithmeticError), self._model.no_sync():
            self._backward(fails_in)
        if zeroes:
            optimizer.zero_grad()
        self._backward("")
        optimizer.step()
        return fingerprint(self._model)

    def _backward(self, fails: str) -> None:
        handle = self._failing_hook(fails)
        try:
            loss = self._loss(fails)
            if fails == "backward":
                loss = _FailsInBackward.apply(loss)
            loss.backward()
        finally:
            if handle is not None:
                handle.remove()

    def _failing_hook(self, fails: str) -> RemovableHandle | None:
        """A hook that fails, of the first or last parameter; in the middle, after its gradient was accumulated."""
        trained = [p for p in self._model.parameters() if p.requires_grad]
        if fails == "accumulated":
            return trained[len(trained) // 2].register_post_accumulate_grad_hook(_fail)
        if fails in ("hook", "last hook"):
            return trained[0 if fails == "hook" else -1].register_hook(_fail)
        return None

    def _loss(self, fails: str) -> torch.Tensor:
        x, y = batch(self.rank, self.steps)
        if fails == "forward":
            raise ArithmeticError("the forward pass fails, as asked for")
        return nn.functional.cross_entropy(self._model(x), y)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self) -> bytes:
        """What a checkpoint of this rank would have, as torch.save writes it."""
        return _checkpoint(self._model, self._state)

    def load(self, data: bytes, change: str = "", hook_only: bool = False) -> str:
        """Load a checkpoint; ``change``: see `changes`; ``hook_only``: nothing of its model."""
        saved = torch.load(io.BytesIO(data), weights_only=True)
        change_state(saved["hook"], change)
        self._state.load_state_dict(saved["hook"])
        if not hook_only:
            self._model.module.load_state_dict(saved["model"])
        return fingerprint(self._model)

    def save_another(self, fields: dict[str, Any], width: int, depth: int = 3) -> bytes:
        """A checkpoint of another model with a hook, after two steps."""
        model = DistributedDataParallel(mlp(width, depth))
        state = register_gqsgd(model, **fields)
        train(model, self.rank, range(2))
        data = _checkpoint(model, state)
        state.close()
        return data

    def remembered(self) -> str:
        """Hash of what this rank remembers."""
        store, numbers = self._state._store, sorted(self._state._parameters.remembered)
        rows = [store.row(kind, number) for kind in store.kinds for number in numbers]
        if not any(row.any() for row in rows):
            return NOTHING_REMEMBERED
        return bits_of(rows)

    # --- copies, and a second model -----------------------------------------------------------------------------------

    def copies(self) -> str:
        """Copy, pickle and save the model and the state; train nothing of it."""
        copied_and_saved(self._model, self._state)
        return fingerprint(self._model)

    def train_a_copy(self, count: int, fields: dict[str, Any]) -> list[str]:
        """Train a copy of the model, and the model, for so many steps without a hook on the copy, and with one."""
        self.steps += count
        return trained_copy(self._model, self.rank, range(self.steps - count, self.steps), fields)

    def fork(self) -> None:
        """Fork a child that uses nothing."""
        check_forked(self.state)

    def spawn(self) -> None:
        """Start a child anew that uses the model."""
        check_spawned(self._model, self._state)

    def make_second(self, fields: dict[str, Any]) -> None:
        """Make a second model with a hook, instead of an earlier one."""
        self.second = None
        gc.collect()
        model = DistributedDataParallel(mlp(64), bucket_cap_mb=0.01)
        self.second = model, register_gqsgd(model, **fields)

    def train_two(self, turns: list[int]) -> list[str]:
        """Train two models, one step at each turn; ``turns``: 1 for the second one. Returns hashes of both."""
        assert self.second is not None
        models = [self._model, self.second[0]]
        for turn in turns:
            self.steps += 1
            train(models[turn], self.rank, range(self.steps, self.steps + 1))
        return [fingerprint(model) for model in models]

    def drop_second(self) -> None:
        """Forget the second model."""
        self.second = None
        gc.collect()

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
        return bits_of(means)

    def close_all_reduce(self) -> None:
        """Close what all_reduce has made."""
        close()

    # --- the process group --------------------------------------------------------------------------------------------

    def reinitialise(self) -> None:
        """Destroy the default process group, and make a new one. A second model goes with the old one."""
        self.drop_second()
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


def _checkpoint(model: DistributedDataParallel, state: GQSGDState) -> bytes:
    file = io.BytesIO()
    torch.save({"model": model.module.state_dict(), "hook": state.state_dict()}, file)
    return file.getvalue()


def _fail(tensor: torch.Tensor) -> None:
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
