"""Reduce-scatter and all-gather of shards: the two exchanges of `two_shot`, each by itself.

The caller determines which rank owns which shard, so these reducers are not available in a configuration. A rank sends
(n-1)/n times the bits per coordinate in each of them. Scales are local and part of the messages. The reduce-scatter has
a form with two levels, for nodes of several ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.kernels.layout import LENGTH, START, place
from lightning_gqsgd.reducers.base import Exchange, Scope, Setting, StepKeys, Steps, in_scope, reduced
from lightning_gqsgd.reducers.hierarchical import between_nodes, mean_of_rows
from lightning_gqsgd.reducers.link import Link
from lightning_gqsgd.reducers.memory import DOWN, UP, Direction, MemoryStore


class _Shards:
    """The shards of a piece, which have the same `reducers.base.HasSteps` as a reducer.

    Args:
        table: the shards in rank order, which are runs of blocks with equal lengths.
        setting: the setting; its reducer is ignored.
        direction: that of the codes.
    """

    compresses: ClassVar[bool] = True

    def __init__(self, table: np.ndarray, setting: Setting, direction: Direction) -> None:
        self.ranks = setting.ranks
        self.link = Link(setting, direction)
        self.needs_copy = self.link.needs_copy
        self.layout = place(table, self.link.quantiser, shards=self.ranks, **setting.record_sizes)
        self.message_bytes = self.layout.message_bytes
        # A rank keeps its own shard.
        self.sent_bytes = self.message_bytes - self.layout.shard_bytes


class ReduceScatter(_Shards):
    """Averages each shard on its owner: every rank sends codes to the owners, which average them in rank order.

    The error is ω (n-1)/n², from the roundings of the other ranks, because an owner has its own gradient exactly.
    """

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        super().__init__(table, setting, UP)

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        """Replace this rank's shard by its mean over ranks; see `reducers.base.Reducer.steps`."""
        layout = self.layout.on(x.device)
        sent = torch.empty(layout.message_bytes, dtype=torch.uint8, device=x.device)
        received = torch.empty_like(sent)
        part = self.link.part_for_owners(layout, rank).at(keys.origin)
        self.link.outgoing(x, part, keys.rotation, store).encode(sent, keys.up[rank])
        yield (Exchange("all_to_all", received, sent),)

        messages = received.view(self.ranks, -1)
        owned = layout.shard(rank).at(keys.origin)
        return self.link.decode(messages, owned, x, keys.up, keys.rotation, store, own=rank)


class HierarchicalReduceScatter:
    """Averages each shard on its owner: uncompressed inside each node, and with codes between nodes.

    The ranks at the same place on each node, the peers, own a shard each. First, the ranks of a node send the shards of
    all peers to the one of them that is their peer, which averages them in rank order. Then the peers reduce-scatter
    the means of their nodes. So the links between nodes carry each coordinate once per node, and not once per rank.

    The error is ω (N-1)/N² for N nodes, because an owner has the mean of its own node exactly.

    Args:
        table: the shards in rank order, which are runs of blocks with equal lengths at equal distances.
        setting: the setting, with one for the ranks between nodes. The reducers of both are ignored.
    """

    compresses: ClassVar[bool] = True
    needs_copy = False

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        between = between_nodes(setting)
        size = setting.ranks // between.ranks
        self.ranks = setting.ranks
        self.node = Scope("node", size)
        self.peers = Scope("peers", size)
        rows = table.reshape(setting.ranks, -1, table.shape[1])
        self.distance = int(rows[1, 0, START] - rows[0, 0, START])
        self.share = int(rows[0, :, LENGTH].sum())
        self.between = [
            ReduceScatter(_shards_of_peers(rows[place::size], self.share), between) for place in range(size)
        ]
        self.message_bytes = self.between[0].message_bytes
        inside = (size - 1) * between.ranks * self.share * setting.dtype.itemsize
        self.sent_bytes = inside + self.between[0].sent_bytes

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        """Replace this rank's shard by its mean over ranks; see `reducers.base.Reducer.steps`. The contents of the
        other shards are undefined afterwards."""
        size = self.node.node_size
        nodes = self.ranks // size
        place = rank % size
        node = rank // size
        shards = x.as_strided((self.ranks, self.share), (self.distance, 1))
        for_peers = shards.view(nodes, size, -1).transpose(0, 1).reshape(-1)
        parts = torch.empty_like(for_peers)
        yield (Exchange("all_to_all", parts, for_peers, scope=self.node),)

        means = mean_of_rows(parts.view(size, -1))
        steps = reduced(self.between[place], means, node, replace(keys, up=keys.up[:nodes]), store)
        bad = yield from in_scope(steps, self.peers)
        shards[rank] = means.view(nodes, -1)[node]
        return bad


def _shards_of_peers(rows: np.ndarray, share: int) -> np.ndarray:
    """Returns the table of the peers' shards, which counts from the start of the first one.

    Args:
        rows: a row of blocks for each peer, in a table that counts from the start of another tensor.
        share: number of coordinates of a shard.
    """
    moved = rows.copy()
    for peer, row in enumerate(moved):
        row[:, START] += peer * share - row[0, START]
    return moved.reshape(-1, rows.shape[2])


class AllGather(_Shards):
    """Gathers all shards: every owner sends the codes of its shard to all ranks. The error is ω.

    The owner decodes its own shard from the codes, too, so that all ranks have the same bits.
    """

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        super().__init__(table, setting, DOWN)

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        """Replace all shards by their decoded values. Only this rank's shard of ``x`` is read; see
        `reducers.base.Reducer.steps`."""
        layout = self.layout.on(x.device)
        shard = torch.empty(layout.shard_bytes, dtype=torch.uint8, device=x.device)
        everyone = torch.empty(layout.message_bytes, dtype=torch.uint8, device=x.device)
        own = layout.shard(rank).at(keys.origin)
        self.link.outgoing(x, own, keys.rotation, store).encode(shard, keys.down)
        yield (Exchange("all_gather", everyone, shard),)

        whole = layout.whole.at(keys.origin)
        return self.link.decode(everyone.view(1, -1), whole, x, (keys.down,), keys.rotation, store)
