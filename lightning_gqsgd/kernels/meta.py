"""Kernels for tensors without data, on torch's device "meta": they compute nothing, and record their calls.

The performance model (`predict.profile`) runs reducers on such tensors to learn the work of each stage. All blocks
count as full, up to the number of coordinates of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gqsgd.kernels.protocol import Coding, Quantiser


class Work(NamedTuple):
    """The work of a call of a kernel, or of several calls together.

    Attributes:
        kind: name of the kernel, or ``"torch"`` for an operation of PyTorch.
        codec: family and bits of the codes, e.g. ``"companded/4"``; empty if no codes are involved.
        numel: number of coordinates.
        sources: number of messages that are decoded.
        nbytes: bytes of memory that an operation of PyTorch reads and writes.
        calls: number of calls.
    """

    kind: str
    codec: str = ""
    numel: int = 0
    sources: int = 1
    nbytes: int = 0
    calls: int = 1


_notes: ContextVar[list[Work] | None] = ContextVar("notes", default=None)


@contextmanager
def noting() -> Iterator[list[Work]]:
    """Context manager that returns a list. Kernels of this module that are called in it append their work, in order."""
    works: list[Work] = []
    token = _notes.set(works)
    try:
        yield works
    finally:
        _notes.reset(token)


def note(work: Work) -> None:
    """Append a work to the list of `noting`. Outside of `noting`, do nothing."""
    works = _notes.get()
    if works is not None:
        works.append(work)


def codec_name(q: Quantiser) -> str:
    """Returns the name of a codec in tables of costs, e.g. ``"companded/4"``."""
    return f"{q.kind.name}/{q.bits}"


def block_maxima(x: Tensor, blocks: Tensor) -> Tensor:
    """Record a call of `protocol.Kernels.block_maxima`."""
    note(Work("maxima", numel=x.numel()))
    return torch.empty(len(blocks), dtype=torch.int64 if x.dtype == torch.float64 else torch.int32, device=x.device)


def block_moments(x: Tensor, blocks: Tensor) -> Tensor:
    """Record a call of `protocol.Kernels.block_moments`."""
    note(Work("maxima", numel=x.numel()))
    return torch.empty(len(blocks), 2, dtype=torch.float64, device=x.device)


def rotate(x: Tensor, blocks: Tensor, *_: Any, **__: Any) -> None:
    """Record a call of `protocol.Kernels.rotate`."""
    note(Work("rotate", numel=x.numel()))


def narrow(x: Tensor, *_: Any, **__: Any) -> None:
    """Record a call of `protocol.Kernels.narrow`."""
    note(Work("narrow", numel=x.numel()))


def encode(x: Tensor, how: Coding, *_: Any) -> None:
    """Record a call of `protocol.Kernels.encode`."""
    _note("encode", how, x.numel())


def reduce(wires: Tensor, how: Coding, *_: Any) -> None:
    """Record a call of `protocol.Kernels.reduce`."""
    _note("reduce", how, sources=wires.shape[0])


def decode(wires: Tensor, how: Coding, x: Tensor, *_: Any) -> int:
    """Record a call of `protocol.Kernels.decode`. Returns 0, the number of blocks that are not finite."""
    _note("decode", how, x.numel(), wires.shape[0])
    return 0


def decode_sum(wire: Tensor, how: Coding, x: Tensor, keys: Any, scales: Tensor) -> int:
    """Record a call of `protocol.Kernels.decode_sum`. Returns 0, the number of blocks that are not finite."""
    _note("decode_sum", how, x.numel(), len(keys))
    return 0


def combine(mine: Tensor, theirs: Tensor, how: Coding, key: Any) -> None:
    """Record a call of `protocol.Kernels.combine`."""
    _note("combine", how)


def _note(kind: str, how: Coding, most: int | None = None, sources: int = 1) -> None:
    numel = len(how.blocks) * how.q.block_size
    note(Work(kind, codec_name(how.q), numel if most is None else min(numel, most), sources))
