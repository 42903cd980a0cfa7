"""Rows as signs and powers of a base, the logarithmic codec of FastSGD (Yang et al. 2021, arXiv 2112.04291).

With the power of two M above the largest magnitude of a message, and the base b, a coordinate v is

    q = round(log_b(M / |v|)),   decoded sign(v) M b^-q,   or 0 where q > q_max

The base is 2^(1/2^m) with the m of the field ``mantissa``: 2, √2, 2^¼ or 2^⅛. A kept coordinate is off by a factor of
at most √b, so the codec is biased: with kept coordinates K and dropped ones D, |error|² <= (√b - 1)² |K|² + |D|².
FastSGD divides by the largest magnitude itself. With a power of two, a decoded number does not depend on the other rows
of a message, unless it is dropped.

A code has a sign and b - 1 bits of q, so q_max = 2^(b-1) - 2. The largest field stands for zero, and with a negative
sign for NaN. If a number of a row is not finite, the whole row becomes NaN.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.sparse.tables import Table, Touched

#: Bytes of the exponent of M.
_HEAD = 2


class LogarithmicRows:
    """Rows as signs and powers of a base; see `rows.Rows`. A message begins with the exponent of M.

    Args:
        table: the table.
        bits: bits of a code, 2 to 8.
        dtype: the compute dtype.
        mantissa: m of the base, 0 to 3.
    """

    def __init__(self, table: Table, bits: int, dtype: torch.dtype, mantissa: int = 0) -> None:
        self._width = table.width
        self._bits = bits
        self._dtype = dtype
        self._none = (1 << (bits - 1)) - 1
        steps = 1 << mantissa
        #: The powers of the base in (1/2, 1], descending, and the logarithmic midpoints between them and 1/2,
        #: ascending.
        self._sizes = np.array([2 ** -(step / steps) for step in range(steps)])
        self._middles = np.array([2 ** -((step + 0.5) / steps) for step in reversed(range(steps))])

    def nbytes(self, count: int) -> int:
        return _HEAD + -(-count * self._width * self._bits // 8) if count else 0

    def write(self, touched: Touched, message: Tensor, rank: int) -> None:
        values = touched.values.double().numpy()
        if not len(values):
            return
        finite = np.isfinite(values).all(axis=1, keepdims=True)
        values = np.where(finite, values, 0.0)
        mantissa, exponent = np.frexp(np.abs(values))
        top = int(exponent[mantissa > 0].max(initial=-(2**14)))
        steps = len(self._sizes)
        powers = (top - exponent) * steps + steps - np.searchsorted(self._middles, mantissa, side="right")
        kept = (mantissa > 0) & (powers < self._none)
        sign = np.where(finite, np.signbit(values) & kept, True)
        codes = np.where(kept, powers, self._none) | sign.astype(np.int64) << (self._bits - 1)
        bits = codes.reshape(-1, 1) >> np.arange(self._bits - 1, -1, -1) & 1
        head = np.array([top], dtype="<i2").view(np.uint8)
        message.copy_(torch.from_numpy(np.concatenate([head, np.packbits(bits.astype(np.uint8))])))

    def read(self, message: Tensor, rows: Tensor, rank: int) -> Tensor:
        if not len(rows):
            return torch.zeros(0, self._width, dtype=self._dtype)
        received = message.numpy()
        top = int(received[:_HEAD].copy().view("<i2")[0])
        bits = np.unpackbits(received[_HEAD:])[: len(rows) * self._width * self._bits].reshape(-1, self._bits)
        codes = np.zeros(len(bits), dtype=np.int64)
        for digit in range(self._bits):
            codes = codes << 1 | bits[:, digit]
        powers = codes & self._none
        negative = codes > self._none
        halvings, rest = np.divmod(powers, len(self._sizes))
        with np.errstate(over="ignore"):  # the largest fp64 numbers are rounded up to 2^1024
            magnitudes = np.ldexp(self._sizes[rest], top - halvings)
        values = np.where(powers < self._none, magnitudes, np.where(negative, np.nan, 0.0))
        decoded = torch.from_numpy(np.where(negative, -values, values))
        limit = torch.finfo(self._dtype).max
        return decoded.clamp(-limit, limit).to(self._dtype).view(len(rows), self._width)
