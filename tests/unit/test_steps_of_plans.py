"""Steps of plans on virtual ranks: what they count, and pieces of all sizes. `test_races` has them on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs import scales
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels.layout import PIECE_NUMEL, PieceSize, Segment
from lightning_gqsgd.reducers import REDUCERS, Steps, new_store, run_virtual
from lightning_gqsgd.reducers.base import Exchange
from lightning_gqsgd.wire.plan import Plan
from lightning_gqsgd.wire.telemetry import BucketCounters, Telemetry

RANKS = 4
SEGMENTS = [Segment(0, 3000, False), Segment(1, 10, True), Segment(2, 700, False)]

CONFIGS: list[dict[str, Any]] = [
    {"reducer": "two_shot"},
    {"reducer": "gather"},
    {"reducer": "sum"},
    {"reducer": "tree", "codec": "exponential"},
    {"reducer": "hierarchical", "node_size": 2},
    {"reducer": "two_shot", "scale_per": "parameter"},
    {"reducer": "sum", "scale_per": "bucket", "norm_over_ranks": "l2"},
    {"reducer": "two_shot", "scale_per": "bucket"},
    {"reducer": "gather", "codec": "top_k", "bits": 32, "density": 0.1, "memory": "ef"},
    {"reducer": "two_shot", "memory": "diana", "memory_down": "ef"},
]


@pytest.mark.parametrize("fields", CONFIGS, ids=lambda fields: "-".join(map(str, fields.values())))
def test_blocks_that_are_not_finite_are_counted(fields: dict[str, Any]) -> None:
    config = resolve(GQSGDConfig(**{"sample_every": 1, "block_size": 256, **fields}), RANKS)
    plan = Plan(SEGMENTS, setting_of(config, RANKS, torch.float32))
    sizes = {one.parameter: one.numel for one in SEGMENTS if not one.raw}
    stores = [new_store(plan.setting, sizes, torch.device("cpu")) for _ in range(RANKS)]
    counters, telemetry = [BucketCounters() for _ in range(RANKS)], [Telemetry() for _ in range(RANKS)]
    for step in range(2):
        gradients = [torch.randn(plan.numel) for _ in range(RANKS)]
        gradients[2][5] = torch.inf if step else 0.0
        starts = [
            plan.starts(x, rank, step, stores[rank], counters[rank], telemetry[rank])
            for rank, x in enumerate(gradients)
        ]
        for piece in zip(*starts, strict=True):
            for rank, bad in enumerate(run_virtual([start() for start in piece])):
                counters[rank].add_nonfinite(bad)
        for one in telemetry:
            one.end_step()
    counts = [one.nonfinite_blocks for one in counters]
    # The 12 blocks of its parameter, or all 15, share a scale with the one that is not. A rank averages 3 or 4 of
    # them without messages, where it averages its own.
    bad = {"block": 1, "parameter": 9, "bucket": 15 if config.reducer == "sum" else 11}[config.scale_per]
    assert max(counts) == bad  # under "hierarchical", of one rank of each node
    assert telemetry[0].last_rel_l2 > 0
    assert [one.last_rel_l2 for one in telemetry] == [telemetry[0].last_rel_l2] * RANKS


def test_the_sampled_error_is_that_of_all_parameters_by_their_sizes() -> None:
    config = GQSGDConfig(bits=4, reducer="gather", sample_every=1)
    segments = [Segment(number, PIECE_NUMEL // 2, False) for number in range(3)]
    plan = Plan(segments, setting_of(config, 2, torch.float32))
    stores = [new_store(plan.setting, {}, torch.device("cpu")) for _ in range(2)]
    telemetry = Telemetry()
    # The mean of the middle parameter is zero, and its error is not.
    own, middle, last = torch.randn(3, PIECE_NUMEL // 2)
    other = torch.cat([own, -middle, last])
    own = torch.cat([own, middle, last])
    exact = (own + other) / 2
    starts = [
        plan.starts(x, rank, 0, stores[rank], BucketCounters(), telemetry if rank == 0 else Telemetry())
        for rank, x in enumerate((own, other))
    ]
    for piece in zip(*starts, strict=True):
        run_virtual([start() for start in piece])
    telemetry.end_step()
    assert telemetry.last_rel_l2 == pytest.approx(float((own - exact).norm() / exact.norm()), rel=0.05)


def _exchanges(rank: int, received: dict[str, Tensor]) -> Steps:
    """Exchanges of one of four ranks, which each send their number, counted from 1."""
    own = torch.full((4,), rank + 1.0)
    outputs = {name: torch.full((4,), -1.0) for name in ("equal", "unequal", "gathered")}
    to_each = [1 + (rank < 2), 1 + (rank < 2), 0, 0]  # the first two ranks send two numbers to each of each other
    from_each = [2, 2, 1, 1] if rank < 2 else [0] * 4
    outputs["unequal"] = torch.full((sum(from_each),), -1.0)
    yield (Exchange("all_to_all", outputs["equal"], own),)
    yield (Exchange("all_to_all", outputs["unequal"], own[: sum(to_each)], (from_each, to_each)),)
    yield (Exchange("all_gather", outputs["gathered"], own[:1]),)
    total = own.clone()
    yield (Exchange.in_place("sum", total),)
    received.update(outputs, total=total)
    return 0


def test_ranks_without_steps_send_zeros() -> None:
    received: list[dict[str, Tensor]] = [{} for _ in range(2)]
    run_virtual([_exchanges(rank, received[rank]) for rank in range(2)], 4)
    for found in received:
        assert found["equal"].tolist() == found["gathered"].tolist() == [1, 2, 0, 0]
        assert found["unequal"].tolist() == [1, 1, 2, 2, 0, 0]
        assert found["total"].tolist() == [3] * 4


def test_groups_of_blocks_are_numbered_as_by_unique() -> None:
    generator = torch.Generator().manual_seed(0)
    for numel in (0, 1, 2, 500):
        values = torch.randint(0, 40, (numel,), generator=generator)
        assert torch.equal(scales._numbers(values), torch.unique(values, return_inverse=True)[1])


@pytest.mark.parametrize("reducer", ["two_shot", "gather", "sum", "native"])
def test_results_do_not_depend_on_pieces(reducer: str) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(3710, generator=generator) for _ in range(3)]
    results = []
    for piece_numel in (1 << 24, 1500, 300):
        config = resolve(GQSGDConfig(reducer=reducer, bits=5), 3)
        plan = Plan(SEGMENTS, setting_of(config, 3, torch.float32, PieceSize(piece_numel, piece_numel)))
        results.append([one.clone() for one in gradients])
        plan.average(results[-1], 0, [new_store(plan.setting, {}, torch.device("cpu"))] * 3)
    assert reducer == "native" or len(plan._pieces) > 10
    for one in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(one, results[0], strict=True))


def test_elias_codes_are_for_the_cpu() -> None:
    config = GQSGDConfig(reducer="gather", dither="stochastic", coder="elias")
    with pytest.raises(ConfigError, match=r"coder='elias' is for tensors on the CPU, not on cuda:0.*coder='fixed'"):
        REDUCERS["gather"].check_device(setting_of(config, 2, torch.float32), torch.device("cuda", 0))
