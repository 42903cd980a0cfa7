"""Two levels: the gradient's own precision inside each node, quantised between nodes.

Every rank of a node owns a shard. The rank averages the shard over the ranks of its node, in rank order. It then
averages the result with the ranks of the same place on the other nodes, by the reducer that "auto" chooses for their
number, and sends it to the ranks of its node. The links between nodes carry each coordinate once per node, not once per
rank, and one rounding of the node's mean takes the place of its ranks' roundings.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs import Codec
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import LENGTH, BlockRun, block_runs_of, divided, table_of
from lightning_gqsgd.kernels.protocol import Count
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES
from lightning_gqsgd.reducers.base import ALL, Exchange, Reducer, Scope, Setting, StepKeys, Steps, reduced
from lightning_gqsgd.reducers.choice import FLAT, choose_reducer
from lightning_gqsgd.reducers.memory import MemoryStore

if TYPE_CHECKING:
    from lightning_gqsgd.spec.fields import AnyFields, Fields


def level_or_levels(config: AnyFields, ranks: int) -> AnyFields:
    """Returns the configuration with a reducer of one level, where one level is enough.

    It is enough where each node has one rank, and where there is one node only. A configuration with another reducer is
    returned as it is.

    Raises:
        ConfigError: the size of nodes is not given, nodes are of unequal size, or no reducer fits between them.
    """
    if config.reducer != "hierarchical":
        return config
    size = config.node_size if ranks > 1 else 1
    if not size:
        raise ConfigError("reducer='hierarchical' needs to know how many ranks each node has: give node_size")
    if ranks % size:
        raise ConfigError(
            f"{ranks} ranks do not make nodes of {size}; reducer='hierarchical' needs nodes of equal size: "
            "correct node_size, or take another reducer"
        )
    # With one node there are no links to save bytes on; with one rank per node there is nothing to average inside.
    if size == ranks:
        return replace(config, reducer="native", node_size=0, scale="auto", norm_over_ranks="max")
    if size == 1:
        return replace(config, reducer="auto", node_size=0)
    between_nodes(config, ranks)
    return config


def between_nodes(config: AnyFields, ranks: int) -> AnyFields:
    """Returns the configuration for the ranks that have the same place on each node."""
    flat = replace(config, reducer="auto", node_size=0)
    return replace(flat, reducer=choose_reducer(flat, ranks // config.node_size))


class Hierarchical(Reducer):
    """Reduces in full precision within each node, and quantised between nodes.

    ``message_bytes`` counts the bytes between nodes only, ``sent_bytes`` all bytes. See `reducers.base.Reducer` for the
    arguments.
    """

    scales: ClassVar[tuple[str, ...]] = ("local", "global")
    divides_parameters: ClassVar[bool] = True
    stays_when_uncompressed: ClassVar[bool] = True
    needs_copy = False

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        size = setting.config.node_size
        nodes = setting.ranks // setting.config.node_size
        config = between_nodes(setting.config, setting.ranks)
        self.node = Scope("node", size)
        self.peers = Scope("peers", size)
        self.peer_stages = FLAT[config.reducer].stages(config, nodes)
        block_size = setting.block_size
        # Each table counts from the start of its shard.
        tables = [table_of(part, block_size) for part in divided(block_runs_of(table), size, block_size)]
        self.numels = [int(part[:, LENGTH].sum()) for part in tables]
        between = Setting(config, nodes, setting.dtype)
        self.between = [FLAT[config.reducer](part, between) if len(part) else None for part in tables]
        not_empty = [reducer for reducer in self.between if reducer is not None]
        self.message_bytes = sum(reducer.message_bytes for reducer in not_empty)
        # Within a node each coordinate travels twice, uncompressed: to the owner of its shard, and back.
        inside = 2 * (size - 1) * max(self.numels) * setting.dtype.itemsize
        self.sent_bytes = inside + max(reducer.sent_bytes for reducer in not_empty)

    @staticmethod
    def stages(config: Fields, ranks: int) -> int:
        """Returns the number of stages; see `reducers.base.Reducer.stages`."""
        between = between_nodes(config, ranks)
        nodes = ranks // config.node_size
        return 2 + FLAT[between.reducer].stages(between, nodes)

    @classmethod
    def scopes(cls, config: Fields, ranks: int) -> list[tuple[Scope, ...]]:
        """Returns the scopes of the exchanges, stage by stage; see `reducers.base.Reducer.scopes`. The first stage also
        has what telemetry samples, between all ranks."""
        node = Scope("node", config.node_size)
        peers = Scope("peers", config.node_size)
        return [(ALL, node), *[(peers,)] * (cls.stages(config, ranks) - 2), (node,)]

    @classmethod
    def alike(cls, block_runs: Sequence[BlockRun], setting: Setting) -> Hashable:
        """Returns the sizes of the shards, and what the reducers between nodes depend on; see
        `reducers.base.Reducer.alike`."""
        config = between_nodes(setting.config, setting.ranks)
        between = Setting(config, setting.ranks // setting.config.node_size, setting.dtype)
        parts = divided(block_runs, setting.config.node_size, setting.block_size)
        numels = [sum(run.numel for run in part) for part in parts]
        each = [FLAT[config.reducer].alike(part, between) for part in parts if part]
        # Rank 0 pads its shard to the largest one. Of the other shards, the bytes of the longest message count.
        return (sum(numels), numels[0], max(numels), each[0], frozenset(each))

    @staticmethod
    def mean_error(codec: Codec, ranks: int) -> float:
        """Returns the predicted mean square error; see `reducers.base.Reducer.mean_error`. It is at
        most that of two shots over all ranks."""
        return FLAT["two_shot"].mean_error(codec, ranks)

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        """Replace ``x`` by the mean over ranks; see `reducers.base.Reducer.steps`."""
        size = self.node.node_size
        nodes = len(keys.up) // self.node.node_size
        place = rank % size
        node = rank // size
        mine = self.numels[place]
        parts = torch.empty(size, mine, dtype=x.dtype, device=x.device)
        yield (Exchange("all_to_all", parts.view(-1), x, ([mine] * size, self.numels), self.node),)

        shard = _mean(parts)
        bad = yield from self._between_nodes(shard, place, node, replace(keys, up=keys.up[:nodes]), store)

        # Shards end where blocks end, so their lengths differ, and an all-gather needs equal ones.
        padded = torch.zeros(max(self.numels), dtype=x.dtype, device=x.device)
        padded[:mine] = shard
        everyone = torch.empty(size, len(padded), dtype=x.dtype, device=x.device)
        yield (Exchange("all_gather", everyone, padded, scope=self.node),)
        torch.cat([row[:numel] for row, numel in zip(everyone, self.numels, strict=True)], out=x)
        return bad

    def _between_nodes(self, shard: Tensor, place: int, node: int, keys: StepKeys, store: MemoryStore) -> Steps:
        """Average a shard over nodes, in the same number of stages at every place: they share the groups' order."""
        between = self.between[place]
        stages = self.peer_stages
        bad: Count = 0
        if between is not None:
            steps = reduced(between, shard, node, keys, store)
            while True:
                try:
                    exchanges = next(steps)
                except StopIteration as end:
                    bad = end.value
                    break
                stages -= 1
                yield [exchange._replace(scope=self.peers) for exchange in exchanges]
        for _ in range(stages):
            yield ()
        return bad


def _mean(parts: Tensor) -> Tensor:
    """Returns the mean over [ranks, numel], added in rank order whatever the shape."""
    total = parts[0].to(COMPUTE_DTYPES[parts.dtype], copy=True)
    for part in parts[1:]:
        total += part
    return total.div_(len(parts)).to(parts.dtype)
