"""Fast kernels on CUDA devices, in Triton: one pass over memory per stage, and no wait for the device.

`protocol.Kernels` describes the functions and their arguments. Codes are the same as those of `reference`. `decode` and
`decode_sum` return the number of blocks that are not finite as a tensor on the device.

A program handles a tile (see `tiles`) of 4096 coordinates, or of one block. The numbers of a codec are constants of a
compiled kernel (see `constants`), so each codec has its own kernels. Products and sums are not contracted, and
divisions are rounded correctly, as in `reference`.

Each family of codes has its own kernels, see `protocol.Kind`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_gqsgd.kernels import reference
from lightning_gqsgd.kernels.cuda import launch
from lightning_gqsgd.kernels.cuda.constants import constants_of
from lightning_gqsgd.kernels.cuda.measures import maxima_kernel, moments_kernel
from lightning_gqsgd.kernels.cuda.narrow import Narrowing, narrow_kernel
from lightning_gqsgd.kernels.cuda.rotation import Rotation, rotate_kernel
from lightning_gqsgd.kernels.protocol import Coding, Count, Kind
from lightning_gqsgd.kernels.wire import NO_ORIGIN, Key, Origin, scale_format


@cache  # called at each launch
def _kernels_of(kind: Kind) -> Any:
    """Returns the kernels of a family. If the family has no fast kernels, returns `reference`."""
    family = kind.module("cuda")
    return reference if family is None else family.FAMILY


#: Number of coordinates of a block that `block_maxima` and `block_moments` read together. Blocks may be longer.
_MEASURED = 256


def block_maxima(x: Tensor, blocks: Tensor) -> Tensor:
    """Find the largest magnitude of each block; see `protocol.Kernels.block_maxima`."""
    out = torch.empty(len(blocks), dtype=scale_format(x.dtype).integer, device=x.device)
    launch.run(maxima_kernel, constants_of(x.dtype, _MEASURED), blocks, x, out, splits=False)
    return out


def block_moments(x: Tensor, blocks: Tensor) -> Tensor:
    """Sum |x| and x² of each block; see `protocol.Kernels.block_moments`."""
    out = torch.empty(len(blocks), 2, dtype=torch.float64, device=x.device)
    launch.run(moments_kernel, constants_of(x.dtype, _MEASURED), blocks, x, out, splits=False)
    return out


def rotate(
    x: Tensor, blocks: Tensor, key: Key, block_size: int, *, inverse: bool = False, origin: Origin = NO_ORIGIN
) -> None:
    """Rotate blocks by the randomised Hadamard transform, or back; see `protocol.Kernels.rotate`."""
    c = constants_of(x.dtype, block_size, Rotation(inverse))
    launch.run(rotate_kernel, c, blocks, x, launch.packed(key), origin=origin)


def narrow(x: Tensor, blocks: Tensor, out: Tensor, key: Key, block_size: int, factor: float, limit: int) -> None:
    """Round coordinates to bf16 at random; see `protocol.Kernels.narrow`."""
    c = constants_of(x.dtype, block_size, Narrowing(factor, limit))
    if not launch.is_aligned(out):  # both tensors need the same alignment, because they share one table
        aligned = torch.empty_like(out)
        narrow(x, blocks, aligned, key, block_size, factor, limit)
        out.copy_(aligned)
        return
    if not launch.is_aligned(x):
        x = x.clone()  # otherwise, the kernel would be compiled for this alignment in the middle of a step
    launch.run(narrow_kernel, c, blocks, out.view(torch.int16), x, launch.packed(key))


def encode(x: Tensor, how: Coding, wire: Tensor, key: Key, scales: Tensor | None = None) -> None:
    """Encode blocks into a message; see `protocol.Kernels.encode`."""
    _kernels_of(how.q.kind).encode(x, how, wire, key, scales)


def reduce(wires: Tensor, how: Coding, x: Tensor, keys: Sequence[Key], own: int, out: Tensor, out_key: Key) -> None:
    """Average the messages of one shard, and encode the mean; see `protocol.Kernels.reduce`."""
    _kernels_of(how.q.kind).reduce(wires, how, x, keys, own, out, out_key)


def decode(wires: Tensor, how: Coding, x: Tensor, keys: Sequence[Key], own: int | None = None) -> Count:
    """Decode messages, and write their mean into ``x``; see `protocol.Kernels.decode`. The number is a tensor on the
    device, int32 []."""
    bad: Count = _kernels_of(how.q.kind).decode(wires, how, x, keys, own)
    return bad


def decode_sum(wire: Tensor, how: Coding, x: Tensor, keys: Sequence[Key], scales: Tensor) -> Count:
    """Decode the sum of all ranks' codes, and write the mean into ``x``; see `protocol.Kernels.decode_sum`. The number
    is a tensor on the device, int32 []."""
    bad: Count = _kernels_of(how.q.kind).decode_sum(wire, how, x, keys, scales)
    return bad


def combine(mine: Tensor, theirs: Tensor, how: Coding, key: Key) -> None:
    """Add the codes of two messages in pairs, without bias; see `protocol.Kernels.combine`."""
    _kernels_of(how.q.kind).combine(mine, theirs, how, key)
