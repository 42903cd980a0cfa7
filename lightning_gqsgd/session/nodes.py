"""Finds which ranks of a process group share a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.session.links import VARIABLE, given_rate, link_rate
from lightning_gqsgd.spec.quantities import rate_in_words
from lightning_gqsgd.wire.agreement import digest_of
from lightning_gqsgd.wire.communicator import backends_of
from lightning_gqsgd.wire.node import this_node
from lightning_gqsgd.wire.workers import codec_threads

if TYPE_CHECKING:
    from lightning_gqsgd.config import GQSGDConfig
    from lightning_gqsgd.wire.meeting import Meeting


class Nodes(NamedTuple):
    """The nodes that the ranks of a process group run on.

    Attributes:
        of_ranks: for each rank, in the group's order, the number of its node.
        bytes_per_s: bytes per second that the node with the slowest link can send to others; 0 if no node knows its
            rate.
        devices: names of the gradients' devices; ``"cpu"`` for a CPU.
    """

    of_ranks: tuple[int, ...]
    bytes_per_s: float = 0.0
    devices: frozenset[str] = frozenset({"cpu"})

    @property
    def size(self) -> int:
        """Number of consecutive ranks on each node; 0 if nodes have unequal numbers of ranks, or ranks that are not
        consecutive."""
        runs = [(node, len(list(run))) for node, run in groupby(self.of_ranks)]
        sizes = {size for _, size in runs}
        return sizes.pop() if len(sizes) == 1 and len(runs) == self.number else 0

    @property
    def number(self) -> int:
        """Number of nodes."""
        return len(set(self.of_ranks))


def nodes_of_groups(meeting: Meeting, device: torch.device) -> list[Nodes]:
    """Returns the nodes of each process group of a meeting. A collective: a round of the meeting.

    Args:
        meeting: the ranks.
        device: device of this rank's gradients.

    Raises:
        ConfigError: if a rank's environment has an invalid number of processes or of threads, or an invalid rate of the
            link, or if ranks have different ones. It is raised on every rank.
        CollectiveError: if a rank did not arrive in time.
    """
    codec_threads(dist.get_world_size())  # checks the number of threads before ranks agree on anything
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    over_nccl = device.type == "cuda" and backends_of(meeting.groups[0]).get("cuda") == "nccl"
    given = given_rate()
    rate = given or link_rate("nccl" if over_nccl else "gloo")
    news = {"node": digest_of(this_node()), "bytes_per_s": rate, "device": name}
    in_common = {VARIABLE: rate_in_words(given) if given else "not set"}
    meeting.agree([in_common] * len(meeting.groups), news)
    return [_nodes(told) for told in meeting.news]


def _nodes(told: Sequence[Mapping[str, Any]]) -> Nodes:
    """Returns the nodes of ranks from their news: their nodes, the rates of the nodes' links, and their devices."""
    numbers = {node: number for number, node in enumerate(dict.fromkeys(rank["node"] for rank in told))}
    known = [rank["bytes_per_s"] for rank in told if rank["bytes_per_s"]]
    of_ranks = tuple(numbers[rank["node"]] for rank in told)
    return Nodes(of_ranks, min(known, default=0.0), frozenset(rank["device"] for rank in told))


def with_nodes(config: GQSGDConfig, nodes: Nodes) -> GQSGDConfig:
    """Returns the configuration, with ``node_size`` set if its reducer needs it and the user gave none.

    Raises:
        ConfigError: if the group's nodes have unequal numbers of ranks, or ranks that are not consecutive.
    """
    if config.reducer != "hierarchical" or config.node_size:
        return config
    if not nodes.size:
        raise ConfigError(
            f"the group's ranks, on the nodes {list(nodes.of_ranks)}, are not in order on nodes of equal size; "
            "reducer='hierarchical' needs that: give node_size, or take another reducer"
        )
    return replace(config, node_size=nodes.size)
