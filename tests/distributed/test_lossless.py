"""Lossless averages between processes: the bits of virtual ranks, and trainings in bf16 and fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gqsgd import all_reduce
from lightning_gqsgd.research.simulation import average
from tests.distributed.models import batch, mlp, wrapped
from tests.distributed.ranks import run

DTYPES = (torch.bfloat16, torch.float32)


def _gradient(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(9001, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _bits(x: torch.Tensor) -> bytes:
    return x.view(torch.uint8).numpy().tobytes()


def _averaged(rank: int) -> list[bytes]:
    return [_bits(all_reduce(_gradient(rank, dtype), reducer="lossless")) for dtype in DTYPES]


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_have_the_bits_of_virtual_ranks(ranks: int, tmp_path: Path) -> None:
    expected = [_bits(average([_gradient(r, dtype) for r in range(ranks)], reducer="lossless")[0]) for dtype in DTYPES]
    assert all(results == expected for results in run(_averaged, ranks, tmp_path))


def _trained(rank: int, dtype: torch.dtype) -> tuple[bytes, float, float]:
    """Bits of the parameters, how far the loss fell, and bytes sent over those of a ring."""
    model, state = wrapped({"bucket_cap_mb": 0.03}, {"reducer": "lossless"}, mlp().to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(12):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x.to(dtype)).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    totals: dict[str, Any] = state.telemetry.totals()
    numel = sum(parameter.numel() for parameter in model.parameters())
    ring = 12 * 2 * 2 / 3 * dtype.itemsize * numel
    state.close()
    parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return _bits(parameters), losses[-1] - losses[0], totals["bytes_sent"] / ring


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.8), (torch.float32, 0.9)])
def test_ranks_keep_the_same_bits_in_training_and_send_less(dtype: torch.dtype, most: float, tmp_path: Path) -> None:
    first, *others = run(_trained, 3, tmp_path, dtype)
    bits, change, share = first
    assert all(other[0] == bits for other in others)
    assert change < 0
    assert share < most
