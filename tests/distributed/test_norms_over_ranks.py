"""Scales under every norm over ranks, and of whole buckets, between real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd import all_reduce
from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.ddp.hook import register_gqsgd
from lightning_gqsgd.research.simulation import average
from tests.distributed.models import finish, mlp, train, wrapped
from tests.distributed.ranks import on_ranks, run
from tests.errors import error_text

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
CONFIGS: list[dict[str, Any]] = [
    {"reducer": "sum", "norm_over_ranks": "l2"},
    {"reducer": "sum", "norm": "l2", "norm_over_ranks": "l2", "dither": "stochastic"},
    {"reducer": "gather", "scale": "global", "norm_over_ranks": "l1", "bits": 4},
    {"reducer": "tree", "codec": "exponential", "norm": "l2", "norm_over_ranks": "l1"},
    {"preset": "global_qsgd_linear", "norm": "l2", "norm_over_ranks": "l2"},
    {"preset": "global_qsgd_exponential", "norm_over_ranks": "l2"},
    {"reducer": "two_shot", "scale_per": "bucket"},
    {"reducer": "sum", "memory": "ef", "norm_over_ranks": "l2"},
    {"reducer": "sum", "rotation": True, "norm_over_ranks": "l2"},
]


#: Each of the configurations without a memory in fp32, and in one of the other dtypes in turn.
CASES = [
    (fields, dtype)
    for number, fields in enumerate(fields for fields in CONFIGS if "memory" not in fields)
    for dtype in (DTYPES[0], DTYPES[1 + number % 2])
]


def _gradient(rank: int, dtype: torch.dtype) -> torch.Tensor:
    scale = torch.logspace(-3, 0, 9000)
    return (torch.randn(9000, generator=torch.Generator().manual_seed(rank)) * scale * (rank + 1)).to(dtype)


def _reduced(rank: int) -> list[bytes]:
    return [
        all_reduce(_gradient(rank, dtype), step=3, **fields).view(torch.uint8).numpy().tobytes()
        for fields, dtype in CASES
    ]


@pytest.mark.slow
def test_processes_and_virtual_ranks_have_the_same_bits_under_every_norm(tmp_path: Path) -> None:
    results = run(_reduced, 3, tmp_path)
    for number, (fields, dtype) in enumerate(CASES):
        gradients = [_gradient(rank, dtype) for rank in range(3)]
        expected = average(gradients, step=3, **fields)[0].view(torch.uint8).numpy().tobytes()
        assert all(result[number] == expected for result in results), (fields, dtype)


def _trained(rank: int) -> list[tuple[str, float]]:
    found = []
    for fields in CONFIGS:
        model, state = wrapped({"bucket_cap_mb": 0.03}, fields)
        losses = train(model, rank, range(12))
        found.append((finish(state, model)["bits"], losses[-1] - losses[0]))
    return found


@pytest.mark.slow
def test_parameters_stay_identical_and_losses_fall_under_every_norm(tmp_path: Path) -> None:
    first, *others = run(_trained, 3, tmp_path)
    for number, (bits, change) in enumerate(first):
        assert all(other[number][0] == bits for other in others), CONFIGS[number]
        assert change < 0, CONFIGS[number]


@on_ranks(2)
def test_ranks_with_different_norms_do_not_start(rank: int) -> None:
    model = DistributedDataParallel(mlp())
    text = error_text(ConfigError, register_gqsgd, model, reducer="sum", norm_over_ranks="l1" if rank == 1 else "l2")
    assert 'norm_over_ranks: "l2" != "l1"' in text
