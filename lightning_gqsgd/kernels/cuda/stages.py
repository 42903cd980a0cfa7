"""Kernels that encode, reduce, decode and add, for families whose records are a scale and codes.

A kernel is compiled for each kind of tile, see `tiles`. Coordinates are read once, and stay in registers until their
codes are written. ``c`` has the kernel's constants, see `constants.Constants`. Integers are not specialised, so kernels
are not compiled again for other keys or other numbers of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gqsgd.kernels.cuda import launch
from lightning_gqsgd.kernels.cuda.constants import Constants, Mean, codes_of, mean_of, number_of, shape_of, share_of
from lightning_gqsgd.kernels.cuda.floats import in_finite_range
from lightning_gqsgd.kernels.cuda.hashing import block_keys, words
from lightning_gqsgd.kernels.cuda.packing import pack, unpack
from lightning_gqsgd.kernels.cuda.records import (
    Messages,
    divided_by_rest,
    rows_not_finite,
    sum_of_messages,
    with_own,
    write_records,
)
from lightning_gqsgd.kernels.cuda.rotation import rotated
from lightning_gqsgd.kernels.cuda.scales import received_value
from lightning_gqsgd.kernels.cuda.tiles import (
    RAGGED,
    ROW,
    any_not_finite,
    column,
    count_rows,
    load_tile,
    record_places,
    store_tile,
    tile_of,
)
from lightning_gqsgd.kernels.protocol import Coding, Quantiser
from lightning_gqsgd.kernels.wire import Key

# --- encode -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["count", "origin", "key", "rotation"])
def encode_kernel(
    table, count, origin: tl.int64, x, wire, scales, key: tl.int64, rotation: tl.int64, to_codes: tl.constexpr,
    KIND: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Encode blocks into a message; see `protocol.Kernels.encode`. ``scales`` may be None, and ``rotation`` is used
    only if ``c.rotated`` is true."""
    t = tile_of(table, count, origin, x, KIND, c)
    a, b = load_tile(x, t.start, t.n, KIND, c)
    if c.rotated:
        a, b = rotated(a, b, t, rotation, False, KIND, c)
    write_records(a, b, t, wire, scales, key, to_codes, KIND, c)


# --- reduce -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["count", "origin", "stride", "messages", "own"])
def reduce_kernel(
    table, count, origin: tl.int64, x, wires, stride: tl.int64, messages, keys, own, out, to_values: tl.constexpr,
    to_codes: tl.constexpr, KIND: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Average the messages of one shard, and encode the mean; see `protocol.Kernels.reduce`. ``messages`` is the number
    of messages, and ``x`` has the coordinates of source ``own``. ``keys`` has the keys of the messages, then the key of
    the mean, and then, if ``c.rotated`` is true, the key of the rotation."""
    t = tile_of(table, count, origin, x, KIND, c)
    a, b = sum_of_messages(Messages(wires, stride, messages, keys, own, to_values), t, KIND, c)
    a, b, _ = with_own(a, b, x, t, tl.load(keys + messages + 1) if c.rotated else None, KIND, c)
    a, b = divided_by_rest(a, b, c)
    write_records(a, b, t, out, None, tl.load(keys + messages), to_codes, KIND, c)


# --- decode -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["count", "origin", "stride", "messages", "own"])
def decode_kernel(
    table, count, origin: tl.int64, x, wires, stride: tl.int64, messages, keys, own, counter, to_values: tl.constexpr,
    KIND: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Decode messages, and write their mean into ``x``; see `protocol.Kernels.decode`. ``messages`` is the number of
    messages. ``keys`` has the keys of the messages, and then, if ``c.rotated`` is true, the key of the rotation. The
    number of blocks that are not finite is added to ``counter``."""
    t = tile_of(table, count, origin, x, KIND, c)
    a, b = sum_of_messages(Messages(wires, stride, messages, keys, own, to_values), t, KIND, c)
    bad = rows_not_finite(Messages(wires, stride, messages, keys, own, to_values), t, c)
    if not c.mean.has_own:
        a, b = divided_by_rest(a, b, c)
    if c.rotated:
        a, b = rotated(a, b, t, tl.load(keys + messages), True, KIND, c)
    if c.mean.has_own:
        a, b, not_finite = with_own(a, b, x, t, None, KIND, c)
        bad |= not_finite
        a, b = divided_by_rest(a, b, c)
    if c.mean.is_clamped:
        a, b = _in_finite_range(a, b, t, x.dtype.element_ty, KIND, c)
    if c.rotated:
        bad |= any_not_finite(a, b, t.n, KIND, c)
    elif KIND == RAGGED:
        bad |= t.raw & any_not_finite(a, b, t.n, KIND, c)
    store_tile(a, b, x, t, t.inside, KIND, c)
    count_rows(bad & t.inside, counter, KIND, c)


@triton.jit
def _in_finite_range(a, b, t, DTYPE: tl.constexpr, KIND: tl.constexpr, c: tl.constexpr):
    """Returns both halves, with finite coordinates of coded blocks clamped to the finite numbers of a type.

    Without a rotation, a coded block has no infinite coordinates, because a block that is not finite is NaN. So
    infinity need not be kept, but raw rows have to be excluded. With a rotation, raw rows need not be excluded: their
    mean is not larger than the largest number.
    """
    coded_a = in_finite_range(a, DTYPE, c.rotated, c)
    coded_b = in_finite_range(b, DTYPE, c.rotated, c)
    if KIND == RAGGED and not c.rotated:
        coded_a = tl.where(t.raw[:, None], a, coded_a)
        coded_b = tl.where(t.raw[:, None], b, coded_b)
    return coded_a, coded_b


# --- sums of codes ----------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["count", "origin", "ranks"])
def decode_sum_kernel(
    table, count, origin: tl.int64, x, wire, scales, keys, ranks, counter, sums_to_values: tl.constexpr,
    KIND: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Decode the sum of all ranks' codes, and write the mean into ``x``; see `protocol.Kernels.decode_sum`. ``ranks``
    is the number of ranks.

    The number of blocks that are not finite is added to ``counter``.
    """
    t = tile_of(table, count, origin, x, KIND, c)
    bits = tl.load(scales + column(t, ROW))
    bad = bits >= c.number.infinity
    used = (bits > 0) & (bits < c.number.infinity)
    scale = received_value(bits, c)
    code_a, code_b = unpack(wire, record_places(t), t.n, used, KIND, c)
    a, b = sums_to_values(code_a, code_b, t, keys, ranks, scale, KIND, c)
    a = tl.where(bad[:, None], float("nan"), a)
    b = tl.where(bad[:, None], float("nan"), b)
    store_tile(a, b, x, t, t.inside, KIND, c)
    count_rows(bad & t.inside, counter, KIND, c)


@triton.jit(do_not_specialize=["count", "origin", "key"])
def combine_kernel(
    table, count, origin: tl.int64, mine, theirs, key: tl.int64, pairs_to_codes: tl.constexpr, c: tl.constexpr
):
    """Add the codes of two messages in pairs, without bias; see `protocol.Kernels.combine`."""
    t = tile_of(table, count, origin, None, RAGGED, c)
    at = record_places(t)
    word_a, word_b = block_keys(t, key)
    p = tl.arange(0, c.shape.half)[None, :]
    mine_a, mine_b = unpack(mine, at, t.n, t.inside, RAGGED, c)
    theirs_a, theirs_b = unpack(theirs, at, t.n, t.inside, RAGGED, c)
    code_a = pairs_to_codes(mine_a, theirs_a, words(p, word_a, word_b), c)
    code_b = pairs_to_codes(mine_b, theirs_b, words(p + c.shape.half, word_a, word_b), c)
    pack(code_a, code_b, t.n, t.inside, mine, at, RAGGED, c)


# --- the family -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaledFamily:
    """A family of codes whose records are a scale and codes of a fixed width, defined by its functions in Triton.

    Codes are int32 [rows, half], in the two halves of the tile ``t``. ``scale`` has the blocks' scales, [rows], in the
    compute type, which is also the type of coordinates. `tiles` describes ``KIND`` and ``c``. The family's constants
    are ``c.family``.

    Attributes:
        numbers: ``(q, dtype)`` returns the family's constants for a quantiser and gradients of a dtype, a named tuple.
        to_codes: ``(a, b, t, key, scales, KIND, c)`` returns the codes of both halves, which are 0 if ``scales.used``
            is 0. The function calls `scales.send_scales` with each block's flag. It should do so before it computes
            codes, so that values that both need do not occupy registers.
        to_values: ``(code_a, code_b, t, key, scale, flag, KIND, c)`` returns the coordinates of both halves, clamped to
            the magnitude ``c.mean.limit``, and NaN if the scale is NaN. ``key`` is a pointer to the source's key.
        sums_to_values: ``(code_a, code_b, t, keys, ranks, scale, KIND, c)`` returns the mean from sums of the codes of
            ``ranks`` ranks, clamped in the same way. ``keys`` is a pointer to the ranks' keys. None: codes cannot be
            added.
        pairs_to_codes: ``(code, other, word, c)`` returns the codes of sums of two codes' numbers, in one half.
            ``word`` has uniform 32-bit integers. None: codes cannot be added in pairs.
    """

    numbers: Callable[[Any, torch.dtype], Any]
    to_codes: Any
    to_values: Any
    sums_to_values: Any = None
    pairs_to_codes: Any = None

    def encode(self, x: Tensor, how: Coding, wire: Tensor, key: Key, scales: Tensor | None = None) -> None:
        """Encode blocks into a message; see `protocol.Kernels.encode`."""
        rotation = how.rotation
        c = _constants(self.numbers, how.q, x.dtype, None, rotation is not None)
        dither = launch.packed(key)
        arguments = (wire, scales, dither, dither if rotation is None else launch.packed(rotation))
        launch.run(encode_kernel, c, how.blocks, x, *arguments, origin=how.origin, to_codes=self.to_codes)

    def reduce(
        self, wires: Tensor, how: Coding, x: Tensor, keys: Sequence[Key], own: int, out: Tensor, out_key: Key
    ) -> None:
        """Average the messages of one shard, and encode the mean; see `protocol.Kernels.reduce`."""
        rotation = how.rotation
        mean = mean_of(len(keys), x.dtype, encoded=True, has_own=True)
        c = _constants(self.numbers, how.q, x.dtype, mean, rotation is not None)
        on_device = launch.keys_on(x.device, (*keys, out_key) if rotation is None else (*keys, out_key, rotation))
        arguments = (wires, launch.stride_of(wires), len(keys), on_device, own, out)
        functions = {"to_values": self.to_values, "to_codes": self.to_codes}
        launch.run(reduce_kernel, c, how.blocks, x, *arguments, origin=how.origin, **functions)

    def decode(self, wires: Tensor, how: Coding, x: Tensor, keys: Sequence[Key], own: int | None = None) -> Tensor:
        """Decode messages, and write their mean into ``x``; see `protocol.Kernels.decode`."""
        rotation = how.rotation
        mean = mean_of(len(keys), x.dtype, rotated=rotation is not None, has_own=own is not None)
        c = _constants(self.numbers, how.q, x.dtype, mean, rotation is not None)
        bad = launch.counter(x.device)
        on_device = launch.keys_on(x.device, keys if rotation is None else (*keys, rotation))
        arguments = (wires, launch.stride_of(wires), len(keys), on_device, -1 if own is None else own, bad)
        launch.run(decode_kernel, c, how.blocks, x, *arguments, origin=how.origin, to_values=self.to_values)
        return bad

    def decode_sum(self, wire: Tensor, how: Coding, x: Tensor, keys: Sequence[Key], scales: Tensor) -> Tensor:
        """Decode the sum of all ranks' codes, and write the mean into ``x``; see `protocol.Kernels.decode_sum`."""
        c = _constants(self.numbers, how.q, x.dtype, mean_of(len(keys), x.dtype, summed=True), False)
        bad = launch.counter(x.device)
        arguments = (wire, scales, launch.keys_on(x.device, keys), len(keys), bad)
        functions = {"sums_to_values": self.sums_to_values}
        launch.run(decode_sum_kernel, c, how.blocks, x, *arguments, origin=how.origin, **functions)
        return bad

    def combine(self, mine: Tensor, theirs: Tensor, how: Coding, key: Key) -> None:
        """Add the codes of two messages in pairs, without bias; see `protocol.Kernels.combine`."""
        c = _constants(self.numbers, how.q, torch.float32, None, False)
        functions = {"pairs_to_codes": self.pairs_to_codes}
        arguments = (mine, theirs, launch.packed(key))
        launch.run(combine_kernel, c, how.blocks, None, *arguments, origin=how.origin, splits=False, **functions)


@lru_cache(maxsize=256)
def _constants(
    numbers: Callable[[Any, torch.dtype], Any], q: Quantiser, dtype: torch.dtype, mean: Mean | None, rotated: bool
) -> Constants:
    number = number_of(dtype)
    codes = codes_of(q)
    share = share_of(number, codes, mean, rotated=rotated)
    return Constants(number, shape_of(q.block_size, codes), codes, numbers(q, dtype), mean, rotated, share)
