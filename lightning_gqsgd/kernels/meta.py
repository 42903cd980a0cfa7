"""Kernels for tensors without data, on torch's device "meta": they compute nothing, and note what they were asked for.

The performance model (`predict.profile`) runs reducers on such tensors to learn how much work each of their stages
has. A tensor without data has no block lengths, so blocks count as full, up to the number of coordinates of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gqsgd.kernels.protocol import Kind, Quantiser


class Work(NamedTuple):
    """The work of one call of a kernel.

    Attributes:
        kind: name of the kernel, or ``"torch"`` for an operation of PyTorch.
        codec: family and bits of the codes, e.g. ``"companded/4"``; empty where no codes are involved.
        numel: number of coordinates.
        sources: number of messages that are decoded.
        nbytes: bytes of memory that an operation of PyTorch reads and writes.
    """

    kind: str
    codec: str = ""
    numel: int = 0
    sources: int = 1
    nbytes: int = 0


_notes: ContextVar[list[Work] | None] = ContextVar("notes", default=None)


@contextmanager
def noting() -> Iterator[list[Work]]:
    """Returns the list of what the kernels of this module are asked for inside ``with``, in order."""
    works: list[Work] = []
    token = _notes.set(works)
    try:
        yield works
    finally:
        _notes.reset(token)


def note(work: Work) -> None:
    """Add a work to the list of `noting`; does nothing outside of it."""
    works = _notes.get()
    if works is not None:
        works.append(work)


def codec_name(kind: Kind, bits: int) -> str:
    """Returns the name that costs of a codec have, e.g. ``"companded/4"``."""
    return f"{kind.name}/{bits}"


def block_maxima(x: Tensor, blocks: Tensor) -> Tensor:
    """Note that the largest magnitudes of blocks are asked for; see `protocol.Kernels.block_maxima`."""
    note(Work("maxima", numel=x.numel()))
    return torch.empty(len(blocks), dtype=torch.int64 if x.dtype == torch.float64 else torch.int32, device=x.device)


def block_moments(x: Tensor, blocks: Tensor) -> Tensor:
    """Note that the sums of blocks are asked for; see `protocol.Kernels.block_moments`."""
    note(Work("maxima", numel=x.numel()))
    return torch.empty(len(blocks), 3, dtype=torch.float64, device=x.device)


def rotate(x: Tensor, blocks: Tensor, *_: Any, **__: Any) -> None:
    """Note that blocks are to be turned; see `protocol.Kernels.rotate`."""
    note(Work("rotate", numel=x.numel()))


def narrow(x: Tensor, *_: Any, **__: Any) -> None:
    """Note that coordinates are to be rounded to bf16; see `protocol.Kernels.narrow`."""
    note(Work("narrow", numel=x.numel()))


def encode(x: Tensor, blocks: Tensor, wire: Tensor, q: Quantiser, *_: Any, **__: Any) -> None:
    """Note that blocks are to be encoded; see `protocol.CodecKernels.encode`."""
    _note("encode", q, blocks, x.numel())


def reduce(wires: Tensor, blocks: Tensor, out: Tensor, q: Quantiser, *_: Any, **__: Any) -> None:
    """Note that messages are to be averaged and the mean encoded; see `protocol.CodecKernels.reduce`."""
    _note("reduce", q, blocks, sources=wires.shape[0])


def decode(wires: Tensor, blocks: Tensor, x: Tensor, q: Quantiser, *_: Any, **__: Any) -> int:
    """Note that messages are to be decoded; see `protocol.CodecKernels.decode`. Returns 0: no block is infinite."""
    _note("decode", q, blocks, x.numel(), wires.shape[0])
    return 0


def decode_sum(wire: Tensor, scales: Tensor, blocks: Tensor, x: Tensor, q: Quantiser, keys: Any) -> int:
    """Note that a sum of codes is to be decoded; see `protocol.Kernels.decode_sum`. Returns 0: no block is infinite."""
    _note("decode_sum", q, blocks, x.numel(), len(keys))
    return 0


def combine(mine: Tensor, theirs: Tensor, blocks: Tensor, q: Quantiser, key: Any) -> None:
    """Note that codes are to be added in pairs; see `protocol.Kernels.combine`."""
    _note("combine", q, blocks)


def _note(kind: str, q: Quantiser, blocks: Tensor, most: int | None = None, sources: int = 1) -> None:
    numel = len(blocks) * q.block_size
    note(Work(kind, codec_name(q.kind, q.bits), numel if most is None else min(numel, most), sources))
