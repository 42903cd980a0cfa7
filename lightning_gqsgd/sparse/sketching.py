"""Sums of sketches: the S2 Reducer (Ge et al. 2022, arXiv 2110.02140), with rows instead of coordinates.

An all-reduce adds up messages of equal length, for any number of ranks. Ranks first gather a bit for each row of the
table, so that all ranks know the union U of the touched rows, |U| = m. Each rank then adds its rows g_j into a count
sketch of 4 parts of c cells each, with hashes h_a and signs s_a that all ranks share and that change in every step:

    S[a, h_a(j)] += s_a(j) g_j / 2^p,   and S is summed over ranks, in the compute dtype

2^p is the smallest power of two that is at least n m. A cell is a sum of at most n m numbers, so it does not overflow.
The rows that are read are divided by n / 2^p.

A cell with only one row of U holds this row, up to its sign. So such a row is read, and subtracted from its other
cells. These may then have only one row left, and so on (peeling, as in invertible Bloom filters: Goodrich and
Mitzenmacher 2011, arXiv 1101.2245). With 1.3 m cells or more, this reads nearly all of U as m grows; there are 4 c =
1.6 m + 64. The remaining rows are mostly pairs of rows with the same 4 cells. There are about m²/(2 c⁴) such pairs, at
most 8e-4 for any m. Remaining rows are estimated by the mean of s_a(j) S[a, h_a(j)], which is unbiased over signs.

Rows that are read differ from their mean only by the rounding of sums. If a row is not finite on one rank, it becomes
NaN on all. In steps with such rows, ranks also gather a bit for each of them, and leave them out of sketches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.kernels.dither import words
from lightning_gqsgd.kernels.wire import Key, Share
from lightning_gqsgd.reducers import Exchange
from lightning_gqsgd.reducers.base import ring_bytes
from lightning_gqsgd.sparse.gathering import Mean, gathered_unions
from lightning_gqsgd.sparse.tables import Table, Touched, cut_rows
from lightning_gqsgd.wire.telemetry import BucketCounters

#: Parts of a sketch, one for each hash of a row.
PARTS = 4
#: Cells of one part: cells per row, and additional cells.
_PER_ROW = 0.4
_BESIDE = 16


class Places(NamedTuple):
    """The places of rows in a sketch.

    Attributes:
        cells: number of the cell of each row in each part, counted over all parts, int64 [rows, PARTS].
        signs: 1 or -1, [rows, PARTS].
        total: cells of the sketch.
    """

    cells: Tensor
    signs: Tensor
    total: int


def places_of(table: Table, rows: Tensor, union: int, key: Key, dtype: torch.dtype) -> Places:
    """Returns the places of rows in a sketch.

    Args:
        table: the table.
        rows: row numbers, int64 [rows].
        union: number of rows that at least one rank has touched.
        key: key of the hashes.
        dtype: dtype of the signs.
    """
    blocks = torch.from_numpy(cut_rows(Table(table.number, table.height, 1, table.raw), rows, 1))
    random = words(blocks, key, torch.arange(2 * PARTS))
    columns = int(np.ceil(_PER_ROW * union)) + _BESIDE
    cells = (random[:, :PARTS] * columns >> 32) + torch.arange(PARTS) * columns
    return Places(cells, ((random[:, PARTS:] & 1) * 2 - 1).to(dtype), PARTS * columns)


def sketch_of(values: Tensor, places: Places) -> Tensor:
    """Returns the sketch of rows, [cells, width]; ``values`` are the rows, [rows, width]."""
    sketch = torch.zeros(places.total, values.shape[1], dtype=values.dtype)
    for part in range(PARTS):
        sketch.index_add_(0, places.cells[:, part], values * places.signs[:, part, None])
    return sketch


def rows_of(sketch: Tensor, places: Places) -> tuple[Tensor, Tensor]:
    """Returns the rows in a sketch, [rows, width], and whether each was read rather than estimated, bool [rows].

    Args:
        sketch: see `sketch_of`; changed in place.
        places: the places of all rows in the sketch.
    """
    values = torch.zeros(len(places.cells), sketch.shape[1], dtype=sketch.dtype)
    left = torch.ones(len(values), dtype=torch.bool)
    while left.any():
        load = torch.bincount(places.cells[left].flatten(), minlength=places.total)
        alone = (load[places.cells] == 1) & left[:, None]
        found = alone.any(dim=1).nonzero()[:, 0]
        if not len(found):
            break
        part = alone[found].int().argmax(dim=1)
        values[found] = sketch[places.cells[found, part]] * places.signs[found, part, None]
        for other in range(PARTS):
            sketch.index_add_(0, places.cells[found, other], -values[found] * places.signs[found, other, None])
        left[found] = False
    if left.any():
        estimates = sketch[places.cells[left]] * (places.signs[left] / PARTS)[:, :, None]
        values[left] = estimates.sum(dim=1)  # the mean of the parts, which cannot overflow
    return values, ~left


def sketched_mean(table: Table, touched: Touched, bad: int, key: Key, ranks: int, counters: BucketCounters) -> Mean:
    """Run stage 2 and the later stages of a sketch, which end with the mean of all ranks' rows.

    Args:
        table: the table.
        touched: the rows that this rank has touched.
        bad: number of non-finite rows, summed over ranks.
        key: key of the hashes, the same on all ranks.
        ranks: number of ranks.
        counters: counters of the bucket.
    """
    finite = touched.values.isfinite().all(dim=1)
    marks = [touched.rows, touched.rows[~finite]] if bad else [touched.rows]
    unions = yield from gathered_unions(table, marks, ranks, counters)
    union = unions[0]
    is_bad = torch.isin(union, unions[1]) if bad else torch.zeros(len(union), dtype=torch.bool)
    each = Share.of(ranks * len(union)).each
    rest = ranks * each
    mine = places_of(table, touched.rows[finite], len(union), key, touched.values.dtype)
    sketch = sketch_of(touched.values[finite] * each, mine)
    counters.add_sent(ring_bytes(sketch.nbytes, ranks), sketch.nbytes)
    yield (Exchange.in_place("sum", sketch),)
    values, _ = rows_of(sketch, places_of(table, union, len(union), key, touched.values.dtype))
    # A row that was read may be larger than its mean by the rounding of sums.
    limit = torch.finfo(values.dtype).max * rest
    values = values.clamp(-limit, limit)
    values[is_bad] = torch.nan
    return Touched(union, values / rest)
