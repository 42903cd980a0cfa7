"""The codec of DeMo (Peng, Quesnelle, Kingma 2024, arXiv 2411.19870): the largest coordinates of cosine transforms.

A block of n coordinates is cut into runs of 64 coordinates; the last run may be shorter. The orthonormal cosine
transform maps each run x of length m to D x:

    D_kj = √((2 - [k = 0]) / m) cos(π (2j + 1) k / (2m)),   k, j = 0 .. m-1

The block keeps the k largest transformed coordinates of all its runs, in the record of `codecs.top_k`. The receiver
applies the inverse, Dᵀ. D is orthonormal, so |C(x) - x|² <= (1 - k/n) |x|² holds as for `codecs.top_k`.

DeMo is this code with an error memory that decays. With ``memory={"alpha": β, "beta": β, "rho": 0}``, the error memory
of the gradients g is DeMo's momentum m,

    u = β m + g,   q = C(u),   m <- u - q,   and an optimizer takes the signs of the mean of all ranks' q.

So a rank never sends its whole momentum: large components leave the momentum, and the others stay until they are large.
The paper transforms tiles of 64 × 64 coordinates of a matrix, and divides the sum of a coordinate by the number of
ranks that sent the coordinate. Here, a run consists of consecutive coordinates, and the mean is over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from lightning_gqsgd.codecs.top_k.codec import TopKCodec, TopKQuantiser
from lightning_gqsgd.kernels.protocol import Kind

#: Number of coordinates that are transformed together.
RUN = 64


@lru_cache
def basis(length: int) -> Tensor:
    """Returns D for runs of a length, fp64 [length, length].

    Its entries are rounded to fp32, because cosines of different libraries differ in their last bits, and D must be the
    same on all ranks.
    """
    k = torch.arange(length, dtype=torch.float64, device="cpu")
    cosines = torch.cos(math.pi / (2 * length) * torch.outer(k, 2 * k + 1))
    cosines[1:] *= math.sqrt(2.0)
    return (cosines / math.sqrt(length)).float().double()


def transformed(x: Tensor) -> Tensor:
    """Returns the cosine transforms of the runs of blocks, fp64 [blocks, length].

    Args:
        x: coordinates of blocks of one length, [blocks, length].
    """
    x = x.double()
    whole = x.shape[1] - x.shape[1] % RUN
    parts = [(x[:, :whole].unflatten(1, (-1, RUN)) @ basis(RUN).T.to(x.device)).flatten(1)] if whole else []
    if whole < x.shape[1]:
        parts.append(x[:, whole:] @ basis(x.shape[1] - whole).T.to(x.device))
    return torch.cat(parts, dim=1)


def inverse_transformed(values: Tensor, places: Tensor, length: int) -> Tensor:
    """Returns the inverse transforms of blocks with a few non-zero transformed coordinates, fp64 [blocks, length].

    The waves of a run are added one after the other, so that the sum has the same bits on every processor.

    Args:
        values: the non-zero transformed coordinates, fp64 [blocks, count].
        places: their places in the block, int64 [blocks, count], ascending, below ``length``.
        length: number of coordinates of a block.
    """
    blocks, count = places.shape
    runs = -(-length // RUN)
    x = torch.zeros(blocks * runs, RUN, dtype=torch.float64, device=values.device)
    run = (places // RUN + runs * torch.arange(blocks, device=places.device)[:, None]).flatten()
    # The number of each wave within its run.
    numbers = torch.arange(blocks * count, device=places.device)
    number = numbers - torch.searchsorted(run, run)
    waves = basis(RUN).to(values.device)[places % RUN]
    last = length % RUN
    if last:  # the last run of a block is shorter
        is_last = places >= length - last
        waves[is_last] = 0
        waves[..., :last][is_last] = basis(last).to(values.device)[places[is_last] % RUN]
    waves = (values[..., None] * waves).flatten(0, 1)
    for k in range(int(number.max()) + 1 if len(number) else 0):
        chosen = number == k
        x[run[chosen]] += waves[chosen]
    return x.view(blocks, runs * RUN)[:, :length]


@dataclass(frozen=True)
class DctTopKQuantiser(TopKQuantiser):
    """`TopKQuantiser` for the transformed coordinates of blocks; see the module's docstring."""

    kind: ClassVar[Kind] = Kind("dct_top_k")

    def record(self, values: Tensor) -> Tensor:
        """Returns the records of blocks of one length; see `Sparsifier.record`."""
        most = torch.finfo(values.dtype).max
        # A transform can exceed the largest number even if all coordinates are finite. It is clamped then.
        small = transformed(values / RUN).clamp(-most / RUN, most / RUN)
        # Clamping would turn an infinity into a finite number, and no rank would see the overflow.
        small[~values.isfinite().all(dim=1)] = torch.nan
        return super().record((small * RUN).to(values.dtype))

    def placed(self, kept: Tensor, places: Tensor, length: int, factor: float) -> Tensor:
        """Returns the coordinates of blocks of one length; see `Sparsifier.placed`."""
        most = torch.finfo(kept.dtype).max * factor
        x = inverse_transformed(kept.double() * (factor / RUN), places, length)
        return (x.clamp(-most / RUN, most / RUN) * RUN).to(kept.dtype)


@dataclass(frozen=True)
class DctTopKCodec(TopKCodec):
    """Keeps the largest share ``density`` of the coordinates of every block's cosine transform, without rounding; see
    the module's docstring."""

    name: ClassVar[str] = "dct_top_k"
    widths: ClassVar[Sequence[int]] = (32,)
    default_block_size: ClassVar[int] = 4096

    def describe(self) -> tuple[str, list[str]]:
        """Returns the bits per coordinate, and words that describe the codec; see `Codec.describe`."""
        bits, _ = super().describe()
        return bits, [f"dct_top_k, {self.density:.3g} of all coordinates of a cosine transform"]

    def quantiser(self, block_size: int, summed: int | None = None) -> DctTopKQuantiser:
        """Returns the quantiser; see `Codec.quantiser`."""
        return DctTopKQuantiser(block_size, self.kept)
