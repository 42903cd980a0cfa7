"""Scales of blocks: the available norms over coordinates and over ranks, and the norms that kernels do not compute.

The kernels compute the largest magnitude of a block. Other norms are computed here, from sums in fp64, and rounded up
to the compute dtype. A NaN or infinity among the coordinates that share a scale makes the scale non-finite.

Ranks may share scales. With the norm q over each rank's coordinates and the norm p over ranks, a shared scale is the
mixed norm (Σ_i ‖x_i‖_q^p)^(1/p) of Global-QSGD (arXiv 2305.18627).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_gqsgd.codecs.base import Codec
from lightning_gqsgd.kernels import kernels_for
from lightning_gqsgd.kernels.layout import LENGTH, PARAMETER, RAW, table_on
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, SCALE_FORMATS, scale_format

#: The coordinates that share a scale: those of a block, of all blocks of a parameter, or of all compressed blocks that
#: are sent together.
SCALE_PER = ("block", "parameter", "bucket")
#: The norms over ranks that combine all ranks' scales into a shared scale.
NORMS_OVER_RANKS = ("max", "l2", "l1")


@dataclass(frozen=True)
class ScaleRule:
    """The rule for the scale of a block, for codecs that take a norm.

    Attributes:
        norm: the norm over coordinates, a name in `NORMS`.
        clip: upper limit of the scale, in root mean squares of the coordinates; 0: no limit.
        per: the coordinates over which the norm is computed, a name in `SCALE_PER`.
        over_ranks: the norm over ranks if ranks share a scale, a name in `NORMS_OVER_RANKS`.
    """

    norm: str = "max"
    clip: float = 0.0
    per: str = "block"
    over_ranks: str = "max"


def kernels_find_scales(codec: Codec, rule: ScaleRule) -> bool:
    """Returns True if the kernels compute the scales, or if there are no scales. Kernels compute a scale that is the
    block's own largest magnitude, or that follows from the block's codes."""
    own_maximum = rule.norm == "max" and not rule.clip and rule.per == "block"
    return not codec.has_scale or codec.quantiser_finds_scale or (codec.takes_norm and own_maximum)


def scales_of(x: Tensor, blocks: Tensor, codec: Codec, rule: ScaleRule) -> Tensor:
    """Returns the scale of every block, as the bits of the compute dtype: int32 or int64 [B]. As integers, the bits are
    in the order of the scales.

    Args:
        x: flat tensor of coordinates; the block table counts from its start.
        blocks: block table, int64 [B, COLUMNS].
        codec: the codec. If it takes no norm, the scale is the mean magnitude.
        rule: the rule for the scale.
    """
    norms = _Norms(x, blocks, rule.per)
    if not codec.takes_norm:  # the codec's own scale, which is the mean magnitude
        return _bits_above(norms.mean, norms.dtype)
    scales = NORMS[rule.norm](norms)
    if rule.clip:
        root_mean_square = norms.root_mean_square
        limit = _bits_above(root_mean_square * rule.clip, norms.dtype)
        # The squares of fp64 numbers below 1e-162 are 0, and a limit of 0 would lose the block.
        limited = torch.where(root_mean_square > 0, torch.minimum(scales, limit), scales)
        finite = norms.maximum < norms.form.infinity
        scales = torch.where(finite, limited, norms.maximum)
    return scales


def rounded_up(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the scales rounded up to the wire's format. The sender uses the rounded scales, too. ``dtype`` is the
    gradient's dtype."""
    return scale_format(dtype).rounded_up(scales.long()).to(scales.dtype)


def over_ranks(scales: Tensor, norm: str) -> Tensor:
    """Returns the l1 or l2 norm over ranks of every block's scale, rounded up, as bits of the compute dtype: [B].

    The norm is computed in fp64, in rank order, so that all ranks get the same bits. The norm of finite scales is
    finite. A NaN or infinity of any rank makes the norm non-finite.

    Args:
        scales: the scales of all ranks, as bits of the compute dtype: int32 or int64 [ranks, B].
        norm: ``"l1"``, the sum over ranks, or ``"l2"``, the root of the sum of squares.
    """
    dtype = torch.float32 if scales.dtype == torch.int32 else torch.float64
    values = SCALE_FORMATS[dtype].floats(scales).double()
    largest = values.amax(0)
    finite = largest.isfinite()
    # In units of the largest scale, squares do not overflow or underflow.
    unit = torch.where(finite & (largest > 0), largest, 1.0)
    total = torch.zeros_like(largest)
    for of_rank in values / unit:
        total += of_rank * of_rank if norm == "l2" else of_rank
    total = (total.sqrt() if norm == "l2" else total) * unit
    return _bits_above(torch.where(finite, total.clamp(max=torch.finfo(torch.float64).max), largest), dtype)


def _bits_above(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the bits of the smallest numbers of the compute dtype that are not below the fp64 values. Finite values
    stay finite."""
    largest = torch.finfo(dtype).max
    narrow = torch.where(values.isfinite(), values.clamp(max=largest), values).to(dtype)
    up = torch.nextafter(narrow, torch.full_like(narrow, torch.inf))
    narrow = torch.where((narrow.double() < values) & (narrow < largest), up, narrow)
    integer = SCALE_FORMATS[dtype].integer
    return narrow.view(integer) & torch.iinfo(integer).max


class _Norms:
    """Norms over the coordinates that share each block's scale, [B]. Each norm is computed when it is read. The maximum
    consists of bits of the compute dtype, and the other norms are fp64."""

    def __init__(self, x: Tensor, blocks: Tensor, per: str) -> None:
        self._x = x
        self._blocks = blocks
        self._kernels = kernels_for(x.device)
        self.dtype = COMPUTE_DTYPES[x.dtype]
        self.form = SCALE_FORMATS[self.dtype]
        # The scale of a bucket must ignore uncompressed blocks. In the other groups, all blocks are uncompressed or
        # none, and the scale of an uncompressed block is not used.
        self._counts_raw = per != "bucket"
        self._groups = torch.arange(len(blocks), device=x.device)
        if per == "parameter":
            self._groups = _numbers(self._table[:, PARAMETER])
        elif per == "bucket":
            self._groups = torch.zeros_like(self._groups)

    @cached_property
    def _table(self) -> Tensor:
        """The block table on the device of the coordinates."""
        return table_on(self._x.device, self._blocks)

    @cached_property
    def maximum(self) -> Tensor:
        bits = self._counted(self._kernels.block_maxima(self._x, self._blocks))
        return torch.zeros_like(bits).scatter_reduce_(0, self._groups, bits, "amax")[self._groups]

    @property
    def mean(self) -> Tensor:
        """The mean magnitude."""
        return self._sums[:, 0] / self._counts

    @property
    def l2(self) -> Tensor:
        return self._sums[:, 1].sqrt()

    @property
    def root_mean_square(self) -> Tensor:
        return (self._sums[:, 1] / self._counts).sqrt()

    def power_of_two(self, bits: Tensor) -> Tensor:
        """Returns the bits of the next power of two, or of the largest finite number if that power is infinite."""
        form = self.form
        rest = (1 << form.mantissa) - 1
        # The bits of NaN are above those of infinity. In fp64, adding `rest` to them would overflow the integer.
        up = (bits.long().clamp(max=form.infinity) + rest) & ~rest
        up = torch.where((up == form.infinity) & (bits < form.infinity), form.infinity - 1, up)
        return up.to(bits.dtype)

    @cached_property
    def _sums(self) -> Tensor:
        return self._total(self._counted(self._kernels.block_moments(self._x, self._blocks)))

    @property
    def _counts(self) -> Tensor:
        return self._total(self._counted(self._table[:, LENGTH].double()))

    def _counted(self, values: Tensor) -> Tensor:
        """Returns the values of blocks, [B, ...], with zeros for blocks on which no scale depends."""
        if self._counts_raw:
            return values
        counts = (self._table[:, RAW] == 0).view(-1, *[1] * (values.ndim - 1))
        return torch.where(counts, values, 0)  # a product would keep NaN

    def _total(self, values: Tensor) -> Tensor:
        return torch.zeros_like(values).index_add_(0, self._groups, values)[self._groups]


def _numbers(values: Tensor) -> Tensor:
    """Returns the number of different values that are smaller than each value: int64 [B]."""
    # `torch.unique` would wait for the device.
    order = values.argsort(stable=True)
    ascending = values[order]
    steps = torch.zeros_like(order)
    steps[1:] = ascending[1:] != ascending[:-1]
    return torch.empty_like(order).scatter_(0, order, steps.cumsum(0))


#: Functions that return the scale of every block for each norm, as bits of the compute dtype.
NORMS: dict[str, Callable[[_Norms], Tensor]] = {
    "max": lambda norms: norms.maximum,
    # At least the largest magnitude, because the squares of fp64 numbers below 1e-162 are 0.
    "l2": lambda norms: torch.maximum(_bits_above(norms.l2, norms.dtype), norms.maximum),
    "power_of_two": lambda norms: norms.power_of_two(norms.maximum),
}
