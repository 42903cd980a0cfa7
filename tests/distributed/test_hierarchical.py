"""Two levels over real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gqsgd import all_reduce
from lightning_gqsgd.ddp.functional import close
from tests.distributed.models import finish, train, wrapped
from tests.distributed.ranks import run

FIELDS = {"reducer": "hierarchical", "node_size": 2, "sample_every": 1}


def trains(rank: int, *cases: dict[str, Any]) -> list[dict[str, Any]]:
    results = []
    for case in cases:
        model, state = wrapped({"bucket_cap_mb": case.pop("bucket_cap_mb", 25)}, case)
        losses = train(model, rank, range(8))
        report = state.report()
        results.append({**finish(state, model), "loss": sum(losses[-4:]), "report": report})
    return results


def test_training_on_two_nodes_of_two(tmp_path: Path) -> None:
    cases = [
        {"reducer": "native"},
        FIELDS,
        {**FIELDS, "bucket_cap_mb": 0.01},
        {**FIELDS, "warmup_steps": 8},
        {"reducer": "hierarchical", "node_size": 4},
        {**FIELDS, "bits": 4, "scale": "global"},
    ]
    every = run(trains, 4, tmp_path, *cases)
    for results in every[1:]:
        assert [one["bits"] for one in results] == [one["bits"] for one in every[0]]
    native, plain, small_buckets, uncompressed, one_node, summed = every[0]
    assert plain["bits"] == small_buckets["bits"] != native["bits"]
    assert one_node["bits"] == native["bits"]
    for one in (plain, uncompressed, summed):
        assert one["loss"] == pytest.approx(native["loss"], rel=0.05)
    assert uncompressed["loss"] == pytest.approx(native["loss"], rel=1e-5)
    assert "by hierarchical over 4 ranks (2 nodes of 2)" in plain["report"]
    assert "all 4 ranks are on one node" in one_node["report"]
    assert 0 < plain["totals"]["rel_l2"] < 0.02
    assert 8 < plain["totals"]["bits_per_coordinate"] < 10


def reduces(rank: int) -> list[np.ndarray]:
    x = torch.arange(10_000, dtype=torch.float32).sin() * (rank + 1)
    under_way = [all_reduce(x * k, async_op=True, **FIELDS) for k in (1, 2, 3)]
    results = [one.wait() for one in under_way]
    x[5] = torch.nan if rank == 3 else 0
    results.append(all_reduce(x, **FIELDS))
    close()
    return [one.numpy() for one in results]


def test_any_tensor(tmp_path: Path) -> None:
    every = run(reduces, 4, tmp_path)
    for results in every[1:]:
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(results, every[0], strict=True))
    exact = np.sin(np.arange(10_000, dtype=np.float32)) * 2.5
    for k in (1, 2, 3):
        assert np.linalg.norm(every[0][k - 1] - k * exact) < 0.02 * np.linalg.norm(k * exact)
    assert np.isnan(every[0][3][5])
    assert np.isfinite(every[0][3][256:]).all()
