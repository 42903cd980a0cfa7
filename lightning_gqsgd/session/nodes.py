"""Finds which ranks of a process group share a node, and the rate of the node's link."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.wire.agreement import digest_of
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
        ConfigError: if a rank's environment has an invalid number of processes or of threads. It is raised on every
            rank.
        CollectiveError: if a rank did not arrive in time.
    """
    codec_threads(dist.get_world_size())  # checks the number of threads before ranks agree on anything
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    news = {"node": digest_of(this_node()), "bytes_per_s": link_rate(), "device": name}
    meeting.agree(news=news)
    return [_nodes(told) for told in meeting.news]


def _nodes(told: Sequence[Mapping[str, Any]]) -> Nodes:
    """Returns the nodes of ranks from their news: their nodes, the rates of the nodes' links, and their devices."""
    numbers = {node: number for number, node in enumerate(dict.fromkeys(rank["node"] for rank in told))}
    known = [rank["bytes_per_s"] for rank in told if rank["bytes_per_s"]]
    of_ranks = tuple(numbers[rank["node"]] for rank in told)
    return Nodes(of_ranks, min(known, default=0.0), frozenset(rank["device"] for rank in told))


def link_rate(root: Path = Path("/sys/class")) -> float:
    """Returns the bytes per second that this machine can send to others, according to its kernel; 0 if unknown.

    The rates of all InfiniBand ports are added. If there are none, it is the rate of the fastest network card. Virtual
    cards, such as those of containers, are ignored, because their rates mean nothing.
    """
    return sum(_infiniband(root / "infiniband")) or max(_cards(root / "net"), default=0.0)


def _infiniband(folder: Path) -> Iterator[float]:
    for port in sorted(folder.glob("*/ports/*")):
        with suppress(OSError):
            rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec", (port / "rate").read_text())
            if rate and "ACTIVE" in (port / "state").read_text():
                yield float(rate[1]) * 1e9 / 8


def _cards(folder: Path) -> Iterator[float]:
    for card in sorted(folder.glob("*")):
        megabits = card_rate(card)
        if megabits is not None and (card / "device").exists():
            yield megabits * 1e6 / 8


def card_rate(card: Path) -> int | None:
    """Returns the rate of a network card in Mbit/s, according to its driver; None if the driver does not say it, or if
    no cable is connected.

    Args:
        card: the card's folder below ``/sys/class/net``.
    """
    with suppress(OSError, ValueError):
        megabits = int((card / "speed").read_text())
        return megabits if megabits > 0 else None
    return None


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
