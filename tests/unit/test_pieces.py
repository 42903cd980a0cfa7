"""Predictions of large models: alike pieces are looked at once, and nothing else changes."""

from __future__ import annotations

import io
import random
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from lightning_gqsgd.cli import waiting
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels.layout import PIECE_NUMEL, PieceSize, Segment, table_of
from lightning_gqsgd.predict import Bucket, Costs, Timeline, advice, predict, profile
from lightning_gqsgd.predict.costs import ESTIMATES, Link
from lightning_gqsgd.wire.engine import SHARED_GROWTH

NUMELS = (1, 7, 64, 128, 1000, 4096, 100_003, 1 << 17, 300_000, 1 << 20)
RANKS = ((2, 0), (3, 0), (16, 0), (16, 8), (64, 32), (200, 0), (1000, 4))
CONFIGS: tuple[dict[str, Any], ...] = (
    {"bits": 8},
    {"bits": 4},
    {"bits": 3},
    {"bits": 32},
    {"bits": 16},
    {"bits": 8, "codec": "linear"},
    {"bits": 8, "codec": "linear", "scale": "global"},
    {"bits": 4, "memory": "ef"},
    {"bits": 4, "scale_per": "parameter"},
    {"bits": 4, "scale_per": "bucket"},
    {"bits": 8, "scale": "global", "codec": "linear", "norm_over_ranks": "l2"},
)


#: Configurations whose pieces are cut like those of another one, and the one that takes most of the time.
SLOW: tuple[dict[str, Any], ...] = ({"bits": 4}, {"bits": 3}, {"bits": 8, "codec": "linear"}, CONFIGS[-1])


@pytest.mark.parametrize(
    "fields",
    [pytest.param(fields, marks=[pytest.mark.slow] * (fields in SLOW)) for fields in CONFIGS],
    ids=str,
)
def test_profiles_are_those_of_the_whole_plan(fields: dict[str, Any]) -> None:
    draw = random.Random(str(fields))  # noqa: S311
    for ranks, node_size in RANKS:
        levels = {"reducer": "hierarchical", "node_size": node_size} if node_size and len(fields) == 1 else {}
        levels = {} if fields["bits"] > 8 else levels
        if fields.get("scale") == "global" and ranks > 200:  # more ranks than codes of 8 bits can be added of
            continue
        config = resolve(GQSGDConfig(sample_every=0, **fields, **levels), ranks)
        for piece_numel in (1 << 15, 1 << 19, 1 << 24):
            first = draw.randrange(500)
            segments = tuple(Segment(first + number, draw.choice(NUMELS), draw.random() < 0.3) for number in range(5))
            size = PieceSize(piece_numel, 2 * piece_numel)
            setting = setting_of(config, ranks, torch.float32, size)
            made = profile.bucket_profiles(setting, segments)
            assert made == profile._profiles_of_plan(segments, setting)


def test_a_large_bucket_of_plain_ddp_needs_no_table_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = []

    def noted(*arguments: Any) -> np.ndarray:
        tables.append(table_of(*arguments))
        return tables[-1]

    monkeypatch.setattr(profile, "table_of", noted)
    setting = setting_of(resolve(GQSGDConfig(reducer="native"), 5), 5, torch.float32)
    numels = (1 << 22, 12345)
    profiles = profile.bucket_profiles(setting, tuple(Segment(n, numel, False) for n, numel in enumerate(numels)))
    assert len(profiles) == 1
    assert profiles[0].sent_bytes == 2 * 4 * sum(numels) * 4 // 5
    assert [len(table) for table in tables] == [2]


def _large(buckets: int, numel: int) -> advice.Cluster:
    made = tuple(Bucket((Segment(number, numel, False),), number / buckets) for number in range(buckets))
    links = advice.over_links(ESTIMATES["h100"], 8, Link(1.25e9, 5e-5), Link(25e9, 5e-6))
    return advice.Cluster(Timeline(made, 1.0), links, 16, 8, 32)


@pytest.mark.slow
def test_models_of_many_billions_are_predicted_soon() -> None:
    begun = time.process_time()
    for cluster in (_large(40, 30_000_000), _large(1, 1 << 33)):
        assert len(advice.candidates(cluster)) == 10
        assert advice.with_local_steps(cluster) is not None
    assert time.process_time() - begun < 15


def test_the_same_model_at_another_place_costs_no_look_at_its_pieces() -> None:
    cluster = _large(3, 9_000_000)
    advice.candidates(cluster)
    before = profile._of_piece.cache_info().misses
    advice.candidates(replace(cluster, batch=64))
    assert profile._of_piece.cache_info().misses == before


@pytest.mark.parametrize(
    ("is_terminal", "patience_s", "is_said"), [(True, 0.0, True), (True, 60, False), (False, 0, False)]
)
def test_a_terminal_shows_what_is_predicted_once_it_takes_long(
    is_terminal: bool, patience_s: float, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_S", patience_s)
    written = io.StringIO()
    with waiting.status("building", Console(file=written, force_terminal=is_terminal)) as say:
        say("predicting 4 bit")
        deadline = time.monotonic() + (30 if is_said else 0.2)
        while "predicting 4 bit" not in written.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert ("predicting 4 bit" in written.getvalue()) == is_said


@pytest.mark.parametrize(("nodes", "per_node", "growth"), [(1, 2, SHARED_GROWTH), (2, 1, 1), (2, 2, 1)])
def test_pieces_are_larger_where_all_ranks_are_on_one_machine(nodes: int, per_node: int, growth: int) -> None:
    numel = 16 * PIECE_NUMEL
    line = Timeline((Bucket((Segment(0, numel, False),), 0.1),), 0.1)
    links = (Link(1e9), Link(2e9))
    costs = advice.over_links(ESTIMATES["cpu"], per_node, *links)(nodes, 1.0)
    assert probed_at(costs, nodes, per_node).shares_memory == (growth > 1)
    made = predict(line, costs, nodes * per_node, GQSGDConfig(bits=8, sample_every=0, reducer="two_shot"))
    assert len({event.piece for event in made.events if event.bucket == 0 and event.piece >= 0}) == 1 + 16 / growth


def probed_at(costs: Costs, nodes: int, per_node: int) -> Costs:
    """Returns what a probe with these costs says of so many nodes."""
    return advice.over_probe(costs, nodes * per_node, per_node)(nodes, 1.0)
