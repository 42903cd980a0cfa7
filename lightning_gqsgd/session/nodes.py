"""Which ranks of a process group share a node, and the rate of the link that they share."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.wire.workers import codec_threads

if TYPE_CHECKING:
    from lightning_gqsgd.config import GQSGDConfig
    from lightning_gqsgd.wire.meeting import Meeting

#: Where torchrun says how many processes it has started on this node.
LOCAL_RANKS = "LOCAL_WORLD_SIZE"
#: Where launchers say the number of a node: torchrun, and Lightning. A machine may stand for several nodes.
NODE_NUMBERS = ("GROUP_RANK", "NODE_RANK")


class Layout(NamedTuple):
    """The nodes that the ranks of a process group run on.

    Attributes:
        nodes: for each rank, in the group's order, the number of its node.
        bytes_per_s: bytes that the node with the slowest link can send to others in a second; 0: no node knows it.
    """

    nodes: tuple[int, ...]
    bytes_per_s: float = 0.0

    @property
    def node_size(self) -> int:
        """Number of consecutive ranks on each node; 0 if nodes have unequal numbers, or ranks that do not follow."""
        runs = [(node, len(list(run))) for node, run in groupby(self.nodes)]
        sizes = {size for _, size in runs}
        return sizes.pop() if len(sizes) == 1 and len(runs) == self.num_nodes else 0

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(set(self.nodes))


def layouts(meeting: Meeting) -> list[Layout]:
    """Returns the layout of each process group of a meeting. A collective: a round of the meeting.

    Raises:
        ConfigError: a rank's environment has a number of processes or of threads that is none; raised on every rank.
        CollectiveError: a rank did not come in time.
    """
    codec_threads(dist.get_world_size())  # refuses a number of threads here, before ranks have agreed on anything
    everyone = meeting.exchange({"node": this_node(), "bytes_per_s": link_rate()})
    return [_layout([(told["node"], told["bytes_per_s"]) for told in group]) for group in everyone]


def _layout(told: list[tuple[str, float]]) -> Layout:
    """Returns the layout of ranks that tell the names of their nodes and the rates of these nodes' links."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in told))}
    known = [rate for _, rate in told if rate]
    return Layout(tuple(numbers[name] for name, _ in told), min(known, default=0.0))


def this_node() -> str:
    """Returns a name of the node that this process runs on, which no process on another node has.

    A machine may stand for several nodes: where a launcher numbers them, and where processes have networks of their
    own, as in containers.

    Raises:
        ConfigError: ``LOCAL_WORLD_SIZE`` is no number of processes.
    """
    namespace = Path("/proc/self/ns/net")
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [socket.gethostname()]
    with suppress(OSError):  # only Linux has them; there, host names may be equal
        parts += [boot.read_text().strip(), str(namespace.stat().st_ino)]
    number = next((os.environ[name] for name in NODE_NUMBERS if name in os.environ), None)
    local = os.environ.get(LOCAL_RANKS)
    if local is not None and (not local.isdecimal() or int(local) < 1):
        raise ConfigError(f"{LOCAL_RANKS}={local!r} is no number of processes of this node; correct or unset it")
    if number is None and local is not None:
        # Processes are numbered node by node.
        number = str(dist.get_rank() // int(local))
    return "/".join([*parts, number or ""])


def link_rate(root: Path = Path("/sys/class")) -> float:
    """Returns the bytes per second that this machine can send to others, as its kernel says; 0 if that is not known.

    InfiniBand ports are used together, and of network cards one. Virtual cards, such as those of containers, tell a
    rate that means nothing.
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
        with suppress(OSError, ValueError):  # a card without a cable has no rate to read
            megabits = int((card / "speed").read_text())
            if (card / "device").exists() and megabits > 0:
                yield megabits * 1e6 / 8


def with_nodes(config: GQSGDConfig, layout: Layout) -> GQSGDConfig:
    """Returns the configuration with the size of its nodes, if its reducer needs one and the user gives none.

    Raises:
        ConfigError: the group has unequal numbers of ranks on its nodes.
    """
    if config.reducer != "hierarchical" or config.node_size:
        return config
    if not layout.node_size:
        raise ConfigError(
            f"the group's ranks, on the nodes {list(layout.nodes)}, are not in order on nodes of equal size; "
            "reducer='hierarchical' needs that: give node_size, or take another reducer"
        )
    return replace(config, node_size=layout.node_size)
