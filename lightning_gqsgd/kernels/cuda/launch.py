"""Launches kernels: builds the tables of tiles, starts a program for each tile, and packs keys for kernels.

A block table is divided by the kind of tile of its blocks (see `tiles`). Each kind has its own table, and a kernel is
compiled and launched for each kind that occurs. So a kernel for blocks of full length needs no registers for the ends
of parameters, and a bucket is fast for all parameters at its beginning.

Tables and launches are built when a block table is used for the first time, and are kept as long as the block table
exists. Triton inspects all arguments, constants and globals of a kernel at each launch, which takes several times as
long as the launch itself. A kept launch skips this. Kernels are not compiled for values of integers: integer arguments
are all in ``do_not_specialize``, and fixed integers are constants.
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
from triton.runtime import driver

from lightning_gqsgd.kernels import layout
from lightning_gqsgd.kernels.cuda import ptx, tiles
from lightning_gqsgd.kernels.cuda.constants import SHARE, Constants
from lightning_gqsgd.kernels.wire import NO_ORIGIN, Key, Origin

#: Number of bytes of the widest load of a GPU.
_WIDE = 16

#: The largest number of threads of a program.
_THREADS = 1024

#: Number of counters that are created together, see `counter`.
_COUNTERS = 64


class _Table(NamedTuple):
    """The blocks of tiles of one kind.

    Attributes:
        kind: the kind of the tiles.
        columns: int32 [blocks, columns], see `tiles.COLUMNS`.
        number: number of blocks.
    """

    kind: int
    columns: Tensor
    number: int


class _Launch(NamedTuple):
    """A compiled kernel on one table.

    Attributes:
        call: function that launches the kernel. It takes a table, the number of its blocks, the arguments, the
            constants in order, and ``stream``, which Triton would otherwise query from its driver.
        table: the table.
        constants: the constants. They are kept here, so that no other object gets their identity.
    """

    call: Callable[..., object]
    table: _Table
    constants: tuple[Any, ...]


@dataclass(eq=False)
class _Kept:
    """The tables and launches that are kept for a block table.

    Attributes:
        tables: for each device and way to divide the blocks (see `_divide`), the tables by kind of tile.
        launches: for each kernel and the properties for which it is compiled, a launch on each table.
        streams: pairs of a table's identity and the number of a stream that was recorded for it.
    """

    tables: dict[tuple[Any, ...], tuple[_Table, ...]] = field(default_factory=dict)
    launches: dict[tuple[Any, ...], list[_Launch]] = field(default_factory=dict)
    streams: set[tuple[int, int]] = field(default_factory=set)


def run(
    kernel: Any,
    c: Constants,
    blocks: Tensor,
    x: Tensor | None,
    *arguments: Any,
    origin: Origin = NO_ORIGIN,
    splits: bool = True,
    **constants: Any,
) -> None:
    """Run a kernel on a block table. The host waits for the device the first time.

    Args:
        kernel: the kernel. It takes a table, the number of its blocks, its origin, ``x`` if it is given, and the
            arguments.
        c: the kernel's constants. They must come from a function that returns the same object each time, and another
            object for other ``constants``.
        blocks: the block table, int64 [blocks, `layout.COLUMNS`], on any device. Kernels do not read it.
        x: the tensor of coordinates. Kernels get it from the last multiple of 16 bytes before its start, so that one
            compiled kernel works for all alignments. None: the kernel takes no coordinates, and its first argument is a
            tensor.
        *arguments: tensors, integers or None. Their dtypes follow from ``c`` and the dtype of ``x``.
        origin: the origin of the block table.
        splits: whether the kernel takes the kind of its tiles, ``KIND``. If not, all tiles are ragged.
        **constants: the kernel's constants in addition to ``c``.
    """
    before = 0
    dtype: torch.dtype | None = None
    device = (arguments[0] if x is None else x).device
    if x is not None:
        dtype = x.dtype
        if x.data_ptr() % _WIDE:
            x, before = _from_aligned(x)
        arguments = (x, *arguments)
    # An integer, so that the kernel is not compiled again for other origins.
    first = 0 if origin is NO_ORIGIN else packed(origin)
    # Triton compiles a kernel for these properties: which arguments are None, and which are not aligned to 16 bytes.
    form = 0
    for argument in arguments:
        form <<= 2
        if argument is None:
            form |= 1
        elif type(argument) is not int and argument.data_ptr() % _WIDE:
            form |= 2
    key = (id(kernel), id(c), dtype, before, form, device.index)
    kept = _kept_for(blocks)
    stream = raw_stream(device)
    launches = kept.launches.get(key)
    if launches is None:
        per_access = 1 if x is None else _WIDE // x.element_size()
        full_length = c.shape.block if splits and c.shape.may_be_full else 0
        how = (device, full_length, c.number.sent.primitive_bitwidth, before, per_access)
        if how not in kept.tables:
            kept.tables[how] = _divide(blocks, *how)
        started = [
            _started(kernel, c, table, (first, *arguments), constants, splits=splits) for table in kept.tables[how]
        ]
        launches = [launch for launch in started if launch is not None]
        if launches:  # there are none with Triton's interpreter, which does not compile
            kept.launches[key] = launches
    else:
        for call, table, values in launches:
            call(table.columns, table.number, first, *arguments, *values, stream=stream)
    if device.type == "cuda":
        _keep_for_this_stream(launches, kept, stream)


#: The tables and launches of each block table, by its identity. They are deleted with the block table.
_kept: dict[int, _Kept] = {}


def _kept_for(blocks: Tensor) -> _Kept:
    kept = _kept.get(id(blocks))
    if kept is None:
        kept = _kept[id(blocks)] = _Kept()
        weakref.finalize(blocks, _kept.pop, id(blocks)).atexit = False
    return kept


def _divide(
    blocks: Tensor, device: torch.device, full_length: int, scale_bits: int, shift: int, per_access: int
) -> tuple[_Table, ...]:
    table = blocks.cpu().numpy()
    start = table[:, layout.START] + shift
    is_full = (table[:, layout.LENGTH] == full_length) & (table[:, layout.RAW] == 0)
    units = start // per_access  # the start of aligned blocks, which fits in one column
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
            made.append(_Table(kind.value, torch.from_numpy(words).to(device), len(words)))
    return tuple(made)


def _keep_for_this_stream(launches: Sequence[_Launch], kept: _Kept, stream: int) -> None:
    """Tell PyTorch once that the current stream uses tables. ``stream`` is the number of the current stream. Otherwise,
    PyTorch could reuse the memory of a deleted table while this stream still reads it."""
    for launch in launches:
        columns = launch.table.columns
        name = id(columns), stream
        if name not in kept.streams:
            kept.streams.add(name)
            columns.record_stream(torch.cuda.current_stream(columns.device))


def raw_stream(device: torch.device) -> int:
    """Returns the number of the current stream, or 0 on a CPU. ``device`` is that of a tensor, so that a GPU has an
    index and a CPU has none."""
    index = device.index
    return 0 if index is None else torch._C._cuda_getCurrentRawStream(index)


def is_aligned(x: Tensor) -> bool:
    """Returns whether the address of a tensor is a multiple of 16 bytes."""
    return x.data_ptr() % _WIDE == 0


def _from_aligned(x: Tensor) -> tuple[Tensor, int]:
    """Returns a tensor that contains ``x`` and begins at a multiple of 16 bytes, and its number of elements before
    ``x``."""
    before = x.data_ptr() % _WIDE // x.element_size()
    first = x.storage_offset() - before
    if first < 0:  # memory that PyTorch has not allocated may begin at any address
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
    """Launch a kernel for the first time. Returns an object for later launches, or None if Triton's interpreter ran
    it."""
    by_name = {**constants, "KIND": table.kind} if splits else constants
    programs = -(-table.number // c.shape.rows)
    compiled = start(kernel, c, programs, table.columns, table.number, *arguments, **by_name)
    if compiled is None:
        return None
    by_name = {**by_name, "c": c}
    names = kernel.arg_names[2 + len(arguments) :]
    return _Launch(compiled[programs, 1, 1], table, tuple(by_name[name] for name in names))


def start(kernel: Any, c: Constants, programs: int, *arguments: Any, **constants: Any) -> Any:
    """Launch ``programs`` programs of a kernel, which is compiled if necessary. Returns the compiled kernel, or None if
    Triton's interpreter ran it."""
    compiled_with = options(c, constants.get("KIND")) if isinstance(kernel, JITFunction) else {}
    return kernel[(programs,)](*arguments, **constants, c=c, **compiled_with)


def options(c: Constants, kind: int | None) -> dict[str, int]:
    """Returns the options with which a kernel is compiled for tiles of this shape and kind."""
    share = c.share if kind == tiles.ALIGNED.value else SHARE
    warp_size = driver.active.get_current_target().warp_size  # 64 on AMD's GPUs for data centres
    warps = min(max(2 * c.shape.rows * c.shape.half // (warp_size * share), 1), _THREADS // warp_size)
    compiled_with = {"num_warps": warps, "enable_fp_fusion": False}
    if ptx.AVAILABLE:
        compiled_with["maxnreg"] = min(_most_registers(c, kind, share), 65536 // (warp_size * warps))
    return compiled_with


def _most_registers(c: Constants, kind: int | None, share: int) -> int:
    """Returns the largest number of registers of a thread on NVIDIA's GPUs."""
    is_even = kind in (tiles.FULL.value, tiles.ALIGNED.value) and c.number.compute == tl.float32
    is_short = c.codes is not None and not c.codes.padded and not c.codes.in_words and not c.rotated
    is_single = c.mean is None or c.mean.ranks == 1
    most = 128
    if is_even and is_short and is_single:
        most = 64  # twice as many threads run together as with 128, which tiles with the ends of parameters need
    elif share > SHARE:
        most = 96  # such a thread has twice as many coordinates as a thread with 64 registers
    elif c.codes is not None and c.codes.padded and not is_single:
        most = 168  # a search for codes of a mean needs them; with fewer, it would spill registers to memory
    return most


def packed(pair: Key | Origin) -> int:
    """Returns both words of a key or of an origin in one signed 64-bit integer, with the first word in the lower
    half."""
    both = pair[0] | pair[1] << 32
    return both - (both >> 63 << 64)


def keys_on(device: torch.device, keys: Sequence[Key]) -> Tensor:
    """Returns the keys on the device, int64 [keys]. They are copied to the device once per step and stream, and the
    host does not wait."""
    return _sent_keys(tuple(keys), device, raw_stream(device))


@lru_cache(maxsize=64)
def _sent_keys(keys: tuple[Key, ...], device: torch.device, stream: int) -> Tensor:
    table = torch.tensor([packed(key) for key in keys], dtype=torch.int64, device="cpu")  # not the default device
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def stride_of(wires: Tensor) -> int:
    """Returns the distance of messages in units of 16 bytes. With this unit, the compiler sees that addresses of
    messages are multiples of 16 bytes. ``wires`` is uint8 [messages, bytes]."""
    return wires.shape[1] // layout.ALIGNMENT


def counter(device: torch.device) -> Tensor:
    """Returns a new counter at zero, int32 []. Several counters are created together, because creating them takes a
    launch."""
    left = _counters.setdefault((device, raw_stream(device)), [])
    if not left:
        # Counters are 16 bytes apart, because all arguments of kernels are aligned to 16 bytes.
        left += torch.zeros(_COUNTERS, _WIDE // 4, dtype=torch.int32, device=device)[:, 0].unbind()
    return left.pop()


#: Unused counters, by device and stream.
_counters: dict[tuple[torch.device, int], list[Tensor]] = {}
