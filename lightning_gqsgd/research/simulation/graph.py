"""Gossip: ranks exchange models only with their neighbours in a graph, and average them with Metropolis weights.

No rank ever has the mean of all ranks, so the bits differ between ranks. Training with a communication hook does not
allow that, so gossip exists only in simulations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_gqsgd.errors import ConfigError, check_whole


@dataclass(frozen=True)
class Graph:
    """An undirected, connected graph of ranks.

    Args:
        ranks: number of ranks, at least 1.
        edges: pairs of different ranks; the order of a pair and repetitions do not matter.

    Raises:
        ConfigError: if an edge is not between two different ranks of the graph, or if the graph is not connected.
    """

    ranks: int
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        check_whole(ranks=self.ranks)
        for edge in self.edges:
            if len(edge) != 2 or edge[0] == edge[1] or not all(0 <= rank < self.ranks for rank in edge):
                raise ConfigError(f"edge {edge!r} is not between two different ranks of 0 to {self.ranks - 1}")
        object.__setattr__(self, "edges", tuple(sorted({(min(edge), max(edge)) for edge in self.edges})))
        apart = sorted(set(range(self.ranks)) - self._reached())
        if apart:
            raise ConfigError(f"ranks {apart} have no way to rank 0; add edges until the graph is connected")

    @classmethod
    def ring(cls, ranks: int) -> Graph:
        """Returns a graph in which each rank has the next one and the previous one as neighbours."""
        return cls(ranks, _different((rank, (rank + 1) % ranks) for rank in range(ranks)))

    @classmethod
    def torus(cls, rows: int, columns: int) -> Graph:
        """Returns a graph in which each rank has its neighbours in a ring of its row and in one of its column."""
        places = [(row, column) for row in range(rows) for column in range(columns)]
        right = [(row * columns + column, row * columns + (column + 1) % columns) for row, column in places]
        below = [(row * columns + column, (row + 1) % rows * columns + column) for row, column in places]
        return cls(rows * columns, _different([*right, *below]))

    @classmethod
    def exponential(cls, ranks: int) -> Graph:
        """Returns a graph in which each rank has the ranks 1, 2, 4, ... places before and after it as neighbours."""
        hops = [1 << power for power in range(max(1, ranks - 1).bit_length()) if 1 << power < ranks]
        return cls(ranks, _different((rank, (rank + hop) % ranks) for rank in range(ranks) for hop in hops))

    @property
    def degrees(self) -> list[int]:
        """The number of neighbours of each rank."""
        return [sum(rank in edge for edge in self.edges) for rank in range(self.ranks)]

    @cached_property
    def weights(self) -> Tensor:
        """Metropolis weights W, fp64 [ranks, ranks]: 1 / (1 + the larger degree) for neighbours, the rest for oneself.

        W is symmetric, its rows sum to 1 and no weight is negative, so that gossip keeps the mean and converges to it
        (Xiao, Boyd, Kim, J. Parallel Distrib. Comput. 67, 2007).
        """
        weights = torch.zeros(self.ranks, self.ranks, dtype=torch.float64)
        degrees = self.degrees
        for a, b in self.edges:
            weights[a, b] = weights[b, a] = 1 / (1 + max(degrees[a], degrees[b]))
        return weights + torch.diag(1 - weights.sum(1))

    @cached_property
    def contraction(self) -> float:
        """The largest factor by which a round shrinks the differences between ranks: the second largest magnitude of
        W's eigenvalues, 0 to 1. The smaller it is, the faster all ranks agree."""
        if self.ranks == 1:
            return 0.0
        return float(torch.linalg.eigvalsh(self.weights).abs().sort().values[-2])

    def mix(self, models: Tensor, rounds: int = 1) -> Tensor:
        """Returns the models after some rounds of gossip, [ranks, d]: W to the power of ``rounds``, times the models.

        Args:
            models: floating-point tensor [ranks, d], which is not changed.
            rounds: number of rounds, at least 0.

        Raises:
            ConfigError: if the number of models differs from the number of ranks.
        """
        if models.ndim != 2 or len(models) != self.ranks:
            raise ConfigError(f"models of shape {tuple(models.shape)} are not one row for each of {self.ranks} ranks")
        weights = self.weights.to(models)
        for _ in range(rounds):
            models = weights @ models
        return models

    def sent_bytes(self, numel: int, itemsize: int = 4) -> int:
        """Returns the bytes that the busiest rank sends in a round: its whole model to each neighbour."""
        return max(self.degrees, default=0) * numel * itemsize

    def _reached(self) -> set[int]:
        """Returns the ranks that are connected to rank 0."""
        reached = {0}
        before = 0
        while len(reached) > before:
            before = len(reached)
            reached |= {rank for edge in self.edges if reached & set(edge) for rank in edge}
        return reached


def _different(edges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns the edges that do not lead from a rank to itself."""
    return tuple(edge for edge in edges if edge[0] != edge[1])
