"""Block scales other than a block's own largest magnitude, which the kernels find themselves.

Norms are computed from sums in fp64 and rounded up to the compute type. A NaN or infinity in a block, or in its
parameter, makes the scale non-finite.
"""

from __future__ import annotations

from functools import cached_property

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
    norms, dtype = _Norms(x, blocks, config), COMPUTE_DTYPES[x.dtype]
    if config.codec == "sign":
        scales = _bits_above(norms.mean, dtype)
    elif config.norm == "l2":
        scales = _bits_above(norms.l2, dtype)
    elif config.norm == "power_of_two":
        scales = _power_of_two(norms.maximum, dtype)
    else:
        scales = norms.maximum
    if config.clip:
        limit = _bits_above(norms.root_mean_square * config.clip, dtype)
        finite = norms.maximum < SCALE_FORMATS[dtype].infinity
        scales = torch.where(finite, torch.minimum(scales, limit), norms.maximum)
    return scales


def rounded_up(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The same in the wire's format, in which the sender uses them as well; ``dtype``: the gradient's."""
    return scale_format(dtype).rounded_up(scales.long()).to(scales.dtype)


class _Norms:
    """Norms of the group of every block, [B], each computed when it is asked for: the maximum as bits of the compute
    type, the others fp64."""

    def __init__(self, x: Tensor, blocks: Tensor, config: GQSGDConfig) -> None:
        self._x, self._blocks, self._kernels = x, blocks, kernels_for(x.device)
        self._groups = torch.arange(len(blocks), device=blocks.device)
        if config.scale_per == "parameter":
            self._groups = _numbers(blocks[:, PARAMETER])

    @cached_property
    def maximum(self) -> Tensor:
        bits = self._kernels.block_maxima(self._x, self._blocks)
        return torch.zeros_like(bits).scatter_reduce_(0, self._groups, bits, "amax")[self._groups]

    @property
    def mean(self) -> Tensor:
        """Of the magnitudes."""
        return self._sums[:, 1] / self._counts

    @property
    def l2(self) -> Tensor:
        return self._sums[:, 2].sqrt()

    @property
    def root_mean_square(self) -> Tensor:
        return (self._sums[:, 2] / self._counts).sqrt()

    @cached_property
    def _sums(self) -> Tensor:
        return self._total(self._kernels.block_moments(self._x, self._blocks))

    @property
    def _counts(self) -> Tensor:
        return self._total(self._blocks[:, LENGTH].double())

    def _total(self, values: Tensor) -> Tensor:
        return torch.zeros_like(values).index_add_(0, self._groups, values)[self._groups]


def _numbers(values: Tensor) -> Tensor:
    """The rank of each value among the different ones: int64 [B]. `torch.unique` would wait for a device."""
    order = values.argsort(stable=True)
    ascending = values[order]
    steps = torch.zeros_like(order)
    steps[1:] = ascending[1:] != ascending[:-1]
    return torch.empty_like(order).scatter_(0, order, steps.cumsum(0))


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
