"""The reducer `lossless`: the schedule of `two_shot` with exact gradients, whose exponents are entropy-coded.

Coordinates of a gradient differ by orders of magnitude, but few exponents are frequent: the exponents of normal numbers
have an entropy of 2.54 bits, but bf16 and fp32 use 8 bits (ZipCCL, arXiv 2604.27844). Signs and mantissas are noise, so
they are sent unchanged. So bf16 numbers take about 10.6 bits, and fp32 numbers take 26.6 bits.

The w bits of a number are rotated left by one, so that its sign becomes the last bit and its exponent the first bits.
The first bytes of all numbers form one stream, which zlib writes in Huffman codes alone (RFC 1951, by the strategy
Z_HUFFMAN_ONLY). For bf16 and fp32, the first byte is the exponent. For fp16, it also has three bits of the mantissa,
and for fp64, it lacks three bits of the exponent. A message is a byte 1, the other bytes of the numbers unchanged, and
the coded stream. If the code saves nothing, a message is a byte 0 and the unchanged numbers.

The owner of a shard adds the ranks' numbers in rank order in fp64, each divided by the number of ranks, and rounds the
mean once, to the gradient's dtype. All ranks decode the owner's message, so all ranks have the same bits. Each piece is
divided into equal shards; results do not depend on the division. A rank sends 2 (n-1)/n messages, after their lengths.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs import Codec
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import LENGTH
from lightning_gqsgd.reducers.base import Exchange, Setting, StepKeys, Steps, WholeNumbers, gathered
from lightning_gqsgd.reducers.memory import MemoryStore

#: The first byte of a message: whether the stream is coded.
_CODED = b"\1"
_AS_THEY_ARE = b"\0"
#: Window of zlib. A negative number means that there is no header and no checksum.
_WINDOW = -15
#: The integer types, in torch and in NumPy, for the bits of numbers with this number of bytes.
_INTEGERS = {2: (torch.int16, "<u2"), 4: (torch.int32, "<u4"), 8: (torch.int64, "<u8")}


class Lossless(WholeNumbers):
    """Averages each shard on its owner, from exact gradients with entropy-coded exponents."""

    lengths_vary: ClassVar[bool] = True

    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        self.ranks = setting.ranks
        numel = int(table[:, LENGTH].sum())
        self._bounds = [numel * rank // self.ranks for rank in range(self.ranks + 1)]
        self.message_bytes = numel * setting.dtype.itemsize
        self.sent_bytes = 0

    @staticmethod
    def check(codec: Codec) -> None:
        if codec.name != "float":
            raise ConfigError(
                f"reducer='lossless' is for bits=32, which keeps every gradient as it is, not bits={codec.bits}; "
                "leave bits out, or reducer"
            )

    @staticmethod
    def check_device(setting: Setting, device: torch.device) -> None:
        if device.type != "cpu":
            raise ConfigError(
                f"reducer='lossless' is for tensors on the CPU, not on {device}: its codes have no fixed length; take "
                "reducer='native'"
            )

    @staticmethod
    def stages(setting: Setting) -> int:
        return 4

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        shards = [x[low:high] for low, high in zip(self._bounds[:-1], self._bounds[1:], strict=True)]
        messages = [b"" if owner == rank else pack(shard) for owner, shard in enumerate(shards)]
        received = yield from self._to_owners(messages)

        mean = torch.zeros(len(shards[rank]), dtype=torch.float64, device="cpu")
        for sender, message in enumerate(received):
            values = shards[rank] if sender == rank else unpack(message, len(mean), x.dtype)
            mean.add_(values.double(), alpha=1 / self.ranks)  # divided first, because sums of fp64 may overflow
        means = yield from gathered(_tensor(pack(mean.to(x.dtype))), self.ranks)

        for shard, packed in zip(shards, means, strict=True):
            shard.copy_(unpack(packed.numpy().tobytes(), len(shard), x.dtype))
        self._count(sum(map(len, messages)) + (self.ranks - 1) * max(map(len, means)), x.nbytes)
        return 0

    def _to_owners(self, messages: Sequence[bytes]) -> Generator[Sequence[Exchange], None, list[bytes]]:
        """Send a message to each rank. Returns the received messages, by rank."""
        lengths = torch.tensor([len(message) for message in messages], device="cpu")
        coming = torch.empty_like(lengths)
        yield (Exchange("all_to_all", coming, lengths),)
        into = coming.tolist()
        received = torch.empty(sum(into), dtype=torch.uint8, device="cpu")
        sent = _tensor(b"".join(messages))
        yield (Exchange("all_to_all", received, sent, (into, lengths.tolist())),)
        return [part.numpy().tobytes() for part in received.split(into)]

    def _count(self, sent_bytes: int, nbytes: int) -> None:
        others = self.ranks - 1
        # Lengths of 8 bytes are included: each rank sends one to every other rank in both exchanges.
        self.sent_bytes = sent_bytes + 16 * others if others else 0
        self.message_bytes = self.sent_bytes * self.ranks // (2 * others) if others else nbytes


def pack(values: Tensor) -> bytes:
    """Returns the message for numbers.

    Args:
        values: floating-point numbers on the CPU, [numel].
    """
    width = values.dtype.itemsize
    bits = _rotated(_bits_of(values), 1)
    planes = bits.view(np.uint8).reshape(-1, width)
    coder = zlib.compressobj(1, zlib.DEFLATED, _WINDOW, 9, zlib.Z_HUFFMAN_ONLY)
    code = coder.compress(planes[:, width - 1].tobytes()) + coder.flush()
    if len(code) >= len(bits):
        return _AS_THEY_ARE + _bits_of(values).tobytes()
    return _CODED + np.ascontiguousarray(planes[:, : width - 1]).tobytes() + code


def unpack(message: bytes, numel: int, dtype: torch.dtype) -> Tensor:
    """Returns the numbers of a message, [numel], with all their bits. Nothing in the message is trusted.

    Args:
        message: the result of `pack`.
        numel: number of numbers in the message.
        dtype: dtype of the numbers.

    Raises:
        ValueError: if the message is not a message of ``numel`` numbers of this dtype.
    """
    width = dtype.itemsize
    _, name = _INTEGERS[width]
    kind = message[:1]
    rest = numel * (width - 1)
    planes = np.empty((numel, width), np.uint8)
    if kind == _AS_THEY_ARE and len(message) == 1 + numel * width:
        planes[:] = np.frombuffer(message, np.uint8, offset=1).reshape(numel, width)
        return _floats(planes.view(name)[:, 0] if numel else np.empty(0, name), dtype)
    decoder = zlib.decompressobj(_WINDOW)
    try:
        # At most one byte too many is decoded, so that a corrupt message cannot use much memory.
        first = decoder.decompress(message[1 + rest :], numel + 1) if kind == _CODED else b""
    except zlib.error as error:
        raise ValueError(f"corrupt message: {error}") from error
    if len(first) != numel or not decoder.eof or decoder.unused_data:
        raise ValueError(f"corrupt message: {len(message):,} bytes are no message of {numel:,} numbers of {dtype}")
    planes[:, : width - 1] = np.frombuffer(message, np.uint8, rest, 1).reshape(numel, width - 1)
    planes[:, width - 1] = np.frombuffer(first, np.uint8)
    return _floats(_rotated(planes.view(name)[:, 0], 8 * width - 1), dtype)


def _bits_of(values: Tensor) -> np.ndarray:
    """Returns the bits of numbers as unsigned integers."""
    integer, name = _INTEGERS[values.dtype.itemsize]
    return values.detach().contiguous().view(integer).numpy().view(name)


def _floats(bits: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Returns the numbers with these bits."""
    integer, name = _INTEGERS[dtype.itemsize]
    return torch.from_numpy(np.ascontiguousarray(bits).view(name.replace("u", "i"))).view(dtype)


def _rotated(bits: np.ndarray, left: int) -> np.ndarray:
    """Returns integers whose bits are rotated to the left by ``left`` places."""
    width = 8 * bits.itemsize
    return (bits << bits.dtype.type(left)) | (bits >> bits.dtype.type(width - left))


def _tensor(message: bytes) -> Tensor:
    """Returns a message as a tensor, uint8 [bytes]."""
    return torch.from_numpy(np.frombuffer(message, np.uint8).copy())
