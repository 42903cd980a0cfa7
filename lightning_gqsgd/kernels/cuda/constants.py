"""`Constants`: the constants of a compiled kernel, such as the number format, the shape of tiles and a codec's numbers.

Kernels are compiled for each value of `Constants`. Functions in Triton take it as ``c``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from lightning_gqsgd.kernels.protocol import Quantiser
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, Share, float_type, integer_type, scale_format

#: Number of coordinates of a tile, unless blocks are larger.
_TILE = 4096

#: Number of coordinates of a thread.
SHARE = 16
#: Number of coordinates of a thread that decodes messages in fp32. Half as many threads then repeat the work that is
#: the same for a whole block. Encoding, or tiles whose coordinates are not aligned, would need more than 64 registers.
LARGE_SHARE = 32


class Number(NamedTuple):
    """The compute type of coordinates, and the format in which its scales are sent.

    Attributes:
        compute: the compute type, fp32 or fp64.
        integer: the signed integer type of the same width.
        mask: all bits except for the sign.
        mantissa: number of bits of the mantissa.
        one: the bits of 1.
        root: the bits of 2^(-1/2).
        largest: the largest finite number.
        up: 1 + 2 ulp, see `codecs.linear.codec`.
        sent: the integer type of a scale on the wire.
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
        rows: number of blocks of a tile, a power of two.
        half: number of coordinates of one half of a row, a power of two.
        stages: log2 of ``half``.
        block: number of coordinates of a block of full length.
        may_be_full: whether blocks of full length fill their rows, so that they are handled separately.
    """

    rows: int
    half: int
    stages: int
    block: int
    may_be_full: bool


class Codes(NamedTuple):
    """The layout of codes in a record, see `kernels.packing`.

    Attributes:
        bits: number of bits of a code.
        in_words: True if codes are in lanes of 64-bit words, and False if they are in bit planes.
        padded: whether a record has `rotation.padded` codes, instead of one code for each coordinate of the block.
    """

    bits: int
    in_words: bool
    padded: bool


class Mean(NamedTuple):
    """The constants for the mean of messages.

    Attributes:
        ranks: number of messages, or of ranks whose codes were added in one message.
        each: factor of every message, see `wire.Share`.
        rest: divisor of the sum, see `wire.Share`.
        limit: coordinates of a message are clamped to this magnitude, so that the sum of all messages stays finite.
        is_clamped: whether the mean is also clamped to the finite numbers of the gradient's dtype.
        has_own: whether one source's coordinates are given, so that its message is not decoded.
    """

    ranks: int
    each: float
    rest: float
    limit: float
    is_clamped: bool
    has_own: bool


class Constants(NamedTuple):
    """All constants of a compiled kernel. A constant that the kernel does not need is None.

    Attributes:
        number: the number format.
        shape: the shape of tiles.
        codes: the layout of codes in a record.
        family: the constants of a family of codes, a named tuple that the family's file defines.
        mean: the constants for the mean of messages.
        rotated: whether blocks are rotated before they are encoded, or rotated back after they are decoded.
        share: number of coordinates of a thread in an aligned tile. In other tiles, a thread has `SHARE` coordinates.
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
    integer = integer_type(dtype)
    one, root = (int(float_type(dtype)(value).view(integer)) for value in (1.0, 2**-0.5))
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
    """Returns the number of coordinates of a thread in an aligned tile."""
    is_by_itself = not (codes.padded or codes.in_words or rotated)  # each coordinate's code is handled by itself
    return LARGE_SHARE if mean is not None and is_by_itself and number.compute == tl.float32 else SHARE


@lru_cache(maxsize=256)
def constants_of(dtype: torch.dtype, block_size: int, family: Any = None) -> Constants:
    """Returns the constants of kernels that write no codes, for gradients of a dtype and blocks of at most
    ``block_size`` coordinates."""
    return Constants(number_of(dtype), shape_of(block_size), family=family)


def codes_of(q: Quantiser) -> Codes:
    """Returns the layout of a quantiser's codes in a record."""
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
    """Returns the constants for the mean of messages.

    If one message is decoded directly into a gradient of 16 bits, its coordinates are clamped to the gradient's dtype,
    and the mean is not clamped again.

    Args:
        ranks: number of messages, or of ranks whose codes were added in one message.
        dtype: dtype of the gradients.
        encoded: whether the mean is encoded again, instead of written to a gradient.
        rotated: whether the mean is rotated back.
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
