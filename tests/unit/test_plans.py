"""Plans: which parameters and buckets become which pieces, and how long plans are kept."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace

import pytest
import torch

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import setting_of
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import PIECE_NUMEL, PieceSize, Segment
from lightning_gqsgd.reducers import new_store
from lightning_gqsgd.session.parameters import number_parameters
from lightning_gqsgd.wire.plan import (
    MAX_PLAN_BYTES,
    GatherPlan,
    Plan,
    PlanCache,
    ScatterPlan,
    Segments,
    _Shared,
    check_parameters,
)
from lightning_gqsgd.wire.telemetry import SAMPLE_NUMEL, BucketCounters, Telemetry


def use(cache: PlanCache, keys: str, step: int = 0, nbytes: int = 1) -> str:
    """Use the plans of some keys in a step; those that had to be made, of so many bytes each."""
    made = []

    def make() -> SimpleNamespace:
        made.append(key)
        return SimpleNamespace(nbytes=nbytes)

    for key in keys:
        cache.get(key, step, make)  # type: ignore[arg-type]
    return "".join(made)


def test_the_plans_that_were_not_used_for_longest_make_room() -> None:
    cache = PlanCache()
    assert use(cache, "abac", nbytes=MAX_PLAN_BYTES // 2) == "abc"
    cache.trim()
    assert len(cache) == 2
    assert use(cache, "acb") == "b"


def test_segments_are_hashed_once_and_equal_others() -> None:
    hashed = []

    class Noted(Segment):
        def __hash__(self) -> int:
            hashed.append(self)
            return super().__hash__()

    made = [Noted(number, 10, raw=False) for number in range(4)]
    segments = Segments(made)
    assert {segments: 1}[segments] == 1
    assert len(hashed) == len(made)
    assert {segments: 2}[tuple(made)] == 2  # type: ignore[index]
    assert segments == tuple(made)


def test_a_plan_that_is_too_large_alone_stays() -> None:
    cache = PlanCache()
    use(cache, "ab", nbytes=2 * MAX_PLAN_BYTES)
    cache.trim()
    assert use(cache, "ba") == "a"


def test_the_plans_of_the_last_two_steps_stay_however_large_they_are() -> None:
    cache = PlanCache()
    for _ in range(3):
        use(cache, "abc", nbytes=MAX_PLAN_BYTES)
        cache.end_step()
    assert use(cache, "abc") == ""
    cache.end_step()
    for _ in range(2):
        use(cache, "a")
        cache.end_step()
    assert use(cache, "abc", nbytes=MAX_PLAN_BYTES) == "bc"


def test_plans_that_no_step_has_used_since_are_dropped() -> None:
    cache = PlanCache()
    for step, keys in ((0, "abc"), (3, "a"), (4, "b")):
        use(cache, keys, step)
    cache.drop_unused(4)
    assert use(cache, "bac") == "ac"


@pytest.mark.parametrize(
    "levels", [{"reducer": "two_shot"}, {"reducer": "hierarchical", "node_size": 2}], ids=["one level", "two levels"]
)
@pytest.mark.parametrize("kind", [ScatterPlan, GatherPlan])
def test_shards_of_equal_layers_share_their_tables(kind: type[Plan], levels: dict) -> None:
    """Each of ten layers has a matrix of several pieces and a bias."""
    setting = setting_of(GQSGDConfig(seed=5, **levels), 4, torch.float32, PieceSize(1 << 14, 1 << 14))
    plans = []
    for layer in range(10):
        matrix = Segment(8 * layer, 300_000, raw=False)
        bias = Segment(8 * layer + 4, 7, raw=True)
        rows = [[one._replace(parameter=one.parameter + rank) for one in (matrix, bias)] for rank in range(4)]
        plans.append(kind(list(chain(*rows)), setting))
    assert all(len(plan._pieces) > 50 for plan in plans)
    assert len({id(piece.reducer) for plan in plans for piece in plan._pieces}) <= 5
    before = len(_Shared._all)
    del plans
    assert before - len(_Shared._all) > 1


@pytest.mark.parametrize("kind", [Plan, ScatterPlan, GatherPlan])
def test_a_plan_takes_about_a_byte_per_coordinate(kind: type[Plan]) -> None:
    setting = setting_of(GQSGDConfig(reducer="gather"), 2, torch.float32)
    plan = kind([Segment(0, 100_000, False), Segment(1, 100_000, False)], setting)
    assert 0.1 < plan.nbytes / plan.numel < 2


@pytest.mark.parametrize(("per", "pieces"), [("bucket", 1), ("block", 4)])
def test_a_bucket_with_one_scale_is_one_piece(per: str, pieces: int) -> None:
    setting = setting_of(GQSGDConfig(reducer="gather", scale_per=per), 2, torch.float32)
    assert len(Plan([Segment(0, 3 * PIECE_NUMEL, False), Segment(1, 10, False)], setting)._pieces) == pieces


def test_a_parameter_of_min_numel_values_is_compressed_and_a_smaller_one_is_not() -> None:
    named = {"a": torch.zeros(99), "b": torch.zeros(100)}
    assert [entry.raw for entry in number_parameters(named, GQSGDConfig(min_numel=100))] == [True, False]


def test_parameters_on_several_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"on several devices \(.*\); use one"):
        check_parameters({"a": torch.zeros(2), "b": torch.zeros(2, device="meta")})


def test_each_of_many_ranks_has_a_coordinate_in_a_sample() -> None:
    ranks = SAMPLE_NUMEL + 1
    setting = setting_of(GQSGDConfig(reducer="two_shot"), ranks, torch.float32)
    plan = ScatterPlan([Segment(rank, 200, raw=False) for rank in range(ranks)], setting)
    store = new_store(setting, {}, torch.device("cpu"))
    start, *_ = plan.starts(torch.zeros(plan.numel), 0, 0, store, BucketCounters(), Telemetry())
    *_, sample = next(start())
    assert len(sample.input) == ranks
    assert sample.input[0].numel() >= 1
