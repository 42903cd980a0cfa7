"""The functions of `protocol.Kernels`: what tensors become before a kernel is called.

Kernels take contiguous arrays. Numba has no 16-bit floats on the CPU, so that coordinates in bf16 and fp16 are widened
to fp32 first, and PyTorch rounds them afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.kernels import reference
from lightning_gqsgd.kernels.cpu.blocks import LONGEST_TOGETHER, TOGETHER, Received, Scratch, Sent
from lightning_gqsgd.kernels.cpu.narrow import round_blocks
from lightning_gqsgd.kernels.cpu.rotation import Turn, rotate_blocks
from lightning_gqsgd.kernels.cpu.scales import float_type, form_of, integer_type
from lightning_gqsgd.kernels.cpu.statistics import LANES, maxima, moments
from lightning_gqsgd.kernels.cpu.vectors import VECTOR_BYTES
from lightning_gqsgd.kernels.families import cpu_family
from lightning_gqsgd.kernels.layout import LENGTH, START
from lightning_gqsgd.kernels.protocol import Own, Quantiser
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, Key, scale_format


def block_maxima(x: Tensor, blocks: Tensor) -> Tensor:
    """Find the largest magnitude of each block; see `protocol.Kernels.block_maxima`."""
    out = torch.empty(len(blocks), dtype=scale_format(x.dtype).integer, device="cpu")
    with _widened(x, blocks) as (values, table):
        maxima(values, table, form_of(x.dtype).mask, out.numpy())
    return out


def block_moments(x: Tensor, blocks: Tensor) -> Tensor:
    """Sum x, |x| and x² of each block; see `protocol.Kernels.block_moments`."""
    out = torch.empty(len(blocks), 3, dtype=torch.float64, device="cpu")
    with _widened(x, blocks) as (values, table):
        moments(values, table, np.empty((3, LANES)), out.numpy())
    return out


def rotate(x: Tensor, blocks: Tensor, key: Key, block_size: int, *, inverse: bool = False) -> None:
    """Turn blocks by the randomised Hadamard transform, or back; see `protocol.Kernels.rotate`."""
    scratch = _scratch(block_size, x.dtype)
    rotate_blocks(x.numpy(), blocks.numpy(), Turn.of(key, block_size, x.dtype), inverse, scratch.u)


def combine(mine: Tensor, theirs: Tensor, blocks: Tensor, q: Quantiser, key: Key) -> None:
    """Add the codes of two messages in pairs, without bias; see `protocol.Kernels.combine`."""
    _family_of(q).combine(mine.numpy(), theirs.numpy(), blocks.numpy(), q, np.array(key, dtype=np.uint32))


def narrow(x: Tensor, blocks: Tensor, out: Tensor, key: Key, factor: float, limit: int) -> None:
    """Round coordinates to bf16 at random; see `protocol.Kernels.narrow`."""
    values = x.detach().numpy()
    bits = out.view(torch.int16).numpy().view(np.uint16)
    keys = np.array(key, dtype=np.uint32)
    round_blocks(values, blocks.numpy(), keys, np.float32(factor), np.uint32(limit), bits)


def encode(
    x: Tensor,
    blocks: Tensor,
    wire: Tensor,
    q: Quantiser,
    key: Key,
    scales: Tensor | None = None,
    rotation: Key | None = None,
) -> None:
    """Encode blocks into a message; see `protocol.Kernels.encode`."""
    if cpu_family(q.kind) is None:
        reference.encode(x, blocks, wire, q, key, scales, rotation)
        return
    given = None if scales is None else scales.numpy()
    with _widened(x, blocks) as (values, table):
        _run(values, table, q, x.dtype, sent=_sent(wire, key, x.dtype, given), rotation=rotation)


def reduce(
    wires: Tensor,
    blocks: Tensor,
    out: Tensor,
    q: Quantiser,
    keys: Sequence[Key],
    out_key: Key,
    own: Own,
) -> None:
    """Average the messages of one shard, and encode the mean; see `protocol.Kernels.reduce`."""
    if cpu_family(q.kind) is None:
        reference.reduce(wires, blocks, out, q, keys, out_key, own)
        return
    received = _received(wires, keys, own.source)
    sent = _sent(out, out_key, own.x.dtype)
    with _widened(own.x, blocks) as (values, table):
        _run(values, table, q, own.x.dtype, received=received, sent=sent, rotation=own.rotation)


def decode(
    wires: Tensor,
    blocks: Tensor,
    x: Tensor,
    q: Quantiser,
    keys: Sequence[Key],
    rotation: Key | None = None,
    own: int | None = None,
) -> int:
    """Decode messages, and write their mean into ``x``; see `protocol.Kernels.decode`."""
    if cpu_family(q.kind) is None:
        return reference.decode(wires, blocks, x, q, keys, rotation, own)
    with _widened(x, blocks, write=True) as (values, table):
        return _run(values, table, q, x.dtype, received=_received(wires, keys, own), rotation=rotation)


def decode_sum(wire: Tensor, scales: Tensor, blocks: Tensor, x: Tensor, q: Quantiser, keys: Sequence[Key]) -> int:
    """Decode the sum of all ranks' codes, and write the mean into ``x``; see `protocol.Kernels.decode_sum`."""
    family = _family_of(q)
    scratch = _scratch(q.block_size, x.dtype)
    constants = family.constants(q, x.dtype, len(keys))
    with _widened(x, blocks, write=True) as (values, table):
        return family.summed(q)(wire.numpy(), scales.numpy(), table, values, _keys(keys), constants, scratch)


def _run(
    values: np.ndarray,
    table: np.ndarray,
    q: Quantiser,
    dtype: torch.dtype,
    *,
    received: Received | None = None,
    sent: Sent | None = None,
    rotation: Key | None = None,
) -> int:
    """Call the kernel that encodes, reduces and decodes, see `blocks.codec_kernel`."""
    family = _family_of(q)
    sources = 1 if received is None else len(received.keys)
    if received is None and not family.is_for_sums(q):  # the same machine code as for decoding
        received = Received(np.empty(0, np.uint8), 0, _keys([]), -1)
    turn = None if rotation is None else Turn.of(rotation, q.block_size, dtype)
    sent = sent or _sent(torch.empty(0, dtype=torch.uint8, device="cpu"), (0, 0), dtype)
    constants = family.constants(q, dtype, sources)
    scratch = _scratch(q.block_size, dtype)
    return family.codec(q)(values, table, received, sent, turn, constants, scratch)


def _family_of(q: Quantiser) -> ModuleType:
    """Returns the parts of kernels that a quantiser's family has, see `kernels.families`."""
    family = cpu_family(q.kind)
    assert family is not None
    return family


@contextmanager
def _widened(x: Tensor, blocks: Tensor, *, write: bool = False) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Returns the coordinates that blocks span, in the compute dtype, and a block table that counts from the first of
    them.

    Args:
        x: coordinates of a gradient dtype.
        blocks: block table.
        write: whether to put the coordinates back into ``x`` afterwards. What lies between the blocks comes back as it
            was.
    """
    compute = COMPUTE_DTYPES[x.dtype]
    x = x.detach()
    if not len(blocks):
        yield np.empty(0, float_type(x.dtype)), blocks.numpy()
        return
    if compute == x.dtype and x.is_contiguous():
        yield x.numpy(), blocks.numpy()
        return
    table = blocks.numpy().copy()
    first = int(table[:, START].min())
    spanned = x[first : int((table[:, START] + table[:, LENGTH]).max())]
    wide = spanned.to(compute).contiguous()
    table[:, START] -= first
    yield wide.numpy(), table
    if write:
        spanned.copy_(wide)


def _received(wires: Tensor, keys: Sequence[Key], own: int | None) -> Received:
    """Returns the messages to decode; ``wires``: uint8 [sources, bytes]."""
    return Received(wires.flatten().numpy(), wires.shape[1], _keys(keys), -1 if own is None else own)


def _sent(wire: Tensor, key: Key, dtype: torch.dtype, scales: np.ndarray | None = None) -> Sent:
    """Returns a message to write, under scales if they are given; ``wire``: uint8 [bytes]."""
    scales = np.empty(0, integer_type(dtype)) if scales is None else scales
    return Sent(wire.numpy(), np.array(key, dtype=np.uint32), scales)


def _keys(keys: Sequence[Key]) -> np.ndarray:
    """Returns the dither keys of streams, uint32 [streams, 2]."""
    return np.array(keys, dtype=np.uint32).reshape(-1, 2)


def _scratch(block_size: int, dtype: torch.dtype) -> Scratch:
    """Returns the space for blocks. Every call has its own, because kernels run on several threads at once."""
    size = max(block_size, TOGETHER * min(block_size, LONGEST_TOGETHER)) + 1
    real = float_type(dtype)
    return Scratch(
        u=_aligned(size, np.float32),
        other=_aligned(size, np.float32),
        codes=_aligned(size, np.uint8),
        mean=_aligned(size, real),
        own=_aligned(size, real),
        turned=_aligned(size, real),
        largest=np.empty(TOGETHER, np.int64),
        factors=np.empty(TOGETHER, real),
        flags=np.empty(TOGETHER, np.bool_),
    )


def _aligned(size: int, dtype: type[np.generic]) -> np.ndarray:
    """Returns an array whose vectors lie within lines of the processor's cache."""
    memory = np.empty(size * np.dtype(dtype).itemsize + VECTOR_BYTES, np.uint8)
    first = -memory.ctypes.data % VECTOR_BYTES
    return memory[first : first + size * np.dtype(dtype).itemsize].view(dtype)
