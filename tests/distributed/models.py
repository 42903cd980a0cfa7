"""A model, its data, and a loop, for tests of the hook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.ddp.functional import all_reduce, close
from lightning_gqsgd.ddp.hook import GQSGDState, register_gqsgd
from tests.bits import bits_of
from tests.errors import error_text


def mlp(width: int = 128, depth: int = 3) -> nn.Sequential:
    """Weights above and biases below the default ``min_numel``; the same on every rank."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(32, width)]
    for _ in range(depth - 2):
        layers += [nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(width, 10))


def wrapped(ddp: dict[str, Any], hook: dict[str, Any], model: nn.Module | None = None):
    """A DDP model with the hook on it."""
    model = DistributedDataParallel(model or mlp(), **ddp)
    state = register_gqsgd(model, **hook)
    assert model._get_ddp_logging_data()["comm_hook"] == "gqsgd_hook"
    return model, state


def save(model: DistributedDataParallel, state: GQSGDState, rank: int, path: Path) -> None:
    """Save a model and the state of its hook on rank 0. The other ranks take part if there is a memory."""
    saved = state.state_dict() if rank == 0 or state.config.remembers else None
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "gqsgd": saved}, path)
    dist.barrier()


def resume(path: Path, ddp: dict[str, Any], hook: dict[str, Any], model: nn.Module | None = None):
    """Another model with another hook, which go on from a file of `save`."""
    checkpoint = torch.load(path, weights_only=True)
    model = model or mlp()
    model.load_state_dict(checkpoint["model"])
    model, state = wrapped(ddp, hook, model)
    state.load_state_dict(checkpoint["gqsgd"])
    return model, state


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """This rank's data of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 32, generator=generator)
    return x, (x.sum(1) > 0).long()


def loss_of(model: Callable[[Tensor], Tensor], rank: int, step: int) -> Tensor:
    """The loss of this rank's data of a step."""
    x, y = batch(rank, step)
    return nn.functional.cross_entropy(model(x).float(), y)


def train(model: nn.Module, rank: int, steps: range, lr: float = 0.1) -> list[float]:
    """Plain SGD; returns the losses."""
    return train_with(model, torch.optim.SGD(model.parameters(), lr=lr), rank, steps)


def refused_step(model: nn.Module, rank: int, step: int) -> str:
    """The text of the ConfigError that a step raises before it changes a weight."""
    before = fingerprint(model)
    text = error_text(ConfigError, train, model, rank, range(step, step + 1))
    assert fingerprint(model) == before
    return text


def train_with(model: nn.Module, optimizer: Any, rank: int, steps: range) -> list[float]:
    """Make some steps on this rank's own data; returns the losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Branches(nn.Module):
    """Two layers, of which each batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(32, 64) for _ in range(2)])
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, use: int) -> torch.Tensor:
        return self.head(self.layers[use](x))


def fingerprint(model: nn.Module) -> str:
    """Hash of all parameters' bits."""
    return bits_of(model.parameters())


def finish(state: GQSGDState, model: nn.Module) -> dict[str, Any]:
    """Close the hook; what a test compares."""
    totals = state.telemetry.totals()
    state.close()
    return {"bits": fingerprint(model), "totals": totals}


def means_of(cases: list[dict[str, Any]]) -> list[list[float]]:
    """Means of one tensor of several pieces in each case, and of several tensors at once."""
    x = torch.randn(1_200_000, generator=torch.Generator().manual_seed(dist.get_rank()))
    results = [all_reduce(x, step=1, bits=6, **fields)[::1000].tolist() for fields in cases]
    waiting = [all_reduce(x[: 5000 + number], step=number, async_op=True) for number in range(10)]
    results += [one.wait().tolist() for one in waiting]
    close()
    return results


def trained_under(hooks: list[dict[str, Any]]) -> list[str]:
    """The bits of a model that is trained under each hook."""
    bits = []
    for hook in hooks:
        model, state = wrapped({"bucket_cap_mb": 0.03}, {"sample_every": 2, **hook})
        train(model, dist.get_rank(), range(6))
        result = finish(state, model)
        assert result["totals"]["rel_l2"] > 0
        bits.append(result["bits"])
    return bits
