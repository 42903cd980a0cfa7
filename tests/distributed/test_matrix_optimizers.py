"""Dion and MuLoCo between processes: the same bits on all ranks, and what the papers say of their averages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gqsgd import LocalSteps
from lightning_gqsgd.research.optim import Dion, MuonAdamW, matrices_of
from tests.distributed.models import loss_of, mlp, train_with
from tests.distributed.ranks import run

RANKS, STEPS = 3, 8


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _dion(rank: int, fields: dict[str, Any]) -> tuple[bytes, list[float], int, float]:
    """Bits of the parameters, losses, numbers averaged in a step, and how far the momentum is from the ranks' mean."""
    model = mlp()
    optimizer = Dion(*matrices_of(model), lr=0.02, **fields)
    losses = train_with(model, optimizer, rank, range(STEPS))
    numel = optimizer.averaged_numel
    momentum = optimizer.state[model[0].weight]["momentum"]
    before = momentum.clone()
    optimizer.average_momenta()
    return _flat(model).numpy().tobytes(), losses, numel, float((momentum - before).norm() / momentum.norm())


def test_factors_give_the_step_of_mean_gradients(tmp_path: Path) -> None:
    everyone = run(_dion, RANKS, tmp_path, {})
    model = mlp()
    optimizer = Dion(*matrices_of(model), lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.stack([loss_of(model, rank, step) for rank in range(RANKS)]).mean().backward()
        optimizer.step()
    bits, _, numel, apart = everyone[0]
    assert all(one[0] == bits for one in everyone)
    found = torch.frombuffer(bytearray(bits), dtype=torch.float32)
    assert float((found - _flat(model)).norm() / (_flat(model) - _flat(mlp())).norm()) < 1e-3
    assert apart > 0.1  # momenta are each rank's own
    assert numel < _flat(model).numel() / 2


def test_factors_of_few_bits_keep_ranks_alike_and_learn(tmp_path: Path) -> None:
    first, *others = run(_dion, RANKS, tmp_path, {"bits": 4, "min_numel": 0})
    assert all(other[0] == first[0] for other in others)
    assert first[1][-1] < first[1][0] - 0.1


def _muloco(rank: int) -> tuple[bytes, list[float], float]:
    """Bits of the parameters, losses, and bytes sent per coordinate and average."""
    model = mlp()
    optimizer = LocalSteps(
        model, MuonAdamW(*matrices_of(model), lr=3e-3), preset="gqsgd_muloco", every=4, outer_after=0, min_numel=0
    )
    losses = train_with(model, optimizer, rank, range(12))
    optimizer.finish()
    sent = optimizer.telemetry.totals()["bytes_sent"] / _flat(model).numel() / 3
    optimizer.close()
    return _flat(model).numpy().tobytes(), losses, sent


@pytest.mark.slow
def test_muloco_keeps_ranks_alike_learns_and_sends_two_bits(tmp_path: Path) -> None:
    first, *others = run(_muloco, RANKS, tmp_path)
    bits, losses, sent = first
    assert all(other[0] == bits for other in others)
    assert losses[-1] < losses[0] - 0.2
    assert sent < 2 * 2 / 3 * 2.3 / 8
