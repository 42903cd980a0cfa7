"""Random subspaces: less than one bit per coordinate, as in DGD-DEF and DQ-PSGD (arXiv 2103.07578).

A code has at least one bit. So a vector x, padded with zeros to a power of two m, is rotated by a random Hadamard
matrix, and only a part of the m rotated coordinates is sent. Matrix and places are random, new in each step, and the
same on all ranks. With the projection P on k places, the rotation R and the code Q,

    message: Q(P R x),   decoded: c Rᵀ Pᵀ Q(P R x).

* With an error memory, c = 1. Since R keeps lengths and E |P R x|² = k/m |x|², a code that loses at most 1 - δ of its
  input's square loses at most 1 - δ k/m of that of x, on average over places.
* Without one, c = m/k, so that the decoded vector is unbiased if Q is. The error includes the places that are left out:
  E |decoded - x|² <= ((1 + ω) m/k - 1) |x|².
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import Segment, cut
from lightning_gqsgd.kernels.rotation import rotated
from lightning_gqsgd.reducers.base import StepKeys
from lightning_gqsgd.research.simulation.virtual import VirtualRanks


class SubspaceRanks:
    """Virtual ranks that send a share of rotated coordinates to all others. The methods are like those of
    `VirtualRanks`.

    Args:
        ranks: number of ranks.
        dimension: coordinates d of a gradient.
        share: number of rotated coordinates that are sent, divided by d; above 0 and at most 1.
        dtype: dtype of the gradients.
        remembers: whether to add the error of a message to the next message.
        **fields: fields of `GQSGDConfig` without a memory and with the reducer ``"gather"``.

    Attributes:
        config: the configuration of a message.
        bytes_sent: bytes that each rank has sent so far.
        wire_bits: bits of a message, scales included, per coordinate of the gradient.

    Raises:
        ConfigError: if the share is out of its range, or if the configuration cannot work.
    """

    def __init__(
        self, ranks: int, dimension: int, share: float, dtype: torch.dtype, remembers: bool, **fields: Any
    ) -> None:
        if not 0 < share <= 1:
            raise ConfigError(f"share={share!r} is out of range: above 0, and at most 1")
        self._dimension = dimension
        self._width = 1 << (dimension - 1).bit_length()
        self._kept = max(1, round(share * dimension))
        given = {**fields, "memory": "none", "rotation": False, "reducer": "gather"}
        # A group of one rank: its mean is the decoded message, as every receiving rank decodes it.
        self._codes = VirtualRanks(1, [Segment(0, self._kept, raw=False)], dtype, **given)
        self.config = self._codes.config
        self._memory = torch.zeros(ranks, dimension, dtype=dtype)
        self._remembers = remembers
        self.wire_bits = self._codes.wire_bits * self._kept / dimension
        self.bytes_sent = 0

    def errors(self) -> Tensor:
        """Returns the error memory of each rank for its own messages, [ranks, d]."""
        return self._memory

    def mean(self, gradients: Sequence[Tensor], step: int) -> Tensor:
        """Returns the mean that each rank has after a step, [d]."""
        ranks = len(gradients)
        sent = torch.stack(list(gradients)) + self._memory
        blocks = torch.from_numpy(cut([Segment(0, self._width, raw=False)], self._width)).expand(ranks, -1)
        # Codes have streams of their own: if they shared one with the signs, they would be biased.
        key = StepKeys.of(self.config.seed, step, ranks).rotation
        places = torch.randperm(self._width, generator=torch.Generator().manual_seed(key[0]))[: self._kept]
        padded = torch.nn.functional.pad(sent, (0, self._width - self._dimension))
        inside = rotated(padded, blocks, key)[:, places]
        codes = [self._codes.mean([one], step * ranks + rank) for rank, one in enumerate(inside)]
        spread = torch.zeros_like(padded)
        spread[:, places] = torch.stack(codes)
        decoded = rotated(spread, blocks, key, inverse=True)[:, : self._dimension]
        if self._remembers:
            self._memory = sent - decoded
        else:
            decoded = decoded * (self._width / self._kept)
        self.bytes_sent += (ranks - 1) * round(self.wire_bits * self._dimension / 8)
        return decoded.mean(0)
