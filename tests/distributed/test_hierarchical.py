"""Two levels over real processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd import LocalSteps, all_reduce, session
from lightning_gqsgd.ddp.functional import close
from lightning_gqsgd.ddp.hook import register_gqsgd
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.research.simulation import average
from tests.bits import bits_of
from tests.distributed.models import finish, mlp, train, wrapped
from tests.distributed.ranks import on_ranks, run, run_alike
from tests.errors import error_text

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


def _on_nodes_of_several_sizes(rank: int) -> list[str]:
    x = torch.arange(5_000, dtype=torch.float32).sin() * (rank + 1)
    fields = {"reducer": "hierarchical", "bits": 4, "step": 0}
    means = [all_reduce(x, node_size=size, **fields) for size in (2, 3, 2)]
    assert torch.equal(means[0], means[2])
    close()
    return [bits_of([mean]) for mean in means]


def test_calls_may_have_nodes_of_several_sizes(tmp_path: Path) -> None:
    two, three, _ = run_alike(_on_nodes_of_several_sizes, 6, tmp_path, collective_timeout=20)
    gradients = [torch.arange(5_000, dtype=torch.float32).sin() * (rank + 1) for rank in range(6)]
    for size, found in ((2, two), (3, three)):
        assert found == bits_of([average(gradients, reducer="hierarchical", node_size=size, bits=4)[0]])


@on_ranks(2)
def test_the_rate_of_the_link_may_be_given_and_is_the_same_on_all_ranks(rank: int) -> None:
    os.environ["GROUP_RANK"] = str(rank)
    session.nodes.link_rate = lambda _: 0.0  # as on most virtual machines
    model = DistributedDataParallel(mlp(1024))
    for given, words in (
        (["25gbit", "fast"], "rank 1 refused: GQSGD_LINK 'fast' is not a number and a unit"),
        (
            ["25gbit", "10gbit"],
            'ranks 0 and 1 do not agree: GQSGD_LINK: "25gbit" != "10gbit"; give every rank the same',
        ),
        ([" ", "10gbit"], 'ranks 0 and 1 do not agree: GQSGD_LINK: "not set" != "10gbit"; give every rank the same'),
    ):
        os.environ["GQSGD_LINK"] = given[rank]
        assert words.removeprefix("rank 1 refused: " if rank else "") in error_text(
            ConfigError, lambda: register_gqsgd(model)
        )
    os.environ["GQSGD_LINK"] = ["400gbit", "0.4 Tbit"][rank]
    assert "PREDICTED TO BE SLOWER than plain DDP: on 400 Gbit/s" in register_gqsgd(model).report()


def _by_itself(rank: int, nodes: str) -> dict[str, str]:
    """What is reported, and the weights at the end, on a machine that stands for several nodes."""
    os.environ["GROUP_RANK"] = nodes[rank]
    session.nodes.link_rate = lambda _: 0.0  # whatever this machine has
    reports = {}
    model, state = wrapped({}, {}, mlp(1024))
    train(model, rank, range(3))
    reports["hook"] = state.report()
    reports["bits"] = finish(state, model)["bits"]
    model, state = wrapped({}, {"auto": True, "allow": (32, 8)}, mlp(1024))
    train(model, rank, range(3))
    reports["auto"] = state.report()
    finish(state, model)
    module = mlp(1024)
    local = LocalSteps(module, torch.optim.SGD(module.parameters(), lr=0.1), every=2)
    reports["local steps"] = local.report()
    local.close()
    reports["tensor"] = str(all_reduce(torch.arange(5000.0) * rank, sample_every=1)[4999].item())
    close()
    return reports


@pytest.mark.parametrize(
    "nodes", ["0011", *(pytest.param(rest, marks=pytest.mark.slow) for rest in ("0001", "0101", "0000", "0123"))]
)
def test_auto_takes_two_levels_on_nodes_of_equal_size_by_itself(nodes: str, tmp_path: Path) -> None:
    first, *others = run(_by_itself, 4, tmp_path, nodes)
    assert all(other["bits"] == first["bits"] and other["tensor"] == first["tensor"] for other in others)
    has_levels = nodes == "0011"
    assert ("by hierarchical over 4 ranks (2 nodes of 2)" in first["hook"]) == has_levels
    assert ("hierarchical, because 2 ranks share the link of a node: on an assumed" in first["hook"]) == has_levels
    assert ("by hierarchical" in first["local steps"]) == has_levels
    is_unequal = nodes in ("0001", "0101")
    assert ("hierarchical is not possible, because" in first["hook"]) == is_unequal
    assert float(first["tensor"]) == pytest.approx(4999 * 1.5, rel=0.02)
