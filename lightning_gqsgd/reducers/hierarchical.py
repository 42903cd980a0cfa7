"""The reducer `hierarchical`: messages are uncompressed inside each node, and quantised between nodes.

Every rank of a node owns a shard. The rank averages the shard over the ranks of its node, in rank order. It then
averages the result with the ranks at the same place on the other nodes, with the reducer that "auto" chooses for their
number, and sends the mean to the ranks of its node. The links between nodes carry each coordinate once per node, and
not once per rank. A node's mean is rounded once, instead of each rank's gradient.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs import Codec
from lightning_gqsgd.kernels.layout import LENGTH, BlockRun, block_runs_of, divided, table_of
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, Share
from lightning_gqsgd.reducers.base import (
    ALL,
    Exchange,
    Reducer,
    Scope,
    Setting,
    StepKeys,
    Steps,
    in_scope,
    reduced,
    side_by_side,
)
from lightning_gqsgd.reducers.memory import MemoryStore
from lightning_gqsgd.reducers.two_shot import TwoShot


class Hierarchical(Reducer):
    """Reduces in full precision within each node, and quantised between nodes.

    ``message_bytes`` counts only the bytes between nodes, and ``sent_bytes`` counts all bytes.
    """

    scales: ClassVar[tuple[str, ...]] = ("local", "global")
    divides_parameters: ClassVar[bool] = True
    stays_when_uncompressed: ClassVar[bool] = True
    needs_copy = False

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        between = between_nodes(setting)
        size = setting.ranks // between.ranks
        self.node = Scope("node", size)
        self.peers = Scope("peers", size)
        self.peer_stages = between.reducer.stages(between)
        block_size = setting.block_size
        # Each table counts from the start of its shard.
        tables = [table_of(part, block_size) for part in divided(block_runs_of(table), size, block_size)]
        self.numels = [int(part[:, LENGTH].sum()) for part in tables]
        self.between = [between.reducer(part, between) if len(part) else None for part in tables]
        not_empty = [reducer for reducer in self.between if reducer is not None]
        self.message_bytes = sum(reducer.message_bytes for reducer in not_empty)
        # Within a node, each coordinate is sent twice, uncompressed: to the owner of its shard, and back.
        inside = 2 * (size - 1) * max(self.numels) * setting.dtype.itemsize
        self.sent_bytes = inside + max(reducer.sent_bytes for reducer in not_empty)

    @staticmethod
    def stages(setting: Setting) -> int:
        between = between_nodes(setting)
        return 2 + between.reducer.stages(between)

    @classmethod
    def scopes(cls, setting: Setting) -> list[tuple[Scope, ...]]:
        size = setting.ranks // between_nodes(setting).ranks
        node = Scope("node", size)
        peers = Scope("peers", size)
        # In the first stage, telemetry exchanges its samples between all ranks.
        return [(ALL, node), *[(peers,)] * (cls.stages(setting) - 2), (node,)]

    @classmethod
    def alike(cls, block_runs: Sequence[BlockRun], setting: Setting) -> Hashable:
        """Returns the sizes of the shards, and the results of `alike` of the reducers between nodes."""
        between = between_nodes(setting)
        parts = divided(block_runs, setting.ranks // between.ranks, setting.block_size)
        numels = [sum(run.numel for run in part) for part in parts]
        each = [between.reducer.alike(part, between) for part in parts if part]
        # Rank 0 pads its shard to the largest shard. Of the other shards, only the longest message matters.
        return (sum(numels), numels[0], max(numels), each[0], frozenset(each))

    @staticmethod
    def mean_error(codec: Codec, ranks: int) -> float:
        return TwoShot.mean_error(codec, ranks)  # an upper limit

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        size = self.node.node_size
        nodes = len(keys.up) // size
        place = rank % size
        node = rank // size
        mine = self.numels[place]
        parts = torch.empty(size, mine, dtype=x.dtype, device=x.device)
        yield (Exchange("all_to_all", parts.view(-1), x, ([mine] * size, self.numels), self.node),)

        shard = mean_of_rows(parts)
        between = self.between[place]
        steps = [] if between is None else [reduced(between, shard, node, replace(keys, up=keys.up[:nodes]), store)]
        # Every place has as many stages, because all ranks have to start collectives in the same order.
        bad = yield from in_scope(side_by_side(*steps, _idle(self.peer_stages)), self.peers)

        # Shards consist of whole blocks, so their lengths differ, but an all-gather needs equal lengths.
        padded = torch.zeros(max(self.numels), dtype=x.dtype, device=x.device)
        padded[:mine] = shard
        everyone = torch.empty(size, len(padded), dtype=x.dtype, device=x.device)
        yield (Exchange("all_gather", everyone, padded, scope=self.node),)
        torch.cat([row[:numel] for row, numel in zip(everyone, self.numels, strict=True)], out=x)
        return bad


def _idle(stages: int) -> Steps:
    """Returns steps without exchanges."""
    for _ in range(stages):
        yield ()
    return 0


def between_nodes(setting: Setting) -> Setting:
    """Returns the setting for the ranks that have the same place on each node."""
    assert setting.between is not None  # `config.setting_of` gives one to every setting of this reducer
    return setting.between


def mean_of_rows(parts: Tensor) -> Tensor:
    """Returns the mean over the rows of [ranks, numel]. For all shapes, rows are added in rank order. The mean of
    finite numbers is finite."""
    share = Share.of(len(parts))
    total = parts[0].to(COMPUTE_DTYPES[parts.dtype]) * share.each
    for part in parts[1:]:
        total.add_(part, alpha=share.each)
    return total.div_(share.rest).to(parts.dtype)
