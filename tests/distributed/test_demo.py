"""DeMo between processes: DDP with its code and memory, and an optimizer of signs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_gqsgd.research.systems import SYSTEMS
from tests.distributed.models import finish, mlp, train_with, wrapped
from tests.distributed.ranks import run


def _trained(rank: int) -> tuple[str, float, float]:
    """Hash of the parameters, how far the loss fell, and bytes sent per coordinate and step."""
    model, state = wrapped({"bucket_cap_mb": 0.03}, {**SYSTEMS["demo"].fields, "min_numel": 0}, mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.0, 0.0), eps=1e-12)
    losses = train_with(model, optimizer, rank, range(20))
    sent = state.telemetry.totals()["bytes_sent"] / sum(parameter.numel() for parameter in model.parameters()) / 20
    return finish(state, model)["bits"], losses[-1] - losses[0], sent


@pytest.mark.slow
def test_ranks_keep_the_same_bits_learn_and_send_little(tmp_path: Path) -> None:
    first, *others = run(_trained, 3, tmp_path)
    bits, change, sent = first
    assert all(other[0] == bits for other in others)
    assert change < -0.2
    assert sent < 2 * (6 / 128 + 0.02)  # to each of two ranks: 6 bytes for 1/128 of the coordinates, rounded up
