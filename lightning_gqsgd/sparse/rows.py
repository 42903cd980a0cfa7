"""The format of rows in a message: uncompressed, as bf16 numbers, or as codes of the configuration's codec."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lightning_gqsgd.codecs.floats.codec import largest
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import setting_of
from lightning_gqsgd.kernels import kernels_for
from lightning_gqsgd.kernels.layout import Part
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, in_finite_range
from lightning_gqsgd.reducers import Setting, StepKeys, new_store
from lightning_gqsgd.reducers.link import Link
from lightning_gqsgd.reducers.memory import UP
from lightning_gqsgd.sparse.logarithmic import LogarithmicRows
from lightning_gqsgd.sparse.tables import Table, Touched, cut_rows, place_rows, record_bytes


class Rows(Protocol):
    """The format in which the rows of one table are written in one step."""

    def nbytes(self, count: int) -> int:
        """Returns the bytes of so many rows."""
        ...

    def write(self, touched: Touched, message: Tensor, rank: int) -> None:
        """Write a rank's rows.

        Args:
            touched: the rows; their values may be changed.
            message: uint8 [nbytes].
            rank: the rank. The dither depends on it.
        """
        ...

    def read(self, message: Tensor, rows: Tensor, rank: int) -> Tensor:
        """Returns the rows that a rank has written, [rows, width], in the compute dtype; ``rows`` are their numbers."""
        ...


class RowsAsTheyAre:
    """Rows in the compute dtype.

    Args:
        table: the table.
        dtype: the compute dtype.
    """

    def __init__(self, table: Table, dtype: torch.dtype) -> None:
        self._width = table.width
        self._dtype = dtype

    def nbytes(self, count: int) -> int:
        return count * self._width * self._dtype.itemsize

    def write(self, touched: Touched, message: Tensor, rank: int) -> None:
        message.copy_(touched.values.contiguous().view(torch.uint8).view(-1))

    def read(self, message: Tensor, rows: Tensor, rank: int) -> Tensor:
        return message.view(self._dtype).view(len(rows), self._width)


class RowsOfBf16:
    """Rows as bf16 numbers, rounded at random (see `codecs.floats`).

    Args:
        table: the table.
        setting: dtype and size of blocks.
        keys: the keys of the step.
    """

    def __init__(self, table: Table, setting: Setting, keys: StepKeys) -> None:
        self._table = table
        self._keys = keys
        self._dtype = COMPUTE_DTYPES[setting.dtype]
        self._block_size = setting.block_size
        self._limit = largest(1)  # rows are added in the compute dtype, so no sum in bf16 can overflow

    def nbytes(self, count: int) -> int:
        return count * self._table.width * torch.bfloat16.itemsize

    def write(self, touched: Touched, message: Tensor, rank: int) -> None:
        # The kernels round only fp32 numbers. fp64 numbers that are too large for fp32 are clamped, to stay finite.
        wide = in_finite_range(touched.values, torch.float32).float().view(-1)
        small = torch.empty(len(wide), dtype=torch.bfloat16)
        blocks = torch.from_numpy(cut_rows(self._table, touched.rows, self._block_size))
        kernels_for(wide.device).narrow(wide, blocks, small, self._keys.up[rank], self._block_size, 1.0, self._limit)
        message.copy_(small.view(torch.uint8))

    def read(self, message: Tensor, rows: Tensor, rank: int) -> Tensor:
        return message.view(torch.bfloat16).to(self._dtype).view(len(rows), self._table.width)


class CodedRows:
    """Rows as codes of the configuration's codec. Each row has its own scale.

    Args:
        table: the table.
        setting: codec, scales, number of ranks and dtype.
        keys: the keys of the step.
    """

    def __init__(self, table: Table, setting: Setting, keys: StepKeys) -> None:
        self._table = table
        self._keys = keys
        self._dtype = COMPUTE_DTYPES[setting.dtype]
        self._scale_bytes = setting.scale_bytes
        self._raw_bytes = setting.raw_bytes
        self._link = Link(setting, UP)
        self._store = new_store(setting, {}, torch.device("cpu"))

    def nbytes(self, count: int) -> int:
        return count * record_bytes(self._table, self._link.quantiser, self._scale_bytes, self._raw_bytes)

    def write(self, touched: Touched, message: Tensor, rank: int) -> None:
        x = touched.values.contiguous().view(-1)
        outgoing = self._link.outgoing(x, self._part(touched.rows), self._keys.rotation, self._store)
        outgoing.encode(message, self._keys.up[rank])

    def read(self, message: Tensor, rows: Tensor, rank: int) -> Tensor:
        out = torch.zeros(len(rows) * self._table.width, dtype=self._dtype)
        keys = (self._keys.up[rank],)
        self._link.decode(message.view(1, -1), self._part(rows), out, keys, self._keys.rotation, self._store)
        return out.view(len(rows), self._table.width)

    def _part(self, rows: Tensor) -> Part:
        return place_rows(self._table, rows, self._link.quantiser, self._scale_bytes, self._raw_bytes)


def rows_for(table: Table, config: GQSGDConfig, dtype: torch.dtype, keys: StepKeys, *, compressed: bool) -> Rows:
    """Returns the format in which a table's rows are written.

    Args:
        table: the table.
        config: the configuration with the chosen reducer.
        dtype: dtype of the gradients.
        keys: the keys of the step.
        compressed: False if everything is sent uncompressed in this step.
    """
    if not compressed or (table.raw and config.num_bits != 16) or config.reducer == "native":
        return RowsAsTheyAre(table, COMPUTE_DTYPES[dtype])
    if config.sparse == "logarithmic":
        return LogarithmicRows(table, config.num_bits, COMPUTE_DTYPES[dtype], config.mantissa)
    setting = setting_of(config, len(keys.up), dtype)
    return RowsOfBf16(table, setting, keys) if config.codec == "float" else CodedRows(table, setting, keys)
