"""The interfaces of kernels and of quantisers: the functions of a set of kernels, and what they need of a codec.

`reference` (PyTorch on any device, the truth), `cpu` (Numba) and `cuda` (Triton) are modules with the functions of
`Kernels`. The three give the same codes, and decode them to the same bits.

Common arguments:

* ``x``: flat gradient of dtype fp32, fp16, bf16 or fp64, [numel].
* ``blocks``: block table, int64 [number of blocks, `layout.COLUMNS`]. Its first column counts coordinates of ``x``, and
  its byte positions count from the start of the message that is passed with it.
* ``wire``: one message, uint8 [bytes]. ``wires``: one message of each source, uint8 [sources, bytes].
* ``q``: the quantiser. ``key``: the two 32-bit dither keys of one stream; ``keys``: those of each source, in rank
  order.
* ``scales``: the scale of each block, as the bits of the compute dtype: int32 for fp32, fp16 and bf16 gradients, int64
  for fp64 ones, [number of blocks]. Bits of non-negative floats are ordered like the floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.kernels.wire import Key

#: A number of blocks. On a GPU, this is a 0-d tensor on the GPU, so that the host does not wait for the number.
Count = int | Tensor

#: The length of a block, or an array or a tensor of the lengths of several blocks.
Lengths = TypeVar("Lengths", int, np.ndarray, Tensor)


class Kind(NamedTuple):
    """A family of codes that kernels tell apart; the family's quantiser says which.

    Attributes:
        name: name of the family, which its costs have as well.
        package: the package with the family's fast kernels, see `families`; empty: the family has those of `reference`.
        is_padded: whether a record has the codes of `rotation.padded` coordinates, and not of the block's own number.
    """

    name: str
    package: str = ""
    is_padded: bool = False


class Quantiser(Protocol):
    """One codec at one block size, as kernels see it: a frozen, hashable value.

    Each family has a class of its own in `codecs`, with the numbers that its kernels need, and with its encoding and
    decoding in readable PyTorch, which `reference` calls. The class is a `ScaledQuantiser` or a `WholeQuantiser`.

    Attributes:
        kind: the family.
        is_whole: whether it is a `WholeQuantiser`; otherwise it is a `ScaledQuantiser`.
        has_scale: whether each block has a scale in the message, at the place that its table says.
        bits: bits of one code on the wire.
        block_size: the largest number of coordinates in a block.
        summable: whether codes lie in lanes, so that messages can be added without a carry from lane to lane.
    """

    @property
    def kind(self) -> Kind: ...

    @property
    def is_whole(self) -> bool: ...

    @property
    def has_scale(self) -> bool: ...

    @property
    def bits(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def summable(self) -> bool: ...

    def record_bytes(self, length: np.ndarray, raw_bytes: int) -> np.ndarray:
        """Returns the bytes of the codes of blocks with these lengths; ``raw_bytes``: of one uncompressed
        coordinate."""
        ...

    def __hash__(self) -> int: ...


class ScaledQuantiser(Quantiser, Protocol):
    """A quantiser whose records are a scale and codes of a fixed width."""

    def encode(self, values: Tensor, lengths: Tensor, scales: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the codes of blocks, int64 [B, width], and a flag of each block that travels with its scale, bool
        [B].

        Args:
            values: coordinates in the compute dtype, [B, width], zero beyond the end of a block.
            lengths: number of coordinates of each block, int64 [B].
            scales: the blocks' scales, [B]; 0 where a block is all zero or not finite.
            uniform: the dither, fp32 on (0, 1), [B, width].
        """
        ...

    def decode(self, codes: Tensor, scales: Tensor, flags: Tensor, uniform: Tensor) -> Tensor:
        """Returns the coordinates that codes stand for, [B, width]; the arguments are those of `encode` and what it
        returned."""
        ...


class SummableQuantiser(ScaledQuantiser, Protocol):
    """A quantiser whose codes can be added."""

    def decode_sum(self, codes: Tensor, scales: Tensor, uniforms: Sequence[Tensor]) -> Tensor:
        """Returns the mean that the sums of all ranks' codes stand for, [B, width]; ``uniforms``: the dither of each
        rank."""
        ...


class PairwiseQuantiser(SummableQuantiser, Protocol):
    """A quantiser whose codes can be added in pairs."""

    def combine(self, codes: Tensor, others: Tensor, words: Tensor) -> Tensor:
        """Returns the codes of the sums of two codes' numbers, without bias; all arguments are int64 [B, width].

        Args:
            codes: codes of one side.
            others: codes of the other side, under the same scales.
            words: uniform 32-bit integers.
        """
        ...


class WholeQuantiser(Quantiser, Protocol):
    """A quantiser that writes a block's record itself, and its scale if it has one."""

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


class Own(NamedTuple):
    """The source that averages messages itself. It has its coordinates, so its message is not decoded.

    That concerns coded blocks only. Raw blocks lose nothing on their way, and are added up in the order of the sources.

    Attributes:
        source: number of the source.
        x: flat gradient, [numel].
        rotation: key by which blocks are turned first, as the other sources' were. None: no rotation.
    """

    source: int
    x: Tensor
    rotation: Key | None = None


class CodecKernels(Protocol):
    """The functions that every family of codes has; the module's docstring says what their arguments are."""

    def encode(
        self,
        x: Tensor,
        blocks: Tensor,
        wire: Tensor,
        q: Quantiser,
        key: Key,
        scales: Tensor | None = None,
        rotation: Key | None = None,
    ) -> None:
        """Write the record of each block: its scale, where the table has a place for one, and its codes. A raw block's
        record has its coordinates in the compute dtype.

        Args:
            scales: the scales to use; what is larger than its scale is clipped. None: the largest magnitude of each
                block, rounded up to the wire's format. A `WholeQuantiser` takes no scales.
            rotation: key by which blocks are turned first, as by `rotate`; ``x`` stays as it is. None: no rotation.
        """
        ...

    def reduce(
        self,
        wires: Tensor,
        blocks: Tensor,
        out: Tensor,
        q: Quantiser,
        keys: Sequence[Key],
        out_key: Key,
        own: Own,
    ) -> None:
        """Decode one shard's messages, add them up in rank order and then the coordinates of this rank, and encode the
        mean into ``out``.

        A coded block with a coordinate that is not finite becomes NaN as a whole.

        Args:
            out: the mean's message, uint8 [bytes].
            out_key: dither keys of the mean's codes.
            own: this rank's coordinates.
        """
        ...

    def decode(
        self,
        wires: Tensor,
        blocks: Tensor,
        x: Tensor,
        q: Quantiser,
        keys: Sequence[Key],
        rotation: Key | None = None,
        own: int | None = None,
    ) -> Count:
        """Write the mean of the decoded messages into ``x``; return the number of blocks that are not finite.

        What is finite stays finite: in a 16-bit dtype, the mean of compressed blocks is clamped to the largest number.

        Args:
            rotation: key by which what was decoded is turned back. None: no rotation.
            own: number of the source whose coordinates ``x`` holds before the call, not turned; see `Own`. They are
                added last, and a block of theirs that is not finite becomes NaN as a whole. None: all messages are
                decoded.
        """
        ...


class Kernels(CodecKernels, Protocol):
    """The functions of a set of kernels."""

    def block_maxima(self, x: Tensor, blocks: Tensor) -> Tensor:
        """Returns the largest magnitude of each block, as ``scales`` are: int32 or int64 [B].

        NaN and infinity come out larger than every finite number, so that an integer MAX over ranks keeps them.
        """
        ...

    def block_moments(self, x: Tensor, blocks: Tensor) -> Tensor:
        """Returns the sums Σ x, Σ |x| and Σ x² of each block, fp64 [B, 3].

        Coordinates l, l + 16, l + 32, ... are added up in lane l, and then the 16 lanes in order. All kernels add in
        this order, so they give the same bits.
        """
        ...

    def rotate(self, x: Tensor, blocks: Tensor, key: Key, block_size: int, *, inverse: bool = False) -> None:
        """Turn each block that is not raw by H D, in place, or back by D H.

        D has random signs from ``key``, and H is the orthonormal Hadamard matrix. A block whose length is no power of
        two is turned in parts, of which the largest power of two comes first. ``x`` is fp32 or fp64.
        """
        ...

    def decode_sum(
        self, wire: Tensor, scales: Tensor, blocks: Tensor, x: Tensor, q: Quantiser, keys: Sequence[Key]
    ) -> Count:
        """Write the mean that one message of summed codes stands for into ``x``, as `decode` does; return the number of
        blocks that are not finite."""
        ...

    def narrow(self, x: Tensor, blocks: Tensor, out: Tensor, key: Key, factor: float, limit: int) -> None:
        """Write the coordinates of all blocks, raw ones too, times a factor as bf16 numbers, rounded at random; see
        `narrowing`.

        Args:
            x: fp32 [numel], contiguous.
            out: bf16 [numel], contiguous.
            key: the dither keys of the message.
            factor: the factor of all coordinates, in fp32.
            limit: bits of the largest magnitude that is written, an fp32 number.
        """
        ...

    def combine(self, mine: Tensor, theirs: Tensor, blocks: Tensor, q: Quantiser, key: Key) -> None:
        """Replace the codes of one message by unbiased codes of the sums of both messages' numbers.

        For the quantisers whose codes can be added in pairs; see `codecs.exponential`.

        Args:
            mine: uint8 [bytes], codes without scales; changed in place.
            theirs: uint8 [bytes], codes of the same blocks.
            key: of the random numbers.
        """
        ...
