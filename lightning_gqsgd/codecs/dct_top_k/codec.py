"""The largest coordinates of each block's cosine transform (DeMo, Peng, Quesnelle, Kingma 2024, arXiv 2411.19870).

A block of n coordinates is cut into runs of 64, of which the last one may be shorter. Each run x of length m becomes
D x, by the orthonormal cosine transform

    D_kj = √((2 - [k = 0]) / m) cos(π (2j + 1) k / (2m)),   k, j = 0 .. m-1,

and the block keeps the k largest coordinates of all runs, as `codecs.top_k` does, whose record this is. The receiver
turns them back by Dᵀ. D is orthonormal, so |C(x) - x|² <= (1 - k/n) |x|² here as well.

DeMo is this code with an error memory that fades: with ``memory={"alpha": β, "beta": β, "rho": 0}``, what is remembered
of the gradients g is DeMo's momentum m,

    u = β m + g,   q = C(u),   m <- u - q,   and an optimizer takes the signs of the mean of all ranks' q.

So a rank's momentum is never sent as a whole: what is large leaves it, and all else stays until it is large. The paper
transforms tiles of 64 × 64 coordinates of a matrix, and divides a coordinate's sum by the number of ranks that sent it.
Here, runs are coordinates in a row, and the mean is over all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from lightning_gqsgd.codecs.top_k.codec import TopKCodec, TopKQuantiser
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import CODES, LENGTH
from lightning_gqsgd.kernels.protocol import Kind
from lightning_gqsgd.kernels.wire import Key

#: Coordinates that are transformed together.
RUN = 64


@lru_cache
def basis(length: int) -> Tensor:
    """Returns D for runs of a length, fp64 [length, length].

    Its numbers are those of fp32: cosines of different libraries differ in their last bits, and ranks must not.
    """
    k = torch.arange(length, dtype=torch.float64, device="cpu")
    cosines = torch.cos(math.pi / (2 * length) * torch.outer(k, 2 * k + 1))
    cosines[1:] *= math.sqrt(2.0)
    return (cosines / math.sqrt(length)).float().double()


def transformed(x: Tensor) -> Tensor:
    """Returns the cosine transform of a block's runs, fp64 [length].

    Args:
        x: coordinates of a block, [length].
    """
    x = x.double()
    whole = len(x) - len(x) % RUN
    runs = x[:whole].view(-1, RUN) @ basis(RUN).T.to(x.device)
    if whole == len(x):
        return runs.flatten()
    return torch.cat([runs.flatten(), basis(len(x) - whole).to(x.device) @ x[whole:]])


def turned_back(values: Tensor, places: Tensor, length: int) -> Tensor:
    """Returns the coordinates of a block, fp64 [length], some of whose transform's coordinates are not zero.

    These are added one after the other, in their order, so that the sum has the same bits on every processor.

    Args:
        values: the transform's coordinates, fp64 [count].
        places: where they are, int64 [count], below ``length``.
        length: number of coordinates.
    """
    x = torch.zeros(length, dtype=torch.float64, device=values.device)
    for value, place in zip(values, places.tolist(), strict=True):
        start = place - place % RUN
        run = x[start : start + RUN]
        run += value * basis(len(run))[place - start].to(values.device)
    return x


@dataclass(frozen=True)
class DctTopKQuantiser(TopKQuantiser):
    """`TopKQuantiser` of the transform; see the module."""

    kind: ClassVar[Kind] = Kind("dct_top_k")

    def write(self, values: Tensor, blocks: Tensor, wire: Tensor, key: Key) -> None:
        """Write the records of blocks; see `kernels.protocol.WholeQuantiser.write`."""
        most = torch.finfo(values.dtype).max
        turned = torch.zeros_like(values)
        for row, x, length in zip(turned, values, blocks[:, LENGTH].tolist(), strict=True):
            # A transform may be larger than the largest number, as all coordinates may; what is finite stays finite.
            row[:length] = transformed(x[:length] / RUN).clamp(-most / RUN, most / RUN).mul_(RUN)
        super().write(turned, blocks, wire, key)

    def read(self, wire: Tensor, blocks: Tensor, dtype: torch.dtype, key: Key, factor: float) -> Tensor:
        """Returns the coordinates of blocks, read from a message; see `kernels.protocol.WholeQuantiser.read`.

        A block is NaN everywhere if a kept coordinate is not finite, or its place is not in the block.
        """
        most = torch.finfo(dtype).max * factor
        result = torch.zeros(len(blocks), self.block_size, dtype=dtype, device=wire.device)
        for row, block in zip(result, blocks, strict=True):
            length = int(block[LENGTH])
            kept, places = self.record(wire, int(block[CODES]), length, dtype)
            if kept.isfinite().all() and (places < length).all():
                x = turned_back(kept.double() * (factor / RUN), places, length)
                row[:length] = x.clamp(-most / RUN, most / RUN).mul_(RUN)
            else:
                row[:] = torch.nan
        return result


@dataclass(frozen=True)
class DctTopKCodec(TopKCodec):
    """The ``density`` largest share of every block's cosine transform, as they are; see the module."""

    name: ClassVar[str] = "dct_top_k"
    default_block_size: ClassVar[int] = 4096

    @classmethod
    def of(cls, bits: int, *, density: float = 0.01) -> DctTopKCodec:
        """Returns the codec that keeps a share of all coordinates.

        Args:
            bits: 32.
            density: the share.

        Raises:
            ConfigError: another number of bits, or a share of nothing.
        """
        if bits != 32:
            raise ConfigError(
                f"codec='dct_top_k' sends whole what it keeps, which is bits=32, not bits={bits}; leave bits out, or "
                "take codec='top_k'"
            )
        if not density:
            raise ConfigError("density=0 keeps nothing; take e.g. density=0.01")
        return cls(density, bits)

    @property
    def biased_by(self) -> str:
        """The setting that makes the codec biased, if any; see `Codec.biased_by`."""
        return "codec='dct_top_k'"

    def describe(self) -> tuple[str, list[str]]:
        """Returns the bits per coordinate as text, and words that say what they are."""
        bits, _ = super().describe()
        return bits, [f"dct_top_k, {self.density:.3g} of all coordinates of a cosine transform"]

    def quantiser(self, block_size: int, summed: int | None = None) -> DctTopKQuantiser:
        """Returns the quantiser: the codec at one block size, as kernels see it."""
        return DctTopKQuantiser(block_size, max(1, int(self.density * 65536)))
