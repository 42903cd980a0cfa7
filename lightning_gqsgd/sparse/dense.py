"""Reduces a table as a dense gradient if ranks touch more rows than `GQSGDConfig.sparse_limit` allows in a step.

The whole table is reduced like the gradient of an embedding without ``sparse=True``, with the same bits. Ranks also
gather a bit for each row, so that all ranks know which rows were touched. The mean has only these rows, because a dense
reduction adds noise to other rows that share a block with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gqsgd.reducers import Steps
from lightning_gqsgd.reducers.base import side_by_side
from lightning_gqsgd.sparse.gathering import Mean, gathered_unions
from lightning_gqsgd.sparse.tables import Table, Touched
from lightning_gqsgd.wire.telemetry import BucketCounters


def dense_gradient(table: Table, touched: Touched, dtype: torch.dtype) -> Tensor:
    """Returns a flat tensor of the whole table, [height * width], that has the touched rows."""
    x = torch.zeros(table.height, table.width, dtype=dtype)
    x[touched.rows] = touched.values.to(dtype)
    return x.view(-1)


def dense_mean(
    table: Table, touched: Touched, x: Tensor, pieces: Sequence[Steps], ranks: int, counters: BucketCounters
) -> Mean:
    """Run stage 2 and the later stages of a dense exchange, which end with the mean of all ranks' rows.

    Args:
        table: the table.
        touched: the rows that this rank has touched.
        x: the result of `dense_gradient`, which is overwritten.
        pieces: the steps of a plan that replace ``x`` by its mean.
        ranks: number of ranks.
        counters: counters of the bucket.
    """
    unions: list[Tensor] = []

    def gathered() -> Steps:
        unions.extend((yield from gathered_unions(table, [touched.rows], ranks, counters)))
        return 0

    yield from side_by_side(gathered(), *pieces)
    (union,) = unions
    return Touched(union, x.view(table.height, table.width)[union])
