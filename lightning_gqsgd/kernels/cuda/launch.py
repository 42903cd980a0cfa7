"""Launches of kernels: the tables of tiles, a program for each tile, and keys in the form that kernels take.

A block table is divided by the kind of tile that its blocks go into (see `tiles`), each kind has a table of its own,
and a kernel is compiled and launched for each kind that there is. So a kernel for blocks of full length has no
registers that only the ends of parameters need, and a bucket is fast whatever parameters it begins with.

Tables and launches are made when a block table is used for the first time, and kept as long as the block table is.
Triton looks at all arguments, constants and globals of a kernel at each launch, which takes several times as long as
the launch itself. A launch that is kept leaves that out. Integers are no part of what kernels are compiled for: they
are all in ``do_not_specialize``, and what is fixed is a constant.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton import JITFunction

from lightning_gqsgd.kernels import layout
from lightning_gqsgd.kernels.cuda import tiles
from lightning_gqsgd.kernels.cuda.constants import SHARE, Constants
from lightning_gqsgd.kernels.wire import Key

#: Bytes that a GPU loads at once.
_WIDE = 16

#: Counters that are made at once, see `counter`.
_COUNTERS = 64


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


class _Launch(NamedTuple):
    """A compiled kernel on one table.

    Attributes:
        call: launches it: takes a table, the number of its blocks, the arguments, the constants in order, and by name
            the stream, which Triton would ask its driver for.
        table: the table.
        constants: the constants, which are kept here, so that no other object gets their identity.
    """

    call: Callable[..., object]
    table: _Table
    constants: tuple[Any, ...]


@dataclass(eq=False)
class _Kept:
    """What is kept of a block table.

    Attributes:
        tables: the blocks by kind of tile, for each way to divide them (see `_divide`).
        launches: for each kernel and what it is compiled for, a launch on each table.
        streams: tables by identity, each with the number of a stream that is known to use it.
    """

    tables: dict[tuple[int, ...], tuple[_Table, ...]] = field(default_factory=dict)
    launches: dict[tuple[Any, ...], list[_Launch]] = field(default_factory=dict)
    streams: set[tuple[int, int]] = field(default_factory=set)


def run(
    kernel: Any,
    c: Constants,
    blocks: Tensor,
    x: Tensor | None,
    *arguments: Any,
    splits: bool = True,
    **constants: Any,
) -> None:
    """Run a kernel on a block table. The host waits for the device the first time.

    Args:
        kernel: the kernel, which takes a table, the number of its blocks, ``x`` if that is given, and the arguments.
        c: the kernel's constants, from a function that returns the same object each time, and other objects for other
            ``constants``.
        blocks: the block table, int64 [blocks, `layout.COLUMNS`].
        x: the tensor whose coordinates blocks count. Kernels get it from the last multiple of 16 bytes before it on:
            there is one way to compile them, wherever it begins. None: kernels take no coordinates.
        *arguments: tensors, integers or None. Dtypes follow from those of ``x`` and from ``c``.
        splits: whether the kernel takes the kind of its tiles, ``KIND``; otherwise all are ragged.
        **constants: the kernel's constants beside ``c``.
    """
    before = 0
    dtype: torch.dtype | None = None
    if x is not None:
        dtype = x.dtype
        if x.data_ptr() % _WIDE:
            x, before = _from_aligned(x)
        arguments = (x, *arguments)
    # What Triton compiles a kernel for, apart from integers: which arguments are None, and which begin elsewhere.
    form = 0
    for argument in arguments:
        form <<= 2
        if argument is None:
            form |= 1
        elif type(argument) is not int and argument.data_ptr() % _WIDE:
            form |= 2
    key = (id(kernel), id(c), dtype, before, form)
    kept = _kept_for(blocks)
    stream = raw_stream(blocks.device)
    launches = kept.launches.get(key)
    if launches is None:
        per_access = 1 if x is None else _WIDE // x.element_size()
        full_length = c.shape.block if splits and c.shape.may_be_full else 0
        how = (full_length, c.number.sent.primitive_bitwidth, before, per_access)
        if how not in kept.tables:
            kept.tables[how] = _divide(blocks, *how)
        started = [_started(kernel, c, table, arguments, constants, splits=splits) for table in kept.tables[how]]
        launches = [launch for launch in started if launch is not None]
        if launches:  # Triton's interpreter compiles nothing
            kept.launches[key] = launches
    else:
        for call, table, values in launches:
            call(table.columns, table.number, *arguments, *values, stream=stream)
    if blocks.is_cuda:
        _keep_for_this_stream(launches, kept, stream)


#: What is kept of each block table, by its identity. It goes when the block table goes.
_kept: dict[int, _Kept] = {}


def _kept_for(blocks: Tensor) -> _Kept:
    kept = _kept.get(id(blocks))
    if kept is None:
        kept = _kept[id(blocks)] = _Kept()
        weakref.finalize(blocks, _kept.pop, id(blocks)).atexit = False
    return kept


def _divide(blocks: Tensor, full_length: int, scale_bits: int, shift: int, per_access: int) -> tuple[_Table, ...]:
    table = blocks.cpu().numpy()
    start = table[:, layout.START] + shift
    is_full = (table[:, layout.LENGTH] == full_length) & (table[:, layout.RAW] == 0)
    units = start // per_access  # of aligned blocks, in one column
    is_aligned = is_full & (start % per_access == 0) & (units < 1 << 32)
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
            words = columns[rows]
            if kind is tiles.ALIGNED:
                words[:, tiles.START_LOW.value] = units[rows]
            words = words.astype(np.uint32).view(np.int32)
            made.append(_Table(kind.value, torch.from_numpy(words).to(blocks.device), len(words)))
    return tuple(made)


def _keep_for_this_stream(launches: Sequence[_Launch], kept: _Kept, stream: int) -> None:
    """Tell PyTorch once that the current stream, which has this number, uses tables: it gives memory back to the stream
    that it was allocated on, and a table may go while other streams are not done with it."""
    for launch in launches:
        columns = launch.table.columns
        name = id(columns), stream
        if name not in kept.streams:
            kept.streams.add(name)
            columns.record_stream(torch.cuda.current_stream(columns.device))


def raw_stream(device: torch.device) -> int:
    """Returns the current stream's number: 0 on a CPU."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def is_aligned(x: Tensor) -> bool:
    """Returns whether a tensor begins at a multiple of 16 bytes."""
    return x.data_ptr() % _WIDE == 0


def _from_aligned(x: Tensor) -> tuple[Tensor, int]:
    """Returns a tensor from a multiple of 16 bytes on, and how many of its elements are before ``x``."""
    before = x.data_ptr() % _WIDE // x.element_size()
    first = x.storage_offset() - before
    if first < 0:  # memory that is not PyTorch's may begin anywhere
        return x, 0
    return x.as_strided((x.numel() + before,), (1,), first), before


def _started(
    kernel: Any,
    c: Constants,
    table: _Table,
    arguments: Sequence[Any],
    constants: dict[str, Any],
    *,
    splits: bool,
) -> _Launch | None:
    """Launch a kernel for the first time. Returns how it is launched again, if Triton compiles it."""
    by_name = {**constants, "KIND": table.kind} if splits else constants
    programs = -(-table.number // c.shape.rows)
    compiled = start(kernel, c, programs, table.columns, table.number, *arguments, **by_name)
    if compiled is None:
        return None
    by_name = {**by_name, "c": c}
    names = kernel.arg_names[2 + len(arguments) :]
    return _Launch(compiled[programs, 1, 1], table, tuple(by_name[name] for name in names))


def start(kernel: Any, c: Constants, programs: int, *arguments: Any, **constants: Any) -> Any:
    """Launch so many programs of a kernel, which is compiled if it has to be. Returns what it was compiled to; None:
    Triton's interpreter ran it."""
    compiled_with = options(c, constants.get("KIND")) if isinstance(kernel, JITFunction) else {}
    return kernel[(programs,)](*arguments, **constants, c=c, **compiled_with)


def options(c: Constants, kind: int | None = None) -> dict[str, int]:
    """Returns the options with which a kernel is compiled for tiles of this shape and kind."""
    share = c.share if kind == tiles.ALIGNED.value else SHARE
    warps = min(max(2 * c.shape.rows * c.shape.half // (32 * share), 1), 32)
    is_even = kind in (tiles.FULL.value, tiles.ALIGNED.value) and c.number.compute == tl.float32
    is_short = c.codes is not None and not c.codes.padded and not c.codes.in_words and not c.rotated
    is_single = c.mean is None or c.mean.ranks == 1
    most = 128
    if is_even and is_short and is_single:
        most = 64  # twice as many threads fit at once as with 128, which tiles with the ends of parameters would take
    elif share > SHARE:
        most = 96  # for twice as many coordinates as in a thread with 64
    elif c.codes is not None and c.codes.padded and not is_single:
        most = 168  # a search for codes of a mean needs them, and would keep some in memory otherwise
    return {"num_warps": warps, "maxnreg": min(most, 2048 // warps), "enable_fp_fusion": False}


def packed(key: Key) -> int:
    """Both words of a key in one signed 64-bit integer, the first word in the lower half."""
    both = key[0] | key[1] << 32
    return both - (both >> 63 << 64)


def keys_on(device: torch.device, keys: Sequence[Key]) -> Tensor:
    """Returns the keys on the device, int64 [keys]; they are sent there once per step and stream, and the host does not
    wait."""
    return _sent_keys(tuple(keys), device, raw_stream(device))


@lru_cache(maxsize=64)
def _sent_keys(keys: tuple[Key, ...], device: torch.device, stream: int) -> Tensor:
    table = torch.tensor([packed(key) for key in keys], dtype=torch.int64, device="cpu")  # not the default device
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def stride_of(wires: Tensor) -> int:
    """Returns the distance of messages that kernels get, in units of 16 bytes: kernels see then what addresses are
    multiples of. ``wires``: uint8 [messages, bytes]."""
    return wires.shape[1] // layout.ALIGNMENT


def counter(device: torch.device) -> Tensor:
    """Returns a counter at zero that nothing else uses, int32 []. Several are made at once, because that takes a
    launch."""
    left = _counters.setdefault((device, raw_stream(device)), [])
    if not left:
        # 16 bytes apart, as all that kernels get.
        left += torch.zeros(_COUNTERS, _WIDE // 4, dtype=torch.int32, device=device)[:, 0].unbind()
    return left.pop()


#: Counters that were made, by device and stream.
_counters: dict[tuple[torch.device, int], list[Tensor]] = {}
