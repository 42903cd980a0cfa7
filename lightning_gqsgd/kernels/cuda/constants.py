"""The constants of a compiled kernel: a number format, the shape of tiles, and what a codec fixes.

Every value of `Constants` has kernels of its own. Functions in Triton take it as ``c``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from lightning_gqsgd.kernels.protocol import Quantiser
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, Share, scale_format

#: Coordinates of a tile, where blocks are not larger.
_TILE = 4096

#: Coordinates of a thread.
SHARE = 16
#: The same where messages are decoded in fp32: what is done once for a block is then done by half as many threads.
#: Encoding, or tiles whose coordinates are not aligned, would take more than 64 registers.
LARGE_SHARE = 32


class Number(NamedTuple):
    """The type in which coordinates are computed, and how a scale of that type travels.

    Attributes:
        compute: the type, fp32 or fp64.
        integer: the signed integer that is as wide.
        mask: all bits but the sign's.
        mantissa: bits of the mantissa.
        one: the bits of 1.
        root: the bits of 2^(-1/2).
        largest: the largest finite number.
        up: 1 + 2 ulp, see `codecs.linear`.
        sent: the integer that a scale travels as.
        shift, infinity, tiny: see `wire.ScaleFormat`.
    """

    compute: tl.dtype
    integer: tl.dtype
    mask: int
    mantissa: int
    one: int
    root: int
    largest: float
    up: float
    sent: tl.dtype
    shift: int
    infinity: int
    tiny: int


class Shape(NamedTuple):
    """The shape of a tile, see `tiles`.

    Attributes:
        rows: blocks of a tile, a power of two.
        half: coordinates of one half of a row, a power of two.
        stages: log2 of ``half``.
        block: coordinates of a block of full length.
        may_be_full: whether blocks of full length fill their rows, and are handled apart.
    """

    rows: int
    half: int
    stages: int
    block: int
    may_be_full: bool


class Codes(NamedTuple):
    """The layout of codes in a record, see `kernels.packing`.

    Attributes:
        bits: bits of a code.
        in_words: whether codes lie in lanes of 64-bit words; otherwise they lie in bit planes.
        padded: whether a record has the codes of `rotation.padded` coordinates, and not of the block's own number.
    """

    bits: int
    in_words: bool
    padded: bool


class Mean(NamedTuple):
    """How messages become the coordinates of their mean.

    Attributes:
        ranks: number of messages, or of ranks whose codes were added up in one message.
        each: factor of every message, see `wire.Share`.
        rest: the divisor of the sum, see `wire.Share`.
        limit: coordinates of a message are clamped to this magnitude, so that the sum of all messages stays finite.
        is_clamped: whether the mean is clamped once more, to the finite numbers of the gradient's dtype.
        has_own: whether one source's coordinates are given, so that its message is not decoded.
    """

    ranks: int
    each: float
    rest: float
    limit: float
    is_clamped: bool
    has_own: bool


class Constants(NamedTuple):
    """All constants of a compiled kernel; what the kernel does not need is None.

    Attributes:
        number: the number format.
        shape: the shape of tiles.
        codes: how codes lie in a record.
        family: the numbers of a family of codes, a named tuple of that family's file.
        mean: how messages are averaged.
        rotated: whether blocks are turned before they are encoded, or after they are decoded.
        share: coordinates of a thread of an aligned tile; of other tiles, threads have `SHARE`.
    """

    number: Number
    shape: Shape
    codes: Codes | None = None
    family: Any = None
    mean: Mean | None = None
    rotated: bool = False
    share: int = SHARE


@lru_cache(maxsize=16)
def number_of(dtype: torch.dtype) -> Number:
    """Returns the number format for gradients of a dtype."""
    form = scale_format(dtype)
    compute = COMPUTE_DTYPES[dtype]
    double = compute == torch.float64
    real, integer = (np.float64, np.int64) if double else (np.float32, np.int32)
    one, root = (int(real(value).view(integer)) for value in (1.0, 2**-0.5))
    return Number(
        compute=tl.float64 if double else tl.float32,
        integer=tl.int64 if double else tl.int32,
        mask=int(np.iinfo(integer).max),
        mantissa=form.mantissa,
        one=one,
        root=root,
        largest=torch.finfo(compute).max,
        up=1 + 2 * torch.finfo(compute).eps,
        sent=tl.uint32 if double else tl.uint16,
        shift=form.shift,
        infinity=form.infinity,
        tiny=form.tiny,
    )


def shape_of(block_size: int, codes: Codes | None = None) -> Shape:
    """Returns the shape of tiles for blocks of at most ``block_size`` coordinates."""
    half = triton.next_power_of_2(-(-block_size // 2))
    return Shape(
        rows=max(1, _TILE // (2 * half)),
        half=half,
        stages=half.bit_length() - 1,
        block=block_size,
        may_be_full=block_size == 2 * half and not (codes and codes.in_words),
    )


def share_of(number: Number, codes: Codes, mean: Mean | None, *, rotated: bool) -> int:
    """Returns how many coordinates a thread of an aligned tile has."""
    is_by_itself = not (codes.padded or codes.in_words or rotated)  # each coordinate's code
    return LARGE_SHARE if mean is not None and is_by_itself and number.compute == tl.float32 else SHARE


@lru_cache(maxsize=256)
def constants_of(dtype: torch.dtype, block_size: int, family: Any = None) -> Constants:
    """Returns the constants of kernels that write no codes, for gradients of a dtype and blocks of at most
    ``block_size`` coordinates."""
    return Constants(number_of(dtype), shape_of(block_size), family=family)


def codes_of(q: Quantiser) -> Codes:
    """Returns the place of a quantiser's codes in a record."""
    return Codes(q.bits, in_words=q.summable and 8 % q.bits != 0, padded=q.kind.is_padded)


@lru_cache(maxsize=256)
def mean_of(
    ranks: int,
    dtype: torch.dtype,
    *,
    encoded: bool = False,
    rotated: bool = False,
    summed: bool = False,
    has_own: bool = False,
) -> Mean:
    """How the messages of so many ranks are averaged.

    Where one message is decoded straight into a gradient of 16 bits, the clamp of that message's coordinates keeps them
    finite there, and the mean needs no other.

    Args:
        ranks: number of messages, or of ranks whose codes were added up in one message.
        dtype: dtype of the gradients.
        encoded: whether the mean is encoded again, and not written to a gradient.
        rotated: whether the mean is turned back.
        summed: whether there is one message, with the sums of all ranks' codes.
        has_own: whether one source's coordinates are given, so that its message is not decoded.
    """
    compute = COMPUTE_DTYPES[dtype]
    share = Share.of(ranks)
    straight = not encoded and not rotated and (summed or ranks == 1)
    return Mean(
        ranks=ranks,
        each=share.each,
        rest=share.rest,
        limit=torch.finfo(dtype if straight else compute).max * (1.0 if summed else share.each),
        is_clamped=dtype != compute and not encoded and not straight,
        has_own=has_own,
    )
