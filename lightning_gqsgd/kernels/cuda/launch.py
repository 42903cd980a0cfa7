"""Launches of kernels: the tables of tiles, a program for each tile, and keys in the form that kernels take.

A block table is divided by the kind of tile that its blocks go into (see `tiles`), each kind has a table of its own,
and a kernel is compiled and launched for each kind that there is. So a kernel for blocks of full length has no
registers that only the ends of parameters need, and a bucket is fast whatever parameters it begins with. The division
is made when a block table is used for the first time, and kept as long as the block table is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from triton import JITFunction

from lightning_gqsgd.kernels import layout
from lightning_gqsgd.kernels.cuda import tiles
from lightning_gqsgd.kernels.cuda.constants import Constants
from lightning_gqsgd.kernels.wire import Key

#: Bytes that a GPU loads at once.
_WIDE = 16


class _Table(NamedTuple):
    """The blocks that go into tiles of one kind.

    Attributes:
        kind: the kind.
        columns: int32 [blocks, columns], see `tiles.COLUMNS`.
        number: number of blocks.
    """

    kind: int
    columns: Tensor
    number: int


class Division(NamedTuple):
    """A block table, divided for one tensor.

    Attributes:
        x: the tensor from the last multiple of 16 bytes before it on, which kernels get in its place: there is one way
            to compile them, wherever the tensor begins. None: kernels take no coordinates.
        tables: of each kind that there is.
        splits: whether the kernel takes the kind of its tiles.
    """

    x: Tensor | None
    tables: tuple[_Table, ...]
    splits: bool


def divided(blocks: Tensor, c: Constants, x: Tensor | None = None, *, splits: bool = True) -> Division:
    """Returns the tables of a kernel's tiles. The host waits for the device the first time.

    Args:
        blocks: the block table, int64 [blocks, `layout.COLUMNS`].
        c: the kernel's constants.
        x: the tensor that has the coordinates. None: kernels take none.
        splits: whether the kernel takes the kind of its tiles, ``KIND``; otherwise all are ragged.
    """
    if x is None:
        base, shift, per_access = None, 0, 1
    else:
        base, shift = _aligned(x)
        per_access = _WIDE // x.element_size()
    kept = _divided.setdefault(blocks, {})
    key = (c.shape.block if splits and c.shape.may_be_full else 0, c.number.sent.primitive_bitwidth, shift, per_access)
    tables = kept.get(key)
    if tables is None:
        kept[key] = tables = _divide(blocks, *key)
    if blocks.is_cuda:
        _keep_for_this_stream(tables, kept)
    return Division(base, tables, splits)


#: The tables by block table; they go when it goes.
_divided: Any = WeakIdKeyDictionary()


def _divide(blocks: Tensor, full_length: int, scale_bits: int, shift: int, per_access: int) -> tuple[_Table, ...]:
    table = blocks.cpu().numpy()
    start = table[:, layout.START] + shift
    is_full = (table[:, layout.LENGTH] == full_length) & (table[:, layout.RAW] == 0)
    is_aligned = is_full & (start % per_access == 0)
    scale = table[:, layout.SCALE]
    columns = np.empty((len(table), tiles.COLUMNS), dtype=np.int64)
    columns[:, tiles.START_LOW.value] = start & 0xFFFFFFFF
    columns[:, tiles.START_HIGH.value] = start >> 32
    columns[:, tiles.PARAMETER.value] = table[:, layout.PARAMETER]
    columns[:, tiles.INDEX.value] = table[:, layout.INDEX]
    columns[:, tiles.SCALE.value] = np.where(scale < 0, -1, scale // (scale_bits // 8))
    columns[:, tiles.CODES.value] = table[:, layout.CODES] // layout.ALIGNMENT
    columns[:, tiles.LENGTH.value] = table[:, layout.LENGTH] * 2 + (table[:, layout.RAW] == 1)
    columns[:, tiles.ROW.value] = np.arange(len(table))
    made = []
    for kind, rows in (
        (tiles.ALIGNED, is_aligned),
        (tiles.FULL, is_full & ~is_aligned),
        (tiles.RAGGED, ~is_full),
    ):
        if rows.any():
            words = columns[rows].astype(np.uint32).view(np.int32)
            made.append(_Table(kind.value, torch.from_numpy(words).to(blocks.device), len(words)))
    return tuple(made)


def _keep_for_this_stream(tables: tuple[_Table, ...], kept: dict[Any, Any]) -> None:
    """Tell PyTorch once that the current stream uses tables: it gives memory back to the stream that it was allocated
    on, and a table may go while other streams are not done with it."""
    stream = torch.cuda.current_stream(tables[0].columns.device) if tables else None
    if stream is None or (id(tables), stream.cuda_stream) in kept:
        return
    kept[id(tables), stream.cuda_stream] = True
    for table in tables:
        table.columns.record_stream(stream)


def _aligned(x: Tensor) -> tuple[Tensor, int]:
    """Returns a tensor from a multiple of 16 bytes on, and how many of its elements are before ``x``."""
    before = x.data_ptr() % _WIDE // x.element_size()
    first = x.storage_offset() - before
    if not before or first < 0:  # memory that is not PyTorch's may begin anywhere
        return x, 0
    return x.as_strided((x.numel() + before,), (1,), first), before


def run(kernel: Any, division: Division, c: Constants, *arguments: Any, **constants: Any) -> None:
    """Run a kernel on a block table.

    Args:
        kernel: the kernel, which takes a table, the number of its blocks, and then what is below.
        division: the block table, from `divided`.
        c: the kernel's constants.
        arguments: the arguments of the kernel, in order.
        constants: its constants beside ``c``, by name.
    """
    for kind, columns, count in division.tables:
        if division.splits:
            constants["KIND"] = kind
        start(kernel, c, -(-count // c.shape.rows), columns, count, *arguments, **constants)


def start(kernel: Any, c: Constants, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launch so many programs of a kernel.

    Triton looks at all arguments, constants and globals of a kernel at each launch, which takes several times as long
    as the launch. Here, it does so when a kernel is launched for the first time, and what it has compiled is kept by
    all that it compiles differently for.
    """
    if not isinstance(kernel, JITFunction):  # Triton's interpreter compiles nothing
        kernel[(programs,)](*arguments, **constants, c=c)
        return
    key = (kernel, c, *constants.values(), *_compiled_for(kernel, arguments))
    bound = _bound.get(key)
    if bound is None:
        compiled = kernel[(programs,)](*arguments, **constants, c=c, **options(c, constants.get("KIND")))
        by_name = {**constants, "c": c}
        _bound[key] = compiled, tuple(by_name[name] for name in kernel.arg_names[len(arguments) :])
        return
    compiled, values = bound
    compiled[programs, 1, 1](*arguments, *values)


#: Compiled kernels, and their constants in order.
_bound: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def _compiled_for(kernel: Any, arguments: Sequence[Any]) -> list[Any]:
    """Returns what Triton compiles a kernel for, of these arguments: dtype, alignment and device of tensors, and of
    integers, unless the kernel excepts them, whether they are 1 or multiples of 16. It may be more than Triton looks
    at, but not less."""
    found: list[Any] = []
    for parameter, value in zip(kernel.params, arguments, strict=False):
        if isinstance(value, Tensor):
            found.append((value.dtype, value.data_ptr() % _WIDE == 0, value.device))
        elif value is None:
            found.append(None)
        elif not parameter.do_not_specialize:
            found.append(1 if value == 1 else _WIDE if value % _WIDE == 0 else 0)
    return found


def options(c: Constants, kind: int | None = None) -> dict[str, int]:
    """Returns the options with which a kernel is compiled for tiles of this shape and kind."""
    warps = min(max(c.shape.rows * c.shape.half >> 8, 1), 32)  # 16 coordinates per thread
    is_even = kind in (tiles.FULL.value, tiles.ALIGNED.value) and c.number.compute == tl.float32
    is_short = c.codes is not None and not c.codes.padded and not c.codes.in_words and not c.rotated
    is_single = c.mean is None or c.mean.ranks == 1
    # Twice as many threads fit at once as with 128 registers, which tiles with the ends of parameters would take.
    most = 64 if is_even and is_short and is_single else 128
    return {"num_warps": warps, "maxnreg": min(most, 2048 // warps), "enable_fp_fusion": False}


def packed(key: Key) -> int:
    """Both words of a key in one signed 64-bit integer, the first word in the lower half."""
    both = key[0] | key[1] << 32
    return both - (both >> 63 << 64)


def keys_on(device: torch.device, keys: Sequence[Key]) -> Tensor:
    """Returns the keys on the device, int64 [keys]; they are sent there once per step and stream, and the host does not
    wait."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _sent_keys(tuple(keys), device, stream)


@lru_cache(maxsize=64)
def _sent_keys(keys: tuple[Key, ...], device: torch.device, stream: int) -> Tensor:
    table = torch.tensor([packed(key) for key in keys], dtype=torch.int64, device="cpu")  # not the default device
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
