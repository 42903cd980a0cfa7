"""The model of a step under FSDP2: what its units are, what they send, and what runs at the same time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import setting_of
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.predict.costs import ESTIMATES, Costs, Link, on_links
from lightning_gqsgd.predict.sharded import (
    Coordinates,
    ShardedMethod,
    ShardedModel,
    Unit,
    predict_sharded,
    scatter_seconds,
    sharded_model,
)
from lightning_gqsgd.predict.timeline import Timeline, estimated
from lightning_gqsgd.wire.plan import GatherPlan, ScatterPlan

FP32 = ShardedMethod(torch.float32)
BF16 = ShardedMethod(torch.bfloat16)
#: A link that takes no time, and one that takes most of it.
FREE, SLOW = Link(1e30), Link(1e8)
BLOCKS = 4
NUMEL = 12 << 16


class Decoder(nn.Module):
    """Blocks in a list, in one of which is another list; the output shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(3))
        self.norm = nn.LayerNorm(64)
        self.output = nn.Linear(64, 100, bias=False)
        self.output.weight = self.embedding.weight


def of_blocks(backward_s: float = 0.2, root: int = 0) -> ShardedModel:
    """Equal blocks, and a root of so many coordinates."""
    line = estimated(nn.Linear(2, 2), backward_s)
    each = Coordinates(NUMEL, 0)
    blocks = tuple(Unit(each, each, 1 / BLOCKS) for _ in range(BLOCKS))
    of_root = Coordinates(root, 0)
    return ShardedModel(blocks, Unit(of_root, of_root, 0.0) if root else None, line)


def on(link: Link, nodes: int = 2, per_node: int = 1, device: str = "h100") -> Costs:
    """A device whose codec and copies take no time."""
    costs = on_links(ESTIMATES[device], nodes, per_node, link, FREE)
    idle = {name: gamma.times(0.0) for name, gamma in costs.gammas.items()}
    return replace(costs, gammas=idle, touch_s=0.0, launch_s=0.0, stage_s=0.0, terms=None)


def test_units_are_the_elements_of_the_topmost_lists_and_the_root() -> None:
    model = sharded_model(Decoder(), estimated(Decoder(), 1.0))
    assert [unit.weights for unit in model.blocks] == [Coordinates(2 * 64 * 64, 2 * 64)] * 3
    assert model.root is not None
    assert model.root.weights == Coordinates(100 * 64, 2 * 64)  # the shared weight once
    assert sum(unit.share for unit in model.units) == pytest.approx(1)
    layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    of_layers = sharded_model(layers, estimated(layers, 1.0))
    assert (len(of_layers.blocks), of_layers.root) == (2, None)
    alone = sharded_model(nn.Linear(64, 64), estimated(nn.Linear(64, 64), 1.0))
    assert (alone.blocks, alone.units) == ((), (alone.root,))


def test_frozen_weights_are_gathered_and_have_no_gradient() -> None:
    model = Decoder()
    for block in model.blocks:
        block[0].requires_grad_(False)
    units = sharded_model(model, estimated(model, 1.0)).blocks
    assert {unit.weights.numel - unit.gradients.numel for unit in units} == {64 * 65}


@pytest.mark.parametrize("device", ["h100", "cpu"])
@pytest.mark.parametrize("per_node", [1, 4])
def test_a_free_network_leaves_the_computation(device: str, per_node: int) -> None:
    model = of_blocks(root=1000)
    costs = on(FREE, 2, per_node, device)
    methods = [FP32, BF16, ShardedMethod(torch.float32, 4), ShardedMethod(torch.float32, 4, 8)]
    if per_node > 1:
        methods += [
            ShardedMethod(torch.float32, 4, has_replicas=True),
            ShardedMethod(torch.float32, 4, has_levels=True),
        ]
    for method in methods:
        made = predict_sharded(model, costs, 2, per_node, method)
        assert made.step_s == pytest.approx(model.timeline.compute_s, rel=1e-6)
        assert made.exposed_s == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (3, 4)])
def test_torchs_own_bytes(nodes: int, per_node: int) -> None:
    """Blocks are gathered twice and the root once, and all gradients are reduce-scattered."""
    ranks = nodes * per_node
    root = 12 * 1000
    share = 4 * (ranks - 1) / ranks
    made = predict_sharded(of_blocks(root=root), on(SLOW, nodes, per_node), nodes, per_node, FP32)
    assert made.sent_bytes == share * (3 * BLOCKS * NUMEL + 2 * root)
    # Over Gloo, torch's reduce-scatter is an all-reduce.
    of_gloo = predict_sharded(of_blocks(root=root), on(SLOW, nodes, per_node, "cpu"), nodes, per_node, FP32)
    assert of_gloo.sent_bytes == share * (4 * BLOCKS * NUMEL + 3 * root)


@pytest.mark.parametrize("has_levels", [False, True])
def test_compressed_bytes_are_those_of_the_plans(has_levels: bool) -> None:
    ranks = 4
    segments = [Segment(rank, NUMEL // ranks, raw=False) for rank in range(ranks)]
    levels = {"reducer": "hierarchical", "node_size": 2} if has_levels else {"reducer": "two_shot"}
    scatter = setting_of(GQSGDConfig(bits=4, **levels), ranks, torch.float32)
    gather = setting_of(GQSGDConfig(bits=8, reducer="two_shot"), ranks, torch.float32)
    expected = BLOCKS * (2 * GatherPlan(segments, gather).sent_bytes + ScatterPlan(segments, scatter).sent_bytes)
    for device in ("h100", "cpu"):
        method = ShardedMethod(torch.float32, 4, 8, has_levels=has_levels)
        made = predict_sharded(of_blocks(), on(SLOW, 2, 2, device), 2, 2, method)
        assert made.sent_bytes == expected
        assert (made.node_bytes > 0) == has_levels


def test_means_over_replicas_carry_a_shard_between_nodes() -> None:
    made = predict_sharded(of_blocks(), on(SLOW, 2, 4), 2, 4, ShardedMethod(torch.float32, has_replicas=True))
    assert made.network_bytes == BLOCKS * NUMEL // 4 * 4
    assert made.node_bytes == 3 * BLOCKS * NUMEL * 4 * 3 // 4
    few = predict_sharded(of_blocks(), on(SLOW, 2, 4), 2, 4, ShardedMethod(torch.float32, 4, has_replicas=True))
    assert few.network_bytes == pytest.approx(made.network_bytes / 8, rel=0.05)
    assert few.node_bytes == made.node_bytes


def test_a_gpu_sends_beside_the_computation_and_a_cpu_does_not() -> None:
    """With a computation that is longer than all messages, a GPU waits for the first gathers and the last gradients."""
    message_s = NUMEL * 4 / 2 / SLOW.bytes_per_s
    model = of_blocks(backward_s=30 * message_s)
    made = predict_sharded(model, on(SLOW), 2, 1, FP32)
    assert made.exposed_s == pytest.approx(2 * message_s, rel=0.05)
    # Reduce-scatters over Gloo have twice the bytes.
    waits = predict_sharded(model, on(SLOW, device="cpu"), 2, 1, FP32)
    assert waits.exposed_s == pytest.approx((2 + 2) * BLOCKS * message_s, rel=0.05)
    busy = predict_sharded(of_blocks(backward_s=1e-6), on(SLOW), 2, 1, FP32)
    assert busy.step_s == pytest.approx(busy.wire_s, rel=0.02)


def test_each_rank_moves_its_own_shards() -> None:
    line = Timeline(estimated(nn.Linear(2, 2), 0.1).buckets, 0.1, 0.05, update_s=0.04)
    model = replace(of_blocks(), timeline=line)
    assert predict_sharded(model, on(FREE, 4), 4, 1, FP32).compute_s == pytest.approx(0.15 + 0.01)
    method = ShardedMethod(torch.float32, has_replicas=True)
    assert predict_sharded(model, on(FREE, 2, 2), 2, 2, method).compute_s == pytest.approx(0.15 + 0.02)


def test_ranks_of_a_node_share_its_link_in_one_level_and_not_in_two() -> None:
    costs = on(SLOW, 2, 8)
    one, two = (
        scatter_seconds(costs, 2, 8, ShardedMethod(torch.float32, 8, has_levels=has_levels), NUMEL)
        for has_levels in (False, True)
    )
    assert one / two == pytest.approx(8, rel=0.1)
    assert one > scatter_seconds(costs, 2, 8, FP32, NUMEL) > two


def test_the_calls_of_a_method() -> None:
    assert ShardedMethod(torch.float32).keywords == ""
    assert ShardedMethod(torch.float32, 4, 8, has_levels=True).keywords == (
        'register_gqsgd_fsdp(model, reduce_scatter=True, all_gather_bits=8, bits=4, reducer="hierarchical")'
    )
    assert ShardedMethod(torch.bfloat16, 8, has_replicas=True).keywords == (
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16), a mesh of (nodes, ranks of a"
        ' node) and register_gqsgd_fsdp(model, replicate=mesh["replicate"], bits=8)'
    )
