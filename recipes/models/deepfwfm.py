"""DeepFwFM: a field-weighted factorisation machine beside a deep network; both share their embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class DeepFwFM(nn.Module):
    """The network of DeepLight (Deng et al., arXiv 2002.06987), before pruning.

    The logit is the sum of these terms:

    * a bias;
    * one weight for the value of each field;
    * for each pair of fields, the product of their embeddings, times one weight of the pair;
    * the output of a deep network on all embeddings.

    Args:
        fields: number of fields, F.
        buckets: number of ids of each field, B; both tables have F * B rows.
        dimension: length of an embedding, D.
        hidden: widths of the deep network's hidden layers.
        dropout: probability of dropout after each hidden layer, 0 to 1.
        sparse: whether the gradients of both tables are sparse tensors.

    Raises:
        ValueError: a size is less than 1.
    """

    first_row: Tensor

    def __init__(
        self,
        fields: int,
        buckets: int,
        dimension: int,
        hidden: Sequence[int],
        dropout: float = 0.0,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"fields": fields, "buckets": buckets, "dimension": dimension, "hidden": min(hidden, default=0)}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"model.{name}: {size} must be at least 1")
        self.embeddings = nn.Embedding(fields * buckets, dimension, sparse=sparse)
        self.weights = nn.Embedding(fields * buckets, 1, sparse=sparse)
        self.pairs = nn.Parameter(torch.ones(fields, fields))
        self.deep = nn.Sequential()
        for before, after in zip((fields * dimension, *hidden), hidden, strict=False):
            self.deep += nn.Sequential(nn.Linear(before, after), nn.ReLU(inplace=True), nn.Dropout(dropout))
        self.deep.append(nn.Linear(hidden[-1], 1))  # the bias of this layer is that of the logit
        # Small, because unit embeddings with their F (F - 1) / 2 products would start with logits in the tens.
        nn.init.normal_(self.embeddings.weight, std=0.01)
        nn.init.zeros_(self.weights.weight)
        # Not part of checkpoints: the sizes determine it.
        self.register_buffer("first_row", buckets * torch.arange(fields), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (N,) of ids, int64 (N, F), each 0 to B - 1."""
        rows = ids + self.first_row
        embedded = self.embeddings(rows)
        deep: Tensor = self.deep(embedded.flatten(1))
        return self.weights(rows).sum((1, 2)) + self.interactions(embedded) + deep.squeeze(1)

    def interactions(self, embedded: Tensor) -> Tensor:
        """Sum over pairs f < g of the pair's weight times the product of both embeddings.

        The weight of a pair is the mean of its two entries in `pairs`; the diagonal takes no part.

        Args:
            embedded: embeddings of all fields, (N, F, D).

        Returns:
            The sums, (N,).
        """
        # The strictly upper triangle holds each pair once.
        weights = (0.5 * (self.pairs + self.pairs.T)).triu(1)
        return (embedded * torch.einsum("fg,ngd->nfd", weights, embedded)).sum((1, 2))
