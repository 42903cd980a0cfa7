"""What tests of local steps between processes have in common: a model, ways of averaging, and hashes of bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_gqsgd import LocalSteps
from tests.bits import bits_of
from tests.distributed.models import train_with

#: No error at all, so that results can be compared with a calculation by hand.
NATIVE: dict[str, Any] = {"preset": "gqsgd", "reducer": "native"}

#: Steps between averages, fragments and delay, with a compression each: without a memory, and with two kinds of it.
WAYS: list[dict[str, Any]] = [
    {"every": 1, "outer_after": 0, "preset": "gqsgd_4bit"},
    {"every": 4, "preset": "gqsgd_2bit", "outer": "sgd"},
    {"every": 3, "outer_after": 0, "fragments": 2, "preset": "signsgd_ef"},
    {"every": 4, "outer_after": 4, "fragments": 3, "delay": 2, "preset": "gqsgd_4bit"},
    {"every": lambda number: 2 + number % 2, "fragments": 2, "delay": 1, "preset": "dore"},
    {"every": 3, "outer_after": 3, "preset": "gqsgd_4bit", "inner_state": "average", "anchor_dtype": torch.float64},
    {"every": 2, "outer_after": 2, "fragments": 2, "preset": "gqsgd_4bit", "anchor_dtype": torch.bfloat16},
]
STEPS = 10


class WithBuffers(nn.Module):
    """A network with running means, and with a counter, that differs from rank to rank until LocalSteps is made."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        layers = (nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def local_steps(model: nn.Module, way: dict[str, Any], lr: float = 0.1, momentum: float = 0.9) -> LocalSteps:
    """Momentum SGD with local steps around it."""
    return LocalSteps(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum), **way)


def trained(rank: int, way: dict[str, Any], steps: int) -> tuple[WithBuffers, LocalSteps]:
    """A model after some steps of a rank, and its optimizer."""
    model = WithBuffers(rank)
    optimizer = local_steps(model, way)
    train_with(model, optimizer, rank, range(steps))
    return model, optimizer


def loaded(rank: int, way: dict[str, Any], checkpoint: Any) -> tuple[WithBuffers, LocalSteps]:
    """A model and its optimizer with the weights and the state of a checkpoint."""
    weights, state = checkpoint
    model, optimizer = trained(rank, way, 0)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    return model, optimizer


def bits_of_anchors(optimizer: LocalSteps) -> str:
    """Hash of all anchors' bits."""
    return bits_of(anchor for part in optimizer.averages.fragments for _, anchor in part.entries())


def bits_of_model(model: nn.Module) -> str:
    """Hash of all parameters' and buffers' bits."""
    return bits_of((*model.parameters(), *model.buffers()))
