"""Two levels on virtual ranks: native inside each node, quantised between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.config.choosing import between_nodes
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.reducers.gather import Gather
from lightning_gqsgd.research.simulation import average, relative_error
from lightning_gqsgd.session.links import link_rate
from lightning_gqsgd.session.nodes import Nodes, _nodes, with_nodes
from lightning_gqsgd.wire.node import this_node
from lightning_gqsgd.wire.plan import Plan
from tests.unit.test_scatter import gaussian

SHAPES = [(4, 2), (6, 2), (6, 3), (8, 4), (8, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 257, 1000, 70_001])
@pytest.mark.parametrize(("ranks", "size"), SHAPES)
def test_all_ranks_get_the_same_mean(ranks: int, size: int, numel: int, dtype: torch.dtype) -> None:
    gradients = gaussian(ranks, numel, dtype)
    for scale in ("auto", "global"):
        means = average(gradients, reducer="hierarchical", node_size=size, scale=scale)
        assert all(torch.equal(means[0], mean) for mean in means)
        assert means[0].dtype == dtype
        if numel > 100:
            assert relative_error(means[0], gradients) < (0.03 if scale == "auto" else 0.1)


@pytest.mark.parametrize(("ranks", "size"), SHAPES)
def test_it_is_the_reducer_between_nodes_of_the_nodes_means(ranks: int, size: int) -> None:
    """To the bit, where the mean inside a node is exact."""
    nodes = ranks // size
    ofnodes = [
        torch.randint(-64, 64, (5000,), generator=torch.Generator().manual_seed(k)).float() for k in range(nodes)
    ]
    gradients = [ofnodes[rank // size] for rank in range(ranks)]
    config = resolve(GQSGDConfig(reducer="hierarchical", node_size=size, bits=4), ranks)
    flat = average(ofnodes, bits=4, reducer=between_nodes(config, ranks).reducer)[0]
    assert torch.equal(average(gradients, bits=4, reducer="hierarchical", node_size=size)[0], flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_large_numbers_stay_finite(dtype: torch.dtype) -> None:
    x = torch.full((600,), torch.finfo(dtype).max, dtype=dtype)
    means = average([x, x, x, x, x, x], reducer="hierarchical", node_size=3)
    assert all(mean.isfinite().all() for mean in means)


def test_bytes_are_those_inside_a_node_and_of_the_largest_shard_between_nodes() -> None:
    config = resolve(GQSGDConfig(reducer="hierarchical", node_size=2, bits=8, codec="linear", block_size=256), 4)
    plan = Plan([Segment(0, 10 * 256 + 128, False)], setting_of(config, 4, torch.float32))
    # The shards of a node's two ranks have 6 blocks, and 4 blocks and a half.
    between = setting_of(between_nodes(config, 4), 2, torch.float32)
    assert between.reducer is Gather  # so that sizes of messages do not depend on the numbers of blocks
    shards = [Plan([Segment(0, numel, False)], between) for numel in (6 * 256, 4 * 256 + 128)]
    assert plan.message_bytes == sum(shard.message_bytes for shard in shards)
    assert plan.sent_bytes == 2 * 6 * 256 * 4 + shards[0].sent_bytes


def test_error_is_less_than_that_of_one_level() -> None:
    """A node's mean is rounded once, and is smaller than what its ranks would have rounded."""
    gradients = gaussian(8, 100_000)
    errors = {
        reducer: relative_error(average(gradients, bits=4, reducer=reducer, **more)[0], gradients)
        for reducer, more in (("two_shot", {}), ("hierarchical", {"node_size": 4}))
    }
    assert errors["hierarchical"] < 0.9 * errors["two_shot"]


@pytest.mark.slow
def test_mean_of_many_estimates_is_the_mean() -> None:
    gradients = gaussian(4, 4096)
    exact = torch.stack(gradients).mean(0)
    repeats = [average(gradients, step=s, reducer="hierarchical", node_size=2, bits=3)[0] for s in range(200)]
    errors = torch.stack(repeats) - exact
    z = errors.mean(0) / errors.std(0).clamp_min(1e-12) * len(repeats) ** 0.5
    assert abs(float(z.mean())) < 4 / 4096**0.5
    assert 0.9 < float(z.std()) < 1.1


def test_levels_that_are_not_there_are_left_out() -> None:
    def reducer(ranks: int, size: int) -> str:
        return resolve(GQSGDConfig(reducer="hierarchical", node_size=size), ranks).reducer

    assert reducer(8, 8) == "native"
    assert reducer(8, 1) == resolve(GQSGDConfig(), 8).reducer
    assert reducer(8, 4) == "hierarchical"

    assert reducer(1, 4) == "native"


LEVELS = GQSGDConfig(reducer="hierarchical")


@pytest.mark.parametrize(
    ("ranks", "size"),
    [
        (range(8), 4),
        (range(4), 4),
        ([0, 1, 4, 5], 2),  # two processes of each node
        (range(0, 32, 4), 1),  # one of each: the group of a shard's replicas
        ([2, 6], 1),
        ([4, 5, 6, 7, 0, 1, 2, 3], 4),
    ],
)
def test_size_of_nodes_is_that_of_the_group_on_each(ranks: Sequence[int], size: int) -> None:
    nodes = Nodes(tuple(rank // 4 for rank in ranks))
    assert nodes.size == size
    assert with_nodes(LEVELS, nodes).node_size == size


@pytest.mark.parametrize("ranks", [range(6), [0, 1, 4], [0, 4, 1, 5], range(2, 6 + 1)])
def test_a_group_with_unequal_or_mixed_nodes_is_refused(ranks: Sequence[int]) -> None:
    nodes = Nodes(tuple(rank // 4 for rank in ranks))
    assert with_nodes(GQSGDConfig(), nodes) == GQSGDConfig()
    with pytest.raises(ConfigError, match=r"are not in order on nodes of equal size.*give node_size"):
        with_nodes(LEVELS, nodes)


@pytest.mark.parametrize("text", ["abc", "", "0", "-4", "4.5"])
def test_a_number_of_processes_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    with pytest.raises(ConfigError, match="is not a number of processes of this node; correct or unset it"):
        this_node()


def test_a_machine_stands_for_several_nodes_where_a_launcher_numbers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    plain = this_node()
    assert plain == this_node()
    monkeypatch.setenv("GROUP_RANK", "0")
    first = this_node()
    monkeypatch.setenv("GROUP_RANK", "1")
    assert len({plain, first, this_node()}) == 3


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The devices of a machine with two cards, a bond and a VLAN over them, and four ports of InfiniBand."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_IB_HCA"):
        monkeypatch.delenv(name, raising=False)
    net = tmp_path / "net"
    for name, speed in (("eth0", 1000), ("eth1", 25000), ("docker0", 100000), ("bond0", 50000), ("bond0.7", -1)):
        (net / name).mkdir(parents=True)
        (net / name / "speed").write_text(str(speed))
    for name in ("eth0", "eth1", "wlan0"):
        (net / name / "device").mkdir(parents=True)
    (net / "bond0" / "lower_eth1").symlink_to(net / "eth1")
    (net / "bond0.7" / "lower_bond0").symlink_to(net / "bond0")
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "4: ACTIVE"), ("mlx5_2", "1: DOWN"), ("x0", "4: ACTIVE")):
        port = tmp_path / "infiniband" / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "rate").write_text("100 Gb/sec (4X EDR)")
        (port / "state").write_text(state)
    return tmp_path


def test_the_rate_of_a_node_is_that_of_its_infiniband_ports_over_nccl_or_of_its_fastest_card(devices: Path) -> None:
    assert link_rate("nccl", devices) == 300e9 / 8
    assert link_rate("gloo", devices) == 25e9 / 8
    assert link_rate("gloo", devices / "nothing") == 0


@pytest.mark.parametrize(
    ("given", "gbit"),
    [
        ("", 25),
        ("eth0", 1),
        ("=eth0", 1),
        ("eth", 25),
        ("=eth", 0),
        ("^eth1,bond", 1),
        ("^=eth1,bond0", 25),  # bond0.7 is left
        ("^eth", 25),
        ("eth1:5,eth0", 25),
        ("=bond0.7", 25),
        ("docker0", 0),
        ("wlan0", 0),
    ],
)
def test_the_rate_over_nccl_without_infiniband_is_that_of_the_interfaces_it_may_use(
    given: str, gbit: float, devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", given)
    assert link_rate("nccl", devices) == gbit * 1e9 / 8


@pytest.mark.parametrize(("given", "gbit"), [("eth0", 1), ("eth0,eth1", 25), ("eth", 0), ("bond0", 25)])
def test_the_rate_over_gloo_is_that_of_the_interfaces_it_may_use(
    given: str, gbit: float, devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    assert link_rate("gloo", devices) == gbit * 1e9 / 8


@pytest.mark.parametrize(("given", "gbit"), [("mlx5", 200), ("=mlx5_0:1", 100), ("^mlx5_1,x", 100), ("mlx5_2", 25)])
def test_the_rate_over_nccl_is_that_of_the_infiniband_devices_it_may_use(
    given: str, gbit: float, devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    monkeypatch.setenv("NCCL_IB_HCA", given)
    assert link_rate("nccl", devices) == gbit * 1e9 / 8


def test_the_rate_of_a_group_is_that_of_its_slowest_link_that_is_known() -> None:
    rates = [("a", 3e9), ("b", 0.0), ("a", 2e9)]
    told = [{"node": node, "bytes_per_s": rate, "device": "cpu"} for node, rate in rates]
    assert _nodes(told) == Nodes((0, 1, 0), 2e9)
    assert _nodes(told[1:2]).bytes_per_s == 0


def test_stages_of_two_levels() -> None:
    config = resolve(GQSGDConfig(reducer="hierarchical", node_size=4), 8)
    setting = setting_of(config, 8, torch.float32)
    kinds = [[scope.kind for scope in stage] for stage in setting.reducer.scopes(setting)]
    assert kinds == [["all", "node"], ["peers"], ["node"]]


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="how many ranks each node has: give node_size"):
        resolve(GQSGDConfig(reducer="hierarchical"), 8)
    with pytest.raises(ConfigError, match="8 ranks do not make nodes of 3"):
        resolve(GQSGDConfig(reducer="hierarchical", node_size=3), 8)
    with pytest.raises(ConfigError, match="node_size=2 is for reducer='hierarchical'"):
        GQSGDConfig(node_size=2)
    with pytest.raises(ConfigError, match="a memory works with the reducers sum, two_shot, gather"):
        GQSGDConfig(reducer="hierarchical", node_size=2, memory="ef")
    with pytest.raises(ConfigError, match="take scale_per='block'"):
        GQSGDConfig(reducer="hierarchical", node_size=2, scale_per="parameter")
    with pytest.raises(ConfigError, match="sums at most 3 ranks, not 16"):
        resolve(GQSGDConfig(reducer="hierarchical", node_size=2, bits=2, scale="global"), 32)
