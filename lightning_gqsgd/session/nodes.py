"""The number of a process group's ranks on each node, for the reducer "hierarchical"."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch.distributed as dist

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.wire.workers import codec_threads

if TYPE_CHECKING:
    from lightning_gqsgd.config import GQSGDConfig

#: Where torchrun says how many processes it has started on this node.
VARIABLE = "LOCAL_WORLD_SIZE"


def with_nodes(config: GQSGDConfig, group: dist.ProcessGroup) -> GQSGDConfig:
    """Returns the configuration with the size of its nodes, if its reducer needs one and the user gives none.

    Args:
        config: any configuration.
        group: process group whose ranks are averaged.

    Raises:
        ConfigError: see `node_size_of`; or this rank's environment names no number of threads (`wire.workers`),
            which all ranks are told here, before they have agreed.
    """
    codec_threads(group.size())
    if config.reducer != "hierarchical" or config.node_size:
        return config
    return replace(config, node_size=node_size_of(dist.get_process_group_ranks(group), os.environ.get(VARIABLE)))


def node_size_of(ranks: Sequence[int], per_node: str | None) -> int:
    """Returns the number of consecutive ranks of a process group that each node has.

    Torchrun numbers processes node by node. So ranks of all processes are on the same node if they are the same number
    of whole nodes away from 0.

    Args:
        ranks: the numbers that the ranks of the group have among all processes, in the group's order.
        per_node: processes that each node has, as torchrun says; None if nothing says it.

    Raises:
        ConfigError: the number is not known or is none, or the group has unequal numbers of ranks on its nodes.
    """
    if per_node is None:
        raise ConfigError(
            "reducer='hierarchical' needs to know how many ranks each node has: give node_size, or start with "
            f"torchrun, which sets {VARIABLE}"
        )
    if not per_node.isdecimal() or int(per_node) < 1:
        raise ConfigError(f"{VARIABLE}={per_node!r} is no number of ranks per node; give node_size")
    runs = [(node, len(list(run))) for node, run in groupby(rank // int(per_node) for rank in ranks)]
    sizes = {size for _, size in runs}
    nodes = {node for node, _ in runs}
    if len(sizes) > 1 or len(nodes) < len(runs):
        raise ConfigError(
            f"the group's ranks {list(ranks)} are not in order on nodes of equal size, where a node has {per_node} "
            f"processes ({VARIABLE}); reducer='hierarchical' needs that: give node_size, or take another reducer"
        )
    return sizes.pop()
