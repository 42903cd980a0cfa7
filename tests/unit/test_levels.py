"""The reducer that "auto" takes on nodes of several ranks, by predicted time."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.default_reducer import Cluster, Steps, steps_of
from benchmarks.report import RESULTS
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.predict.levels import fitted, fitted_scatter
from lightning_gqsgd.predict.timeline import estimated
from lightning_gqsgd.session.nodes import Nodes

NUMEL = 25_000_000


def on(nodes: int, per_node: int, gbit: float = 10) -> Nodes:
    return Nodes(tuple(rank // per_node for rank in range(nodes * per_node)), gbit * 1e9 / 8)


def on_gpus(nodes: int, per_node: int, gbit: float = 10) -> Nodes:
    return on(nodes, per_node, gbit)._replace(devices=frozenset({"NVIDIA H100"}))


def reducer(nodes: Nodes, **fields: Any) -> str:
    fit = fitted(GQSGDConfig(**fields), nodes, NUMEL, torch.float32)
    return resolve(fit.config, len(nodes.of_ranks)).reducer


def test_several_ranks_of_a_node_share_its_link_by_two_levels() -> None:
    fit = fitted(GQSGDConfig(), on(4, 8, 1), NUMEL, torch.float32)
    assert (fit.config.reducer, fit.config.node_size) == ("hierarchical", 8)
    assert fit.note.startswith("; hierarchical, because 8 ranks share the link of a node: on 1 Gbit/s, the gradients")


def test_one_level_is_taken_where_there_is_nothing_to_choose() -> None:
    assert reducer(on(1, 8)) == "two_shot"
    assert reducer(on(8, 1)) == "two_shot"
    unequal = Nodes((0, 0, 0, 1, 1), 1e8)
    mixed = Nodes((0, 1, 0, 1), 1e8)
    assert reducer(unequal) == reducer(mixed) == "two_shot"


def test_what_the_user_asks_for_stays() -> None:
    nodes = on(4, 8, 1)
    for fields in (
        {"reducer": "two_shot"},
        {"reducer": "gather"},
        {"memory": "ef"},  # two levels keep no memory
        {"bits": 32},
        {"reducer": "hierarchical", "node_size": 4},
    ):
        config = GQSGDConfig(**fields)
        assert fitted(config, nodes, NUMEL, torch.float32).config == config


@pytest.mark.parametrize(
    "fields", [{"auto": True}, {"bits": "auto"}, {"bits": {"*": 8, "head.*": 4}}, {"scale": "global"}]
)
def test_every_candidate_has_two_levels(fields: dict[str, Any]) -> None:
    fit = fitted(GQSGDConfig(**fields), on(4, 8, 1), NUMEL, torch.float32)
    candidates = fit.config.candidates() if fit.config.chooses_bits else fit.config.by_bits()
    reducers = {bits: resolve(candidate, 32).reducer for bits, candidate in candidates.items()}
    assert {name for bits, name in reducers.items() if bits <= 8} == {"hierarchical"}


def test_a_fast_link_between_nodes_and_a_slow_one_inside_make_one_level_faster() -> None:
    # Two ranks of a CPU node: 16 Gbit/s between them, and 100 Gbit/s to other nodes.
    assert reducer(on(2, 2, 100), bits=4) == "two_shot"
    assert reducer(on(2, 2, 1), bits=4) == "hierarchical"


def test_an_unknown_link_is_assumed_and_gives_no_warning() -> None:
    unknown = Nodes(on(4, 8).of_ranks)
    fit = fitted(GQSGDConfig(), unknown, NUMEL, torch.float32)
    assert fit.config.reducer == "hierarchical"
    assert "on an assumed 1 Gbit/s (GQSGD_LINK=25gbit sets the rate), the gradients" in fit.note
    flat = Nodes(on(4, 1).of_ranks)
    assert fitted(GQSGDConfig(), flat, NUMEL, torch.float32).note == ""


@pytest.mark.parametrize(
    ("of_ranks", "why"),
    [
        ((0, 0, 1), "nodes have 2 and 1 ranks"),
        ((0,) * 8 + (1,) * 7 + (2,) * 8 + (3,), "nodes have 8, 7 and 1 ranks"),
        ((0, 1, 0, 1), "ranks are not ordered by node"),
    ],
)
def test_nodes_that_keep_the_start_from_two_levels_are_named(of_ranks: tuple[int, ...], why: str) -> None:
    clause = f"; hierarchical is not possible, because {why}: on equal nodes, it is predicted to be faster"
    nodes = Nodes(of_ranks, 1.25e8)
    fit = fitted(GQSGDConfig(bits=4), nodes, NUMEL, torch.float32)
    assert fit.config == GQSGDConfig(bits=4)
    assert fit.note == clause
    for config, others in (
        (GQSGDConfig(bits=4), nodes._replace(of_ranks=tuple(range(4)))),
        (GQSGDConfig(bits=4), nodes._replace(bytes_per_s=1.25e11)),  # one level is faster on this link
        (GQSGDConfig(bits=4, reducer="two_shot"), nodes),
        (GQSGDConfig(memory="ef", codec="sign"), nodes),
    ):
        assert "hierarchical" not in fitted(config, others, NUMEL, torch.float32).note


def test_ranks_with_different_gpus_take_the_same_reducer() -> None:
    """Each rank alone would predict by its own GPU, and ranks would not agree."""
    names = {"NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"}
    mixed, slower, newer = (
        fitted(GQSGDConfig(), on(4, 8)._replace(devices=frozenset(some)), NUMEL, torch.float32)
        for some in (names, {"NVIDIA L40S"}, {"NVIDIA H100 80GB HBM3", "NVIDIA B200"})
    )
    assert mixed == slower
    assert mixed.config == newer.config
    assert mixed.note != newer.note


def test_slower_than_plain_ddp_is_said() -> None:
    fit = fitted(GQSGDConfig(), on(4, 1, 400), NUMEL, torch.float32)
    assert "PREDICTED TO BE SLOWER than plain DDP: on 400 Gbit/s" in fit.note
    assert "gqsgd advise" in fit.note
    assert fitted(GQSGDConfig(auto=True), on(4, 1, 400), NUMEL, torch.float32).note == ""
    assert fitted(GQSGDConfig(), on(4, 1, 1), NUMEL, torch.float32).note == ""


def test_gpus_of_one_machine_are_told_to_compare_with_plain_ddp() -> None:
    nodes = on(1, 8)._replace(devices=frozenset({"NVIDIA L40S"}))
    note = fitted(GQSGDConfig(), nodes, NUMEL, torch.float32).note
    assert note.startswith("; all 8 ranks are on one machine")
    assert "gqsgd_auto" in note
    for config, quiet in (
        (GQSGDConfig(auto=True), nodes),
        (GQSGDConfig(bits=32), nodes),
        (GQSGDConfig(), on(1, 8)),
        (GQSGDConfig(), nodes._replace(of_ranks=(0,))),
    ):
        assert fitted(config, quiet, NUMEL, torch.float32).note == ""


@pytest.mark.parametrize(
    ("device", "bits"),
    [("h100", 8), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("h100", 4), ("cpu", 4), ("cpu", 8)))],
)
def test_the_default_is_near_the_best_reducer_and_says_where_plain_ddp_is_faster(device: str, bits: int) -> None:
    timeline = estimated(nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(12)]), 0.06)
    for nodes, per_node, gbit in itertools.product((2, 16, 64), (1, 2, 8), (1.0, 10.0, 100.0)):
        cluster = Cluster(nodes, per_node, gbit, device)
        steps = steps_of(cluster, timeline, bits)
        assert steps.above_best <= 0.05, cluster
        assert steps.is_warned or steps.above_ddp <= 0.01, cluster


@pytest.mark.parametrize("device", ["h100", "cpu"])
def test_the_committed_grid_holds(device: str) -> None:
    saved = json.loads((RESULTS / f"default_reducer_{device}.json").read_text())
    assert len(saved["rows"]) == 360
    for *cluster, ddp, one_level, two_levels, taken, said in saved["rows"]:
        steps = Steps(ddp, one_level, two_levels, taken == "two levels", said == "yes")
        assert steps.above_best <= 0.05, cluster
        assert steps.is_warned or steps.above_ddp <= 0.01, cluster


def test_reduce_scatters_have_two_levels_where_ranks_share_a_link() -> None:
    fit = fitted_scatter(GQSGDConfig(), on_gpus(2, 8), NUMEL)
    assert (fit.config.reducer, fit.config.node_size) == ("hierarchical", 8)
    assert fit.note.startswith("; hierarchical, because 8 ranks share the link of a node: on 10 Gbit/s, the gradients")
    for nodes in (on_gpus(1, 8), on_gpus(8, 1)):
        fit = fitted_scatter(GQSGDConfig(), nodes, NUMEL)
        assert (fit.config.reducer, fit.config.node_size, fit.note) == ("two_shot", 0, "")
    fit = fitted_scatter(GQSGDConfig(), Nodes((0, 0, 0, 1, 1), 1e8), NUMEL)
    assert (fit.config.reducer, fit.config.node_size) == ("two_shot", 0)
    assert fit.note.startswith("; hierarchical is not possible, because nodes have 3 and 2 ranks: ")


def test_reduce_scatters_of_one_level_warn_where_torchs_own_are_faster() -> None:
    slow = fitted_scatter(GQSGDConfig(reducer="two_shot"), on_gpus(16, 8, 100), NUMEL)
    assert slow.config.reducer == "two_shot"
    assert "PREDICTED TO BE SLOWER than torch's own reduce-scatters: on 100 Gbit/s" in slow.note
    assert fitted_scatter(GQSGDConfig(reducer="two_shot", bits=2), on_gpus(16, 8, 100), NUMEL).note == ""
    assert fitted_scatter(GQSGDConfig(), on_gpus(16, 8, 100), NUMEL).config.reducer == "hierarchical"


def test_two_levels_of_reduce_scatters_need_equal_nodes() -> None:
    for nodes, size, words in (
        (on(2, 2), 3, "4 ranks do not make nodes of 3"),
        (on(1, 4), 0, "the 4 ranks of one node"),
        (on(2, 2), 4, "the 4 ranks of one node"),
        (Nodes((0, 0, 1), 1e8), 0, "are not in order on nodes of equal size"),
    ):
        with pytest.raises(ConfigError, match=words):
            fitted_scatter(GQSGDConfig(reducer="hierarchical", node_size=size), nodes, NUMEL)
    assert fitted_scatter(GQSGDConfig(reducer="hierarchical"), on(4, 1), NUMEL).config.reducer == "two_shot"
