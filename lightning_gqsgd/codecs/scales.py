"""Block scales: which norms there are, and the norms that the kernels do not compute.

The kernels compute a block's own largest magnitude. Other norms are computed here, from sums in fp64, and rounded up to
the compute dtype. A NaN or infinity in a block, or in its parameter, makes the scale non-finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_gqsgd.codecs.base import Codec
from lightning_gqsgd.kernels import kernels_for
from lightning_gqsgd.kernels.layout import LENGTH, PARAMETER
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, SCALE_FORMATS, scale_format


@dataclass(frozen=True)
class ScaleRule:
    """The rule for the scale of a block, for codecs that take a norm.

    Attributes:
        norm: a name in `NORMS`.
        clip: the scale is at most so many root mean squares; 0: no limit.
        per_parameter: whether the norm is that of a whole parameter, not of each block.
    """

    norm: str = "max"
    clip: float = 0.0
    per_parameter: bool = False


def kernels_find_scales(codec: Codec, rule: ScaleRule) -> bool:
    """Returns whether the kernels compute the scales: each block's scale is its own largest magnitude, or follows from
    the block's codes, or there are no scales."""
    own_maximum = rule.norm == "max" and not rule.clip and not rule.per_parameter
    return not codec.has_scale or codec.quantiser_finds_scale or (codec.takes_norm and own_maximum)


def scales_of(x: Tensor, blocks: Tensor, codec: Codec, rule: ScaleRule) -> Tensor:
    """Returns the scale of every block, as bits of the compute dtype that are ordered like it: int32 or int64 [B].

    Args:
        x: flat tensor, which the block table ``blocks`` counts from.
        blocks: block table, int64 [B, COLUMNS].
        codec: the codec; one that takes no norm has the mean magnitude.
        rule: the norm.
    """
    norms = _Norms(x, blocks, per_parameter=rule.per_parameter)
    if not codec.takes_norm:  # a codec with a scale of its own kind
        return norms.bits_above(norms.mean)
    scales = NORMS[rule.norm](norms)
    if rule.clip:
        limit = norms.bits_above(norms.root_mean_square * rule.clip)
        finite = norms.maximum < norms.form.infinity
        scales = torch.where(finite, torch.minimum(scales, limit), norms.maximum)
    return scales


def rounded_up(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the scales rounded up to the wire's format, in which the sender uses them as well; ``dtype``: that of the
    gradient."""
    return scale_format(dtype).rounded_up(scales.long()).to(scales.dtype)


class _Norms:
    """Norms of the group of every block, [B], each computed when it is asked for: the maximum as bits of the compute
    type, the others fp64."""

    def __init__(self, x: Tensor, blocks: Tensor, *, per_parameter: bool) -> None:
        self._x = x
        self._blocks = blocks
        self._kernels = kernels_for(x.device)
        self.dtype = COMPUTE_DTYPES[x.dtype]
        self.form = SCALE_FORMATS[self.dtype]
        self._groups = torch.arange(len(blocks), device=blocks.device)
        if per_parameter:
            self._groups = _numbers(blocks[:, PARAMETER])

    @cached_property
    def maximum(self) -> Tensor:
        bits = self._kernels.block_maxima(self._x, self._blocks)
        return torch.zeros_like(bits).scatter_reduce_(0, self._groups, bits, "amax")[self._groups]

    @property
    def mean(self) -> Tensor:
        """Mean of the magnitudes."""
        return self._sums[:, 1] / self._counts

    @property
    def l2(self) -> Tensor:
        return self._sums[:, 2].sqrt()

    @property
    def root_mean_square(self) -> Tensor:
        return (self._sums[:, 2] / self._counts).sqrt()

    def bits_above(self, values: Tensor) -> Tensor:
        """Returns the bits of the smallest numbers of the compute dtype that are not below the values; finite values
        stay finite."""
        largest = torch.finfo(self.dtype).max
        narrow = torch.where(values.isfinite(), values.clamp(max=largest), values).to(self.dtype)
        up = torch.nextafter(narrow, torch.full_like(narrow, torch.inf))
        narrow = torch.where((narrow.double() < values) & (narrow < largest), up, narrow)
        return narrow.view(self.form.integer) & torch.iinfo(self.form.integer).max

    def power_of_two(self, bits: Tensor) -> Tensor:
        """Returns the bits of the next power of two; where that power is infinite, bits of the largest finite
        number."""
        form = self.form
        rest = (1 << form.mantissa) - 1
        # Bits of NaN lie above infinity's. In fp64, their sum with `rest` would leave the integer's range.
        up = (bits.long().clamp(max=form.infinity) + rest) & ~rest
        up = torch.where((up == form.infinity) & (bits < form.infinity), form.infinity - 1, up)
        return up.to(bits.dtype)

    @cached_property
    def _sums(self) -> Tensor:
        return self._total(self._kernels.block_moments(self._x, self._blocks))

    @property
    def _counts(self) -> Tensor:
        return self._total(self._blocks[:, LENGTH].double())

    def _total(self, values: Tensor) -> Tensor:
        return torch.zeros_like(values).index_add_(0, self._groups, values)[self._groups]


def _numbers(values: Tensor) -> Tensor:
    """Returns for each value how many different values are smaller: int64 [B]."""
    # `torch.unique` would wait for the device.
    order = values.argsort(stable=True)
    ascending = values[order]
    steps = torch.zeros_like(order)
    steps[1:] = ascending[1:] != ascending[:-1]
    return torch.empty_like(order).scatter_(0, order, steps.cumsum(0))


#: The scale of every block for each norm, as bits of the compute dtype.
NORMS: dict[str, Callable[[_Norms], Tensor]] = {
    "max": lambda norms: norms.maximum,
    "l2": lambda norms: norms.bits_above(norms.l2),
    "power_of_two": lambda norms: norms.power_of_two(norms.maximum),
}
