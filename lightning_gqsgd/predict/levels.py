"""Chooses the reducer for nodes of several ranks: one level or two, whichever is predicted to be faster.

If several ranks share a node's link, a reducer of one level sends each rank's codes through it. `Hierarchical` sends
codes once per node, but sends uncompressed gradients inside nodes. Which of the two is faster depends on both rates and
on the number of bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.choosing import level_or_levels
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.errors import ConfigError, counted
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.predict.costs import LATENCY_S, Costs, Link, estimated_costs
from lightning_gqsgd.predict.model import NATIVE, predict
from lightning_gqsgd.predict.sharded import ShardedMethod, scatter_seconds
from lightning_gqsgd.predict.timeline import BUCKET_BYTES, Bucket, Timeline
from lightning_gqsgd.session.links import VARIABLE
from lightning_gqsgd.session.nodes import Nodes, with_nodes
from lightning_gqsgd.spec.quantities import duration

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
        note: clauses that say so, or why that is not possible, or that plain DDP is, or may be, faster; empty
            otherwise.
    """

    config: GQSGDConfig
    note: str = ""


@lru_cache(maxsize=256)  # `all_reduce` asks in every call
def fitted(config: GQSGDConfig, nodes: Nodes, numel: int, dtype: torch.dtype) -> Fit:
    """Returns a configuration with the reducer that fits the nodes of a process group best, if the user did not choose
    it.

    All ranks with the same nodes get the same result.

    Args:
        config: any configuration.
        nodes: nodes of the process group's ranks, and the devices of their gradients.
        numel: number of coordinates that are reduced in a step.
        dtype: dtype of the gradients.

    Raises:
        ConfigError: if ``reducer="hierarchical"`` has no ``node_size``, and nodes have unequal sizes.
    """
    config = with_nodes(config, nodes)
    widths = _widths(config)
    if not widths or not numel:
        return Fit(config)
    if nodes.number == 1:
        return Fit(config, _warning_of_one_node(config, nodes))
    # All candidates of `auto` use the same way, which is chosen for the widest one, the closest to plain DDP.
    seconds_of = partial(_all_reduce_s, nodes, numel, dtype, max(widths))
    advice = "; `gqsgd advise` says what pays, and auto=True takes plain DDP where that is faster"
    fit = _fastest(_ways(config, nodes.size), nodes, seconds_of, "plain DDP", advice)
    missed = _missed_levels(config, nodes, lambda equal: fitted(config, equal, numel, dtype))
    return replace(fit, note=missed + fit.note)


def fitted_scatter(config: GQSGDConfig, nodes: Nodes, numel: int) -> Fit:
    """Returns a configuration for FSDP2's reduce-scatters with the number of levels that fits the nodes of a process
    group best, if the user did not choose it.

    All ranks with the same nodes get the same result.

    Args:
        config: a configuration whose reducer is "auto", "two_shot" or "hierarchical".
        nodes: nodes of the ranks among which the model is divided, and the devices of their gradients.
        numel: number of coordinates that are reduced in a step.

    Raises:
        ConfigError: if ``reducer="hierarchical"`` has no ``node_size``, and nodes have unequal sizes; if the ranks make
            no nodes of this size, or one node.
    """
    one_level = replace(config, reducer="two_shot", node_size=0)
    size = nodes.size
    if config.reducer == "hierarchical":
        config = level_or_levels(with_nodes(config, nodes), len(nodes.of_ranks))
        if config.reducer == "native":
            raise ConfigError(
                "reducer='hierarchical' compresses nothing inside a node, and the model is divided among the "
                f"{counted(len(nodes.of_ranks), 'rank')} of one node: leave out reduce_scatter, or give "
                "reducer='two_shot'"
            )
        return Fit(config if config.reducer == "hierarchical" else one_level)
    widths = _widths(config)
    if nodes.number == 1 or not widths or not numel:
        return Fit(one_level)
    if size < 2:
        return Fit(one_level, _missed_levels(config, nodes, lambda equal: fitted_scatter(config, equal, numel)))
    seconds_of = partial(_reduce_scatter_s, nodes, numel, max(widths))
    advice = " in fp32; `gqsgd advise --fsdp` says what pays"
    return _fastest([one_level, *_ways(config, size)[1:]], nodes, seconds_of, "torch's own reduce-scatters", advice)


def _fastest(
    ways: Sequence[GQSGDConfig],
    nodes: Nodes,
    seconds_of: Callable[[GQSGDConfig | None], float],
    plain: str,
    advice: str,
) -> Fit:
    """Returns the configuration that is predicted to be fastest.

    There is no warning that torch itself is faster if the rate of the link is unknown, or if the configuration may
    choose plain DDP.

    Args:
        ways: the configurations, of which the first one has the levels that were asked for, or one.
        nodes: the nodes.
        seconds_of: returns the seconds of a step's gradients with a configuration; None stands for torch itself.
        plain: what torch itself does, in words.
        advice: the end of the warning.
    """
    link = f"{8 * _link(nodes).bytes_per_s / 1e9:.3g} Gbit/s"
    if not nodes.bytes_per_s:
        link = f"an assumed {link} ({VARIABLE}=25gbit sets the rate)"
    seconds = {way: seconds_of(way) for way in ways}
    chosen = min(ways, key=lambda way: seconds[way])
    note = ""
    if chosen != ways[0]:
        note = (
            f"; hierarchical, because {nodes.size} ranks share the link of a node: on {link}, the "
            f"gradients of a step are predicted to take {duration(seconds[chosen])}, and {duration(seconds[ways[0]])} "
            "without levels"
        )
    plain_s = seconds_of(None)
    if nodes.bytes_per_s and not chosen.auto and seconds[chosen] > plain_s * (1 + TOLERANCE):
        note += (
            f"; PREDICTED TO BE SLOWER than {plain}: on {link}, {duration(seconds[chosen])} for the "
            f"gradients of a step against {duration(plain_s)}{advice}"
        )
    return Fit(chosen, note)


def _missed_levels(config: GQSGDConfig, nodes: Nodes, fit_on: Callable[[Nodes], Fit]) -> str:
    """Returns a clause that says why nodes cannot have two levels, if these would be taken on equal nodes of the
    largest size; empty otherwise.

    Args:
        config: the configuration.
        nodes: the nodes, at least two.
        fit_on: returns the configuration that fits other nodes.
    """
    if nodes.size or config.reducer != "auto":
        return ""
    counts = Counter(nodes.of_ranks).values()
    largest = max(counts)
    equal = nodes._replace(of_ranks=tuple(rank // largest for rank in range(largest * nodes.number)))
    if fit_on(equal).config.reducer != "hierarchical":
        return ""
    *most, last = map(str, sorted(set(counts), reverse=True))
    why = f"nodes have {', '.join(most)} and {last} ranks" if most else "ranks are not ordered by node"
    return f"; hierarchical is not possible, because {why}: on equal nodes, it is predicted to be faster"


def _warning_of_one_node(config: GQSGDConfig, nodes: Nodes) -> str:
    """Returns a clause on GPUs of one machine; empty if there are none, or if the configuration may choose plain DDP.

    There is no prediction for them, because the rate of their links is unknown. Processes on the CPU of one machine are
    about as fast with codes as without.
    """
    if len(nodes.of_ranks) == 1 or nodes.devices == {"cpu"} or config.auto:
        return ""
    return (
        f"; all {len(nodes.of_ranks)} ranks are on one machine, and links between GPUs are often faster than any "
        "codec: compare with plain DDP, as gqsgd_auto does while it trains"
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


def _link(nodes: Nodes) -> Link:
    """Returns the link between nodes, with an assumed rate if no node knows its rate."""
    assumed = ASSUMED_RATES.get(_estimate_for(nodes.devices), OTHER_ASSUMED_RATE)
    return Link(nodes.bytes_per_s or assumed, LATENCY_S)


def _costs(nodes: Nodes) -> Costs:
    """Returns all constants. If nodes have unequal sizes, each rank counts as a node."""
    size = max(1, nodes.size)
    return estimated_costs(_estimate_for(nodes.devices), len(nodes.of_ranks) // size, size, _link(nodes))


def _reduce_scatter_s(nodes: Nodes, numel: int, bits: int, way: GQSGDConfig | None) -> float:
    """Returns the seconds of the reduce-scatters of a step's gradients, which come one after the other; if ``way`` is
    None, of torch's own in fp32."""
    bucket = min(BUCKET_BYTES // 4, numel)
    has_levels = way is not None and way.reducer == "hierarchical"
    method = ShardedMethod(torch.float32, None if way is None else bits, has_levels=has_levels)
    return numel / bucket * scatter_seconds(_costs(nodes), nodes.number, nodes.size, method, bucket)


def _all_reduce_s(nodes: Nodes, numel: int, dtype: torch.dtype, bits: int, way: GQSGDConfig | None) -> float:
    """Returns the seconds of the all-reduces of a step's gradients; if ``way`` is None, those of plain DDP.

    The default codec is assumed, because its costs are known. Both ways use the same codec.
    """
    bucket = max(1, BUCKET_BYTES // dtype.itemsize)
    count = max(1, min(_BUCKETS, numel // bucket))
    bucket = min(bucket, numel)
    method = None
    if way is not None:
        has_levels = way.reducer == "hierarchical" and nodes.size > 1
        levels = {"reducer": "hierarchical", "node_size": nodes.size} if has_levels else {"reducer": "two_shot"}
        method = resolve(GQSGDConfig(bits=bits, sample_every=0, **levels), len(nodes.of_ranks))
    return numel / (count * bucket) * _seconds(method, nodes, dtype, bucket, count)


@lru_cache(maxsize=256)
def _seconds(method: GQSGDConfig | None, nodes: Nodes, dtype: torch.dtype, numel: int, count: int) -> float:
    """Returns the seconds to reduce some equal buckets, without any computation at the same time."""
    buckets = tuple(Bucket((Segment(number, numel, raw=False),), 0.0) for number in range(count))
    timeline = Timeline(buckets, 0.0, dtype=dtype)
    return predict(timeline, _costs(nodes), len(nodes.of_ranks), method or NATIVE).step_s


def _estimate_for(devices: frozenset[str]) -> str:
    """Returns the name of the estimates for devices. If ranks have different devices, the estimates of the slower one
    are used."""
    if devices == {"cpu"}:
        return "cpu"
    is_newer = all(any(model in name.lower() for model in _AS_FAST_AS_H100) for name in devices)
    return "h100" if is_newer else "a100"
