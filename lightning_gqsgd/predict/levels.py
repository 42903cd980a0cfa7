"""Chooses the reducer for nodes of several ranks: one level or two, whichever is predicted to be faster.

If several ranks share a node's link, a reducer of one level sends each rank's codes through it. `Hierarchical` sends
codes once per node, but sends uncompressed gradients inside nodes. Which of the two is faster depends on both rates and
on the number of bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.choosing import level_or_levels
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.errors import ConfigError, in_ms
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.predict.costs import LATENCY_S, Costs, Link, estimated_costs
from lightning_gqsgd.predict.timeline import BUCKET_BYTES, Bucket, Timeline
from lightning_gqsgd.session.nodes import with_nodes

if TYPE_CHECKING:
    from lightning_gqsgd.session.nodes import Layout

#: Bytes per second of the links between nodes, by the device of gradients, if no node knows its rate: 1 Gbit/s for
#: machines without GPUs, and 10 Gbit/s for others.
ASSUMED_RATES = {"cpu": 1.25e8}
OTHER_ASSUMED_RATE = 1.25e9
#: If the prediction exceeds that of plain DDP by more than this share, the start reports it.
TOLERANCE = 0.01
#: Parts of the names of GPUs for which H100's estimates are used; A100's are used for all others.
_AS_FAST_AS_H100 = ("h100", "h200", "b100", "b200", "gh200")
#: Number of buckets that are predicted at most. All full buckets are equal, so the time is proportional to their
#: number.
_BUCKETS = 4


@dataclass(frozen=True)
class Fit:
    """A configuration that fits the nodes of a process group.

    Attributes:
        config: the configuration; its reducer is "hierarchical" if that is predicted to be faster.
        note: a clause that says so, or that plain DDP is, or may be, faster; empty otherwise.
    """

    config: GQSGDConfig
    note: str = ""


@lru_cache(maxsize=256)  # `all_reduce` asks in every call
def fitted(config: GQSGDConfig, layout: Layout, numel: int, dtype: torch.dtype) -> Fit:
    """Returns a configuration with the reducer that fits the nodes of a process group best, if the user did not choose
    it.

    All ranks with the same layout get the same result.

    Args:
        config: any configuration.
        layout: nodes of the process group's ranks, and the devices of their gradients.
        numel: number of coordinates that are reduced in a step.
        dtype: dtype of the gradients.

    Raises:
        ConfigError: if ``reducer="hierarchical"`` has no ``node_size``, and nodes have unequal sizes.
    """
    config = with_nodes(config, layout)
    widths = _widths(config)
    if not widths or not numel:
        return Fit(config)
    if layout.num_nodes == 1:
        return Fit(config, _warning_of_one_node(config, layout))
    predicted = _Seconds(layout, numel, dtype)
    # All candidates of `auto` use the same way, which is chosen for the widest one, the closest to plain DDP.
    seconds = {way: predicted.of(way, max(widths)) for way in _ways(config, layout.node_size)}
    chosen = min(seconds, key=lambda way: seconds[way])
    note = ""
    if chosen != config:
        note = _why_levels(layout.node_size, predicted.nodes.link_in_words, seconds[chosen], seconds[config])
    return Fit(chosen, note + predicted.warning(seconds[chosen], has_choice=bool(config.auto)))


def fitted_scatter(config: GQSGDConfig, layout: Layout, numel: int) -> Fit:
    """Returns a configuration for FSDP2's reduce-scatters with the number of levels that fits the nodes of a process
    group best, if the user did not choose it.

    All ranks with the same layout get the same result.

    Args:
        config: a configuration whose reducer is "auto", "two_shot" or "hierarchical".
        layout: nodes of the ranks among which the model is divided, and the devices of their gradients.
        numel: number of coordinates that are reduced in a step.

    Raises:
        ConfigError: if ``reducer="hierarchical"`` has no ``node_size``, and nodes have unequal sizes; if the ranks make
            no nodes of this size, or one node.
    """
    one_level = replace(config, reducer="two_shot", node_size=0)
    size = layout.node_size
    if config.reducer == "hierarchical":
        config = level_or_levels(with_nodes(config, layout), len(layout.nodes))
        if config.reducer == "native":
            raise ConfigError(
                "reducer='hierarchical' compresses nothing inside a node, and the model is divided among the "
                f"{len(layout.nodes)} ranks of one node: leave out reduce_scatter, or give reducer='two_shot'"
            )
        return Fit(config if config.reducer == "hierarchical" else one_level)
    widths = _widths(config)
    if layout.num_nodes == 1 or size < 2 or not widths or not numel:
        return Fit(one_level)
    ways = {way.reducer: way for way in (one_level, *_ways(config, size)[1:])}
    predicted = _ScatterSeconds(layout, numel, max(widths))
    seconds = {reducer: predicted.of(reducer) for reducer in ways}
    chosen = min(seconds, key=lambda reducer: seconds[reducer])
    note = ""
    if chosen == "hierarchical":
        note = _why_levels(size, predicted.nodes.link_in_words, seconds[chosen], seconds["two_shot"])
    return Fit(ways[chosen], note + predicted.warning(seconds[chosen]))


def _why_levels(node_size: int, link: str, seconds: float, without_s: float) -> str:
    """Returns a clause on why a reducer has two levels."""
    return (
        f"; hierarchical, because {node_size} ranks share the link of a node: on {link}, the gradients of a step are "
        f"predicted to take {in_ms(seconds)}, and {in_ms(without_s)} without levels"
    )


def _warning_of_one_node(config: GQSGDConfig, layout: Layout) -> str:
    """Returns a clause on GPUs of one machine; empty if there are none, or if the configuration may choose plain DDP.

    There is no prediction for them, because the rate of their links is unknown. Processes on the CPU of one machine are
    about as fast with codes as without.
    """
    if len(layout.nodes) == 1 or layout.devices == {"cpu"} or config.auto:
        return ""
    return (
        f"; all {len(layout.nodes)} ranks are on one machine, and links between GPUs are often faster than any codec: "
        "compare with plain DDP, as gqsgd_auto does while it trains"
    )


def _widths(config: GQSGDConfig) -> list[int]:
    """Returns the numbers of bits of quantised codes that parameters have, or may have."""
    configs = config.candidates() if config.chooses_bits else config.by_bits()
    return [bits for bits in configs if 1 <= bits <= 8]


def _ways(config: GQSGDConfig, node_size: int) -> list[GQSGDConfig]:
    """Returns the possible configurations: the given one, and one with two levels if the reducer is "auto" and nodes
    have several ranks."""
    if config.reducer != "auto" or node_size < 2:
        return [config]
    try:
        return [config, replace(config, reducer="hierarchical", node_size=node_size)]
    except ConfigError:  # some memories and codecs only support one level
        return [config]


class _Nodes:
    """The nodes of a process group and their links, as predictions take them."""

    def __init__(self, layout: Layout) -> None:
        device = _estimate_for(layout.devices)
        self.is_known = bool(layout.bytes_per_s)
        self.rate = layout.bytes_per_s or ASSUMED_RATES.get(device, OTHER_ASSUMED_RATE)
        self.size = max(1, layout.node_size)
        self.count = len(layout.nodes) // self.size
        self.device = device

    @property
    def link_in_words(self) -> str:
        """The rate of the link."""
        return f"{'' if self.is_known else 'an assumed '}{8 * self.rate / 1e9:.3g} Gbit/s"

    @property
    def costs(self) -> Costs:
        """All constants."""
        return estimated_costs(self.device, self.count, self.size, Link(self.rate, LATENCY_S))


class _ScatterSeconds:
    """Predicted seconds of the reduce-scatters of a step's gradients, which come one after the other."""

    def __init__(self, layout: Layout, numel: int, bits: int) -> None:
        self.nodes = _Nodes(layout)
        self._bits = bits
        self._bucket = min(BUCKET_BYTES // 4, numel)
        self._factor = numel / self._bucket

    def of(self, reducer: str) -> float:
        """Returns the seconds of a reducer; "native" is torch's own reduce-scatter in fp32."""
        # The model of steps takes some time to import, and most starts have one node.
        from lightning_gqsgd.predict.sharded import ShardedMethod, scatter_seconds

        bits = None if reducer == "native" else self._bits
        method = ShardedMethod(torch.float32, bits, has_levels=reducer == "hierarchical")
        nodes = self.nodes
        return self._factor * scatter_seconds(nodes.costs, nodes.count, nodes.size, method, self._bucket)

    def warning(self, seconds: float) -> str:
        """Returns a clause that says that torch's own reduce-scatter in fp32 is predicted to be faster; empty if it is
        not, or if the rate of the link is unknown."""
        plain_s = self.of("native")
        if not self.nodes.is_known or seconds <= plain_s * (1 + TOLERANCE):
            return ""
        return (
            f"; PREDICTED TO BE SLOWER than torch's own reduce-scatters: on {self.nodes.link_in_words}, "
            f"{in_ms(seconds)} for the gradients of a step against {in_ms(plain_s)} in fp32; "
            "`gqsgd advise --fsdp` says what pays"
        )


class _Seconds:
    """Predicted seconds of a step's gradients, between the nodes of a process group."""

    def __init__(self, layout: Layout, numel: int, dtype: torch.dtype) -> None:
        self.nodes = _Nodes(layout)
        self._dtype = dtype
        bucket = max(1, BUCKET_BYTES // dtype.itemsize)
        count = max(1, min(_BUCKETS, numel // bucket))
        self._bucket = min(bucket, numel)
        self._count = count
        self._factor = numel / (count * self._bucket)
        self._plain_s = self.of_method("native")

    def of(self, config: GQSGDConfig, bits: int) -> float:
        """Returns the seconds of a configuration at a number of bits.

        The default codec is assumed, because its costs are known. Both ways use the same codec.
        """
        nodes = self.nodes
        hierarchical = {"reducer": "hierarchical", "node_size": nodes.size}
        levels = hierarchical if config.reducer == "hierarchical" and nodes.size > 1 else {"reducer": "two_shot"}
        return self.of_method(resolve(GQSGDConfig(bits=bits, sample_every=0, **levels), nodes.count * nodes.size))

    def of_method(self, method: GQSGDConfig | str) -> float:
        """Returns the seconds of a method; see `model.predict`."""
        nodes = self.nodes
        key = (nodes.count, nodes.size, nodes.rate, nodes.device)
        return self._factor * _seconds(method, *key, self._dtype, self._bucket, self._count)

    def warning(self, seconds: float, *, has_choice: bool) -> str:
        """Returns a clause that says that plain DDP is predicted to be faster; empty if it is not.

        There is no warning if the rate of the link is unknown, or if the configuration may choose plain DDP.
        """
        if not self.nodes.is_known or has_choice or seconds <= self._plain_s * (1 + TOLERANCE):
            return ""
        return (
            f"; PREDICTED TO BE SLOWER than plain DDP: on {self.nodes.link_in_words}, {in_ms(seconds)} for the "
            f"gradients of a step against {in_ms(self._plain_s)}; `gqsgd advise` says what pays, and auto=True "
            "takes plain DDP where that is faster"
        )


@lru_cache(maxsize=256)
def _seconds(
    method: GQSGDConfig | str,
    nodes: int,
    node_size: int,
    rate: float,
    device: str,
    dtype: torch.dtype,
    numel: int,
    count: int,
) -> float:
    """Returns the seconds to reduce some equal buckets, without any computation at the same time."""
    # The model of steps takes some time to import, and most starts have one node.
    from lightning_gqsgd.predict.model import predict

    costs = estimated_costs(device, nodes, node_size, Link(rate, LATENCY_S))
    buckets = tuple(Bucket((Segment(number, numel, raw=False),), 0.0) for number in range(count))
    timeline = Timeline(buckets, 0.0, dtype=dtype)
    return predict(timeline, costs, nodes * node_size, method).step_s


def _estimate_for(devices: frozenset[str]) -> str:
    """Returns the name of the estimates for devices. If ranks have different devices, the estimates of the slower one
    are used."""
    if devices == {"cpu"}:
        return "cpu"
    is_newer = all(any(model in name.lower() for model in _AS_FAST_AS_H100) for name in devices)
    return "h100" if is_newer else "a100"
