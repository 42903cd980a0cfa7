"""A table of embeddings, its rows that a batch has touched, and the blocks of these rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.kernels.layout import BLOCKS, CODES, COLUMNS, INDEX, LENGTH, PARAMETER, SCALE, START, Part
from lightning_gqsgd.kernels.protocol import Quantiser
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES

#: Records that are written in units larger than bytes begin at multiples of this many bytes.
_WORD = 4


class Table(NamedTuple):
    """A parameter with sparse gradients.

    Attributes:
        number: number of the parameter in the model. The dither depends on it.
        height: number of rows.
        width: coordinates of a row.
        raw: whether its gradient is sent uncompressed.
    """

    number: int
    height: int
    width: int
    raw: bool


class Touched(NamedTuple):
    """The rows of a table that a rank has touched.

    Attributes:
        rows: row numbers, int64 [rows], ascending and unique.
        values: the rows, [rows, width], in the compute dtype.
    """

    rows: Tensor
    values: Tensor


def touched_rows(gradient: Tensor, width: int) -> Touched:
    """Returns the rows of a sparse gradient, [height, ...]; Rows that occur several times are summed in the compute
    dtype."""
    if gradient.sparse_dim() != 1:  # created by a user's hook; embeddings give rows
        gradient = gradient.to_dense().to_sparse(1)
    compute = COMPUTE_DTYPES[gradient.dtype]
    values = gradient._values().detach()
    wide = sparse_rows(gradient._indices()[0], values.to(compute).reshape(len(values), width), gradient.shape[0])
    added = (wide._coalesced_(True) if gradient.is_coalesced() else wide).coalesce()
    return Touched(added.indices()[0], added.values())


def sparse_rows(rows: Tensor, values: Tensor, height: int) -> Tensor:
    """Returns a sparse tensor [height, ...] of rows, which is not marked as coalesced.

    Args:
        rows: row numbers, int64 [rows].
        values: the rows, [rows, ...].
        height: number of rows of the table.
    """
    # Row numbers come from torch, or were checked by `row_numbers.read`.
    size = (height, *values.shape[1:])
    return torch.sparse_coo_tensor(rows[None], values, size, check_invariants=False)


def gradient_of(rows: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """Returns a coalesced sparse gradient of the shape of ``like``.

    Args:
        rows: row numbers, int64 [rows], ascending.
        values: the rows, [rows, width].
        like: the table, or a sparse gradient of it.
    """
    shaped = values.reshape(len(rows), *like.shape[1:])
    return sparse_rows(rows, shaped, like.shape[0])._coalesced_(True)


def record_bytes(table: Table, q: Quantiser, scale_bytes: int, raw_bytes: int) -> int:
    """Returns the bytes of one row in a message."""
    lengths = _lengths(table.width, q.block_size)
    return int(_records(lengths, q, raw_bytes).sum()) + scale_bytes * len(lengths)


def cut_rows(table: Table, rows: Tensor, block_size: int) -> np.ndarray:
    """Returns the block table of rows, [blocks, COLUMNS]; positions in messages are not set yet.

    Each row is cut into its own blocks. Blocks are numbered over all rows of the table, so a block's dither depends on
    the row's number, and neither on the bucket nor on the other touched rows.

    Args:
        table: the table.
        rows: row numbers, int64 [rows].
        block_size: the largest number of coordinates of a block.
    """
    lengths = _lengths(table.width, block_size)
    each = len(lengths)
    within = np.arange(each, dtype=np.int64)
    made = np.zeros((len(rows), each, COLUMNS), dtype=np.int64)
    made[:, :, START] = np.arange(len(rows), dtype=np.int64)[:, None] * table.width + within * block_size
    made[:, :, LENGTH] = lengths
    made[:, :, PARAMETER] = table.number
    made[:, :, INDEX] = rows.numpy()[:, None] * each + within
    made[:, :, SCALE] = -1
    made[:, :, BLOCKS] = table.height * each
    return made.reshape(len(rows) * each, COLUMNS)


def place_rows(table: Table, rows: Tensor, q: Quantiser, scale_bytes: int, raw_bytes: int) -> Part:
    """Returns the blocks of rows with their places in a message: the scales of all rows first, and then the codes.

    Records are not aligned as in dense messages, because a row of few coordinates would be mostly padding.

    Args:
        table: the table.
        rows: row numbers, int64 [rows].
        q: the quantiser.
        scale_bytes: bytes of a block's scale in the message, 0 if no scales are sent.
        raw_bytes: bytes of an uncompressed coordinate.
    """
    made = cut_rows(table, rows, q.block_size)
    records = _records(made[:, LENGTH], q, raw_bytes)
    if scale_bytes:
        made[:, SCALE] = np.arange(len(made)) * scale_bytes
    made[:, CODES] = len(made) * scale_bytes + np.cumsum(records) - records
    return Part(torch.from_numpy(made), q.block_size)


def _lengths(width: int, block_size: int) -> np.ndarray:
    """Returns the lengths of the blocks of a row, int64."""
    return np.minimum(block_size, width - np.arange(0, width, block_size, dtype=np.int64))


def _records(lengths: np.ndarray, q: Quantiser, raw_bytes: int) -> np.ndarray:
    """Returns the bytes of the codes of blocks of these lengths."""
    records = q.record_bytes(lengths, raw_bytes)
    return -(-records // _WORD) * _WORD if q.is_whole else records
