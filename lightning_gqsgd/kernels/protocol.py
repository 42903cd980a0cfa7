"""The interfaces of kernels and of quantisers: `Kernels` has the functions, and `Quantiser` is a codec for kernels.

`reference` (PyTorch on any device), `cpu` (Numba) and `cuda` (Triton) are modules with the functions of `Kernels`. The
three give the same codes, and decode codes to the same bits. `reference` defines the right results.

Common arguments:

* ``x``: flat gradient of dtype fp32, fp16, bf16 or fp64, [numel].
* ``blocks``: block table on the host, int64 [number of blocks, `layout.COLUMNS`]. Its first column counts coordinates
  of ``x``, and its byte positions count from the start of the message that is passed with it.
* ``wire``: one message, uint8 [bytes]. ``wires``: one message of each source, uint8 [sources, bytes].
* ``how``: a `Coding`, with the block table and the quantiser.
* ``key``: the two 32-bit dither keys of one stream. ``keys``: the dither keys of each source, in rank order.
* ``origin``: what is added to the table's numbers of parameters and of blocks, see `wire.Origin`.
* ``scales``: the scale of each block, as the bits of the compute dtype: int32 for fp32, fp16 and bf16 gradients, int64
  for fp64 ones, [number of blocks]. Bits of non-negative floats are ordered like the floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.kernels.wire import NO_ORIGIN, Key, Origin

#: A number of blocks. On a GPU, this is a 0-d tensor on the GPU, so that the host does not wait for the number.
Count = int | Tensor

#: The length of a block, or an array or a tensor of the lengths of several blocks.
Lengths = TypeVar("Lengths", int, np.ndarray, Tensor)


class Kind(NamedTuple):
    """A family of codes, from which kernels are chosen. Each quantiser has a kind.

    The package of a family has two modules beside its codec:

    * ``cpu`` has the functions that `cpu.stages` calls: ``numbers_of(q, dtype, sources)`` returns the family's
      constants for a quantiser, typed for kernels, and ``codec(q)`` returns the kernel that encodes, reduces and
      decodes (`cpu.blocks.codec_kernel`). Families whose codes can be added also have ``is_for_sums(q)``, which returns
      whether the messages of a quantiser are added, ``summed(q)``, which returns the kernel that decodes sums, and, for
      sums of pairs, ``combine``.
    * ``cuda`` has ``FAMILY``, an object with the functions of `Kernels` that take a `Coding`. Only families whose codes
      can be added have `Kernels.decode_sum` and `Kernels.combine`.

    Attributes:
        name: name of the family, also in tables of costs.
        package: the package with the family's fast kernels. If it is empty, or has no kernels for a device, `reference`
            is used there.
        is_padded: whether a record has `rotation.padded` codes, instead of one code for each coordinate of the block.
    """

    name: str
    package: str = ""
    is_padded: bool = False

    def module(self, name: str) -> ModuleType | None:
        """Returns the module ``cpu`` or ``cuda`` of the package; None if the package does not have it."""
        return _module(f"{self.package}.{name}") if self.package else None


@cache  # called for each message
def _module(name: str) -> ModuleType | None:
    return None if find_spec(name) is None else import_module(name)


class Quantiser(Protocol):
    """One codec at one block size, as kernels see it: a frozen, hashable value.

    Each family has its own class in `codecs`. The class has the numbers that kernels need, and encodes and decodes in
    readable PyTorch; `reference` calls these methods. The class is a `ScaledQuantiser` or a `WholeQuantiser`.

    Attributes:
        kind: the family.
        is_whole: True for a `WholeQuantiser`, and False for a `ScaledQuantiser`.
        bits: bits of one code on the wire.
        block_size: the largest number of coordinates in a block.
        summable: whether codes are in lanes, so that messages can be added without a carry from lane to lane.
    """

    @property
    def kind(self) -> Kind: ...

    @property
    def is_whole(self) -> bool: ...

    @property
    def bits(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def summable(self) -> bool: ...

    def record_bytes(self, length: np.ndarray, raw_bytes: int) -> np.ndarray:
        """Returns the number of bytes of the codes of each block with these lengths. ``raw_bytes`` is the number of
        bytes of one uncompressed coordinate."""
        ...

    def __hash__(self) -> int: ...


class ScaledQuantiser(Quantiser, Protocol):
    """A quantiser whose records are a scale and codes of a fixed width."""

    def encode(self, values: Tensor, lengths: Tensor, scales: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the codes of blocks, int64 [B, width], and a flag of each block, bool [B], which is sent with its
        scale.

        Args:
            values: coordinates in the compute dtype, [B, width], zero beyond the end of a block.
            lengths: number of coordinates of each block, int64 [B].
            scales: the blocks' scales, [B]; 0 if a block is all zero or not finite.
            uniform: the dither, fp32 on (0, 1), [B, width].
        """
        ...

    def decode(self, codes: Tensor, scales: Tensor, flags: Tensor, uniform: Tensor) -> Tensor:
        """Returns the coordinates of codes, [B, width]. ``codes`` and ``flags`` are results of `encode`, and the other
        arguments are the same as there."""
        ...


class SummableQuantiser(ScaledQuantiser, Protocol):
    """A quantiser whose codes can be added."""

    def decode_sum(self, codes: Tensor, scales: Tensor, uniforms: Sequence[Tensor]) -> Tensor:
        """Returns the mean from the sums of all ranks' codes, [B, width]. ``uniforms`` are the dithers of all ranks."""
        ...

    def combine(self, codes: Tensor, others: Tensor, words: Tensor) -> Tensor:
        """Returns unbiased codes of the sums of two codes' numbers, if codes can be added in pairs. All arguments are
        int64 [B, width].

        Args:
            codes: codes of one side.
            others: codes of the other side, under the same scales.
            words: uniform 32-bit integers.
        """
        ...


class WholeQuantiser(Quantiser, Protocol):
    """A quantiser that writes the whole record of a block itself, and its scale if there is one."""

    def write(self, values: Tensor, blocks: Tensor, wire: Tensor, key: Key) -> None:
        """Write the records of blocks.

        Args:
            values: coordinates in the compute dtype, [B, width], zero beyond the end of a block.
            blocks: the block table, int64 [B, `layout.COLUMNS`].
            wire: the message, uint8 [bytes].
            key: the dither keys of the message.
        """
        ...

    def read(self, wire: Tensor, blocks: Tensor, dtype: torch.dtype, key: Key, factor: float) -> Tensor:
        """Returns the coordinates of blocks times ``factor``, [B, block_size], in the compute dtype ``dtype``."""
        ...


class Coding(NamedTuple):
    """How the blocks of messages are coded. A sender and its receivers have the same.

    Attributes:
        blocks: the block table.
        q: the quantiser.
        rotation: key of the rotation that is applied to blocks before they are encoded, and undone after they are
            decoded; see `Kernels.rotate`. None: no rotation.
        origin: what is added to the table's numbers of parameters and of blocks.
    """

    blocks: Tensor
    q: Quantiser
    rotation: Key | None = None
    origin: Origin = NO_ORIGIN


class Kernels(Protocol):
    """The functions of a set of kernels. The module's docstring describes common arguments."""

    def encode(self, x: Tensor, how: Coding, wire: Tensor, key: Key, scales: Tensor | None = None) -> None:
        """Write the record of each block: its codes, and its scale if the table has a place for it. A raw block's
        record has its coordinates in the compute dtype. ``x`` is not changed.

        Args:
            scales: the scales to use. Coordinates beyond their scale are clipped. None: the largest magnitude of each
                block, rounded up to the wire's format. A `WholeQuantiser` takes no scales.
        """
        ...

    def reduce(
        self, wires: Tensor, how: Coding, x: Tensor, keys: Sequence[Key], own: int, out: Tensor, out_key: Key
    ) -> None:
        """Decode one shard's messages, add them in rank order, add the coordinates of this rank, and encode the mean
        into ``out``. The mean stays rotated, and ``x`` is not changed.

        Args:
            own: number of the source whose coordinates, not rotated, are in ``x``; see `decode`.
            out: the mean's message, uint8 [bytes].
            out_key: dither keys of the mean's codes.
        """
        ...

    def decode(self, wires: Tensor, how: Coding, x: Tensor, keys: Sequence[Key], own: int | None = None) -> Count:
        """Write the mean of the decoded messages into ``x``. Returns the number of blocks that are not finite.

        The mean of finite coordinates is finite: in a 16-bit dtype, the mean of compressed blocks is clamped to the
        largest number.

        Args:
            own: number of the source whose coordinates, not rotated, are in ``x`` before the call. It averages the
                messages, so it has them exactly, and its message is not decoded. They are added last. If a coded block
                of them is not finite, the result is NaN everywhere in the block. Messages have raw blocks exactly, so
                the raw blocks of all sources are taken from messages, and are added in the order of the sources. None:
                all messages are decoded.
        """
        ...

    def block_maxima(self, x: Tensor, blocks: Tensor) -> Tensor:
        """Returns the largest magnitude of each block, in the form of ``scales``: int32 or int64 [B].

        NaN and infinity are larger than every finite number, so that an integer MAX over ranks keeps them.
        """
        ...

    def block_moments(self, x: Tensor, blocks: Tensor) -> Tensor:
        """Returns the sums Σ |x| and Σ x² of each block, fp64 [B, 2].

        Coordinates l, l + 16, l + 32, ... are added in lane l, and then the 16 lanes are added in order. All kernels
        add in this order, so they give the same bits.
        """
        ...

    def rotate(
        self,
        x: Tensor,
        blocks: Tensor,
        key: Key,
        block_size: int,
        *,
        inverse: bool = False,
        origin: Origin = NO_ORIGIN,
    ) -> None:
        """Rotate each block that is not raw by H D, in place, or back by D H if ``inverse`` is true.

        D is diagonal, with random signs from ``key``, and H is the orthonormal Hadamard matrix. If the length of a
        block is not a power of two, the block is rotated in parts, whose lengths are descending powers of two. ``x`` is
        fp32 or fp64.
        """
        ...

    def decode_sum(self, wire: Tensor, how: Coding, x: Tensor, keys: Sequence[Key], scales: Tensor) -> Count:
        """Decode one message of summed codes, and write the mean into ``x`` as `decode` does. Returns the number of
        blocks that are not finite."""
        ...

    def narrow(
        self, x: Tensor, blocks: Tensor, out: Tensor, key: Key, block_size: int, factor: float, limit: int
    ) -> None:
        """Write the coordinates of all blocks, including raw blocks, times a factor, rounded stochastically to bf16;
        see `narrowing`.

        Args:
            x: fp32 [numel], contiguous.
            out: bf16 [numel], contiguous.
            key: the dither keys of the message.
            block_size: the largest number of coordinates in a block.
            factor: the factor of all coordinates, in fp32.
            limit: bits of the largest magnitude that is written, an fp32 number.
        """
        ...

    def combine(self, mine: Tensor, theirs: Tensor, how: Coding, key: Key) -> None:
        """Replace the codes of one message by unbiased codes of the sums of both messages' numbers.

        The quantiser has to have `SummableQuantiser.combine`; see `codecs.exponential.codec`.

        Args:
            mine: uint8 [bytes], codes without scales; changed in place.
            theirs: uint8 [bytes], codes of the same blocks.
            key: key of the random numbers.
        """
        ...
