"""The functions of `protocol.Kernels` for CPUs. They convert tensors to arrays, and call a kernel.

Kernels take contiguous arrays. Numba has no 16-bit floats on the CPU, so coordinates in bf16 and fp16 are widened to
fp32 first, and PyTorch rounds results to 16 bits.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.kernels import reference
from lightning_gqsgd.kernels.cpu.blocks import LONGEST_TOGETHER, TOGETHER, Constants, Received, Scratch, Sent
from lightning_gqsgd.kernels.cpu.narrow import round_blocks
from lightning_gqsgd.kernels.cpu.rotation import Rotation, roots_of, rotate_blocks
from lightning_gqsgd.kernels.cpu.scales import form_of
from lightning_gqsgd.kernels.cpu.statistics import maxima, moments
from lightning_gqsgd.kernels.cpu.vectors import VECTOR_BYTES
from lightning_gqsgd.kernels.layout import LENGTH, START
from lightning_gqsgd.kernels.protocol import Coding, Quantiser
from lightning_gqsgd.kernels.wire import (
    COMPUTE_DTYPES,
    NO_ORIGIN,
    Key,
    Origin,
    Share,
    float_type,
    integer_type,
    scale_format,
)


def block_maxima(x: Tensor, blocks: Tensor) -> Tensor:
    """Find the largest magnitude of each block; see `protocol.Kernels.block_maxima`."""
    out = torch.empty(len(blocks), dtype=scale_format(x.dtype).integer, device="cpu")
    wide = _widened(x, blocks)
    maxima(wide.values, wide.table, form_of(x.dtype).mask, out.numpy())
    return out


def block_moments(x: Tensor, blocks: Tensor) -> Tensor:
    """Sum |x| and x² of each block; see `protocol.Kernels.block_moments`."""
    out = torch.empty(len(blocks), 2, dtype=torch.float64, device="cpu")
    wide = _widened(x, blocks)
    moments(wide.values, wide.table, np.empty((2, reference.LANES)), out.numpy())
    return out


def rotate(
    x: Tensor, blocks: Tensor, key: Key, block_size: int, *, inverse: bool = False, origin: Origin = NO_ORIGIN
) -> None:
    """Rotate blocks by the randomised Hadamard transform, or back; see `protocol.Kernels.rotate`."""
    u = _scratch.of(block_size, x.dtype).u
    rotate_blocks(x.numpy(), blocks.numpy(), _rotation_of(key, origin, block_size, x.dtype), inverse, u)


def combine(mine: Tensor, theirs: Tensor, how: Coding, key: Key) -> None:
    """Add the codes of two messages in pairs, without bias; see `protocol.Kernels.combine`."""
    family = how.q.kind.module("cpu")
    if family is None:
        reference.combine(mine, theirs, how, key)
        return
    family.combine(mine.numpy(), theirs.numpy(), how.blocks.numpy(), how.q, _key_of(key, how.origin))


def narrow(x: Tensor, blocks: Tensor, out: Tensor, key: Key, block_size: int, factor: float, limit: int) -> None:
    """Round coordinates to bf16 at random; see `protocol.Kernels.narrow`."""
    values = x.detach().numpy()
    bits = out.view(torch.int16).numpy().view(np.uint16)
    round_blocks(values, blocks.numpy(), _key_of(key), np.float32(factor), np.uint32(limit), bits)


def encode(x: Tensor, how: Coding, wire: Tensor, key: Key, scales: Tensor | None = None) -> None:
    """Encode blocks into a message; see `protocol.Kernels.encode`."""
    coder = _coder(how.q, x.dtype, 1)
    if coder is None:
        reference.encode(x, how, wire, key, scales)
        return
    given = coder.nothing_sent.scales if scales is None else scales.numpy()
    sent = Sent(wire.numpy(), _key_of(key, how.origin), given)
    coder.run(_widened(x, how.blocks), how, coder.nothing_received, sent)


def reduce(wires: Tensor, how: Coding, x: Tensor, keys: Sequence[Key], own: int, out: Tensor, out_key: Key) -> None:
    """Average the messages of one shard, and encode the mean; see `protocol.Kernels.reduce`."""
    coder = _coder(how.q, x.dtype, len(keys))
    if coder is None:
        reference.reduce(wires, how, x, keys, own, out, out_key)
        return
    sent = Sent(out.numpy(), _key_of(out_key, how.origin), coder.nothing_sent.scales)
    coder.run(_widened(x, how.blocks), how, _received(wires, _keys_of(keys, how.origin), own), sent)


def decode(wires: Tensor, how: Coding, x: Tensor, keys: Sequence[Key], own: int | None = None) -> int:
    """Decode messages, and write their mean into ``x``; see `protocol.Kernels.decode`."""
    coder = _coder(how.q, x.dtype, len(keys))
    if coder is None:
        return reference.decode(wires, how, x, keys, own)
    wide = _widened(x, how.blocks)
    not_finite = coder.run(wide, how, _received(wires, _keys_of(keys, how.origin), own), coder.nothing_sent)
    _write_back(wide)
    return not_finite


def decode_sum(wire: Tensor, how: Coding, x: Tensor, keys: Sequence[Key], scales: Tensor) -> int:
    """Decode the sum of all ranks' codes, and write the mean into ``x``; see `protocol.Kernels.decode_sum`."""
    coder = _coder(how.q, x.dtype, len(keys))
    if coder is None:
        return reference.decode_sum(wire, how, x, keys, scales)
    if coder.sum_kernel is None:
        raise NotImplementedError(f"messages of {how.q} cannot be added up: take a linear or an exponential codec")
    wide = _widened(x, how.blocks)
    streams = _keys_of(keys, how.origin)
    scratch = _scratch.of(how.q.block_size, x.dtype)
    arguments = (wire.numpy(), scales.numpy(), wide.table, wide.values, streams, coder.constants, scratch)
    not_finite: int = coder.sum_kernel(*arguments)
    _write_back(wide)
    return not_finite


class _Coder(NamedTuple):
    """The kernels of a quantiser, with the arguments that are the same in every call.

    Attributes:
        kernel: the kernel that encodes, reduces and decodes, see `blocks.codec_kernel`.
        sum_kernel: the kernel that decodes sums, see `blocks.sum_kernel`; None if codes of the family cannot be added.
        constants: numbers of the quantiser, typed for the kernels.
        block_size: the largest number of coordinates in a block.
        dtype: dtype of the gradients.
        nothing_received: the argument ``received`` if nothing is decoded.
        nothing_sent: the argument ``sent`` if nothing is encoded.
    """

    kernel: Any
    sum_kernel: Any
    constants: Constants
    block_size: int
    dtype: torch.dtype
    nothing_received: Received | None
    nothing_sent: Sent

    def run(self, wide: _Widened, how: Coding, received: Received | None, sent: Sent) -> int:
        """Call the kernel. Returns the number of blocks that are not finite after decoding."""
        rotation = None if how.rotation is None else _rotation_of(how.rotation, how.origin, self.block_size, self.dtype)
        scratch = _scratch.of(self.block_size, self.dtype)
        not_finite: int = self.kernel(wide.values, wide.table, received, sent, rotation, self.constants, scratch)
        return not_finite


@lru_cache
def _coder(q: Quantiser, dtype: torch.dtype, sources: int) -> _Coder | None:
    """Returns the kernels for messages or sums of ``sources`` sources; None if the family has none for CPUs."""
    family = q.kind.module("cpu")
    if family is None:
        return None
    # With an empty list of messages, encoding uses the same machine code as decoding. Families whose messages are added
    # decode with another kernel, and None leaves the decoder out of this kernel.
    no_messages = Received(np.empty(0, np.uint8), 0, _keys_of([], NO_ORIGIN), -1)
    no_message = Sent(np.empty(0, np.uint8), _key_of((0, 0)), np.empty(0, integer_type(dtype)))
    is_for_sums = hasattr(family, "is_for_sums") and family.is_for_sums(q)
    share = Share.of(sources)
    real = float_type(dtype)
    roots = roots_of(q.block_size, dtype) if q.kind.is_padded else None
    numbers = family.numbers_of(q, dtype, sources)
    return _Coder(
        kernel=family.codec(q),
        sum_kernel=family.summed(q) if hasattr(family, "summed") else None,
        constants=Constants(form_of(dtype), q.bits, real(share.each), real(share.rest), roots, numbers),
        block_size=q.block_size,
        dtype=dtype,
        nothing_received=None if is_for_sums else no_messages,
        nothing_sent=no_message,
    )


class _Widened(NamedTuple):
    """The range of coordinates from the first to the last block, in the compute dtype.

    Attributes:
        values: the coordinates.
        table: block table; it counts from the first of these coordinates.
        narrow: the original coordinates if ``values`` is a copy; None if it is not a copy.
    """

    values: np.ndarray
    table: np.ndarray
    narrow: Tensor | None = None


def _widened(x: Tensor, blocks: Tensor) -> _Widened:
    """Returns coordinates for the kernels. ``x`` can have any gradient dtype."""
    compute = COMPUTE_DTYPES[x.dtype]
    x = x.detach()
    if not len(blocks):
        return _Widened(np.empty(0, float_type(x.dtype)), blocks.numpy())
    if compute == x.dtype and x.is_contiguous():
        return _Widened(x.numpy(), blocks.numpy())
    table = blocks.numpy().copy()
    first = int(table[:, START].min())
    spanned = x[first : int((table[:, START] + table[:, LENGTH]).max())]
    table[:, START] -= first
    return _Widened(spanned.to(compute).contiguous().numpy(), table, spanned)


def _write_back(wide: _Widened) -> None:
    """Round the results of a kernel to the gradient dtype. Coordinates between the blocks do not change."""
    if wide.narrow is not None:
        wide.narrow.copy_(torch.from_numpy(wide.values))


def _received(wires: Tensor, keys: np.ndarray, own: int | None) -> Received:
    """Returns the messages to decode. ``wires`` is uint8 [sources, bytes]."""
    return Received(wires.flatten().numpy(), wires.shape[1], keys, -1 if own is None else own)


def _key_of(key: Key, origin: Origin = NO_ORIGIN) -> np.ndarray:
    """Returns the keys of a stream as `dither.block_keys` takes them, uint32 [4]."""
    return np.array((*key, *origin), np.uint32)


def _keys_of(streams: Sequence[Key], origin: Origin) -> np.ndarray:
    """Returns the keys of several streams, uint32 [streams, 4]; see `_key_of`."""
    return np.array([(*key, *origin) for key in streams], np.uint32).reshape(-1, 4)


def _rotation_of(key: Key, origin: Origin, block_size: int, dtype: torch.dtype) -> Rotation:
    """Returns the rotation with a key, for blocks of at most ``block_size`` coordinates and a gradient dtype."""
    return Rotation(_key_of(key, origin), roots_of(block_size, dtype))


class _ScratchByThread(threading.local):
    """Scratch space for blocks, which is reused by later calls.

    Each thread has its own space, because kernels run on several threads at the same time.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.dtype], Scratch] = {}

    def of(self, block_size: int, dtype: torch.dtype) -> Scratch:
        """Returns the space for blocks of at most ``block_size`` coordinates and a gradient dtype."""
        key = (block_size, dtype)
        if key not in self._made:
            self._made[key] = _new_scratch(block_size, dtype)
        return self._made[key]


_scratch = _ScratchByThread()


def _new_scratch(block_size: int, dtype: torch.dtype) -> Scratch:
    size = max(block_size, TOGETHER * min(block_size, LONGEST_TOGETHER)) + 1
    real = float_type(dtype)
    return Scratch(
        u=_aligned(size, np.float32),
        other=_aligned(size, np.float32),
        codes=_aligned(size, np.uint8),
        mean=_aligned(size, real),
        own=_aligned(size, real),
        rotated=_aligned(size, real),
        largest=np.empty(TOGETHER, np.int64),
        factors=np.empty(TOGETHER, real),
        flags=np.empty(TOGETHER, np.bool_),
    )


def _aligned(size: int, dtype: type[np.generic]) -> np.ndarray:
    """Returns an array that is aligned so that each vector is within one line of the processor's cache."""
    memory = np.empty(size * np.dtype(dtype).itemsize + VECTOR_BYTES, np.uint8)
    first = -memory.ctypes.data % VECTOR_BYTES
    return memory[first : first + size * np.dtype(dtype).itemsize].view(dtype)
