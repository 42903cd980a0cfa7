"""Block scales other than a block's own largest magnitude, which the kernels find themselves.

Norms are computed from sums in fp64 and rounded up to the compute type. A NaN or infinity in a block, or in its
parameter, makes the scale non-finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.kernels import kernels_for
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, SCALE_FORMATS, scale_format
from lightning_gqsgd.layout import LENGTH, PARAMETER


def is_own_maximum(config: GQSGDConfig) -> bool:
    """Whether every block's scale is its own largest magnitude."""
    usual = config.norm == "max" and not config.clip and config.scale_per == "block"
    return usual and config.codec != "sign"


def scales_of(x: Tensor, blocks: Tensor, config: GQSGDConfig) -> Tensor:
    """The scale of every block, as bits of the compute type that are ordered like it: int32 or int64 [B].

    Args:
        x: flat tensor, which the block table ``blocks`` counts from.
        config: its norm, clip, scale_per and codec.
    """
    maxima, dtype = kernels_for(x.device).block_maxima(x, blocks), COMPUTE_DTYPES[x.dtype]
    groups = _groups(blocks, config)
    largest = _maximum(maxima, groups)
    if config.codec == "sign":
        scales = _from_moments(x, blocks, groups, dtype, "mean")
    elif config.norm == "l2":
        scales = _from_moments(x, blocks, groups, dtype, "l2")
    elif config.norm == "power_of_two":
        scales = _power_of_two(largest, dtype)
    else:
        scales = largest
    if config.clip:
        limit = _from_moments(x, blocks, groups, dtype, "root_mean_square", config.clip)
        scales = torch.where(largest >= SCALE_FORMATS[dtype].infinity, largest, torch.minimum(scales, limit))
    return scales


def rounded_up(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The same in the wire's format, in which the sender uses them as well; ``dtype``: the gradient's."""
    return scale_format(dtype).rounded_up(scales.long()).to(scales.dtype)


def _groups(blocks: Tensor, config: GQSGDConfig) -> Tensor:
    """Number of each block's group, [B]."""
    if config.scale_per == "block":
        return torch.arange(len(blocks), device=blocks.device)
    return torch.unique(blocks[:, PARAMETER], return_inverse=True)[1]


def _maximum(bits: Tensor, groups: Tensor) -> Tensor:
    """The largest of each group, for every member."""
    return torch.zeros_like(bits).scatter_reduce_(0, groups, bits, "amax")[groups]


def _from_moments(
    x: Tensor, blocks: Tensor, groups: Tensor, dtype: torch.dtype, norm: str, factor: float = 1.0
) -> Tensor:
    """Bits of ``factor`` times a norm of every block's group."""
    sums = kernels_for(x.device).block_moments(x, blocks)
    sums = torch.zeros_like(sums).index_add_(0, groups, sums)[groups]
    lengths = blocks[:, LENGTH].double()
    counts = torch.zeros_like(lengths).index_add_(0, groups, lengths)[groups]
    values = {
        "mean": sums[:, 1] / counts,
        "l2": sums[:, 2].sqrt(),
        "root_mean_square": (sums[:, 2] / counts).sqrt(),
    }[norm]
    return _bits_above(values * factor, dtype)


def _bits_above(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Bits of the smallest numbers of ``dtype`` that are not below; finite ones stay finite."""
    largest = torch.finfo(dtype).max
    narrow = torch.where(values.isfinite(), values.clamp(max=largest), values).to(dtype)
    up = torch.nextafter(narrow, torch.full_like(narrow, torch.inf))
    narrow = torch.where((narrow.double() < values) & (narrow < largest), up, narrow)
    integer = SCALE_FORMATS[dtype].integer
    return narrow.view(integer) & torch.iinfo(integer).max


def _power_of_two(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Bits of the next power of two; of the largest number, where that would be infinite."""
    form = SCALE_FORMATS[dtype]
    rest = (1 << form.mantissa) - 1
    up = ((bits.long() + rest) & ~rest).clamp(max=form.infinity)
    up = torch.where((up == form.infinity) & (bits < form.infinity), form.infinity - 1, up)
    return up.to(bits.dtype)
