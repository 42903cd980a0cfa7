"""What a family of codes offers: the functions of `protocol.Kernels` that take a quantiser."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gqsgd.kernels.protocol import Quantiser
from lightning_gqsgd.kernels.wire import Key


class Family(ABC):
    """A family of codes; what arguments are is said in `kernels.protocol`."""

    @abstractmethod
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
        """See `protocol.Kernels.encode`."""

    @abstractmethod
    def reduce(
        self,
        wires: Tensor,
        blocks: Tensor,
        out: Tensor,
        q: Quantiser,
        keys: Sequence[Key],
        out_key: Key,
        dtype: torch.dtype,
    ) -> None:
        """See `protocol.Kernels.reduce`."""

    @abstractmethod
    def decode(
        self,
        wires: Tensor,
        blocks: Tensor,
        x: Tensor,
        q: Quantiser,
        keys: Sequence[Key],
        rotation: Key | None = None,
    ) -> Tensor:
        """See `protocol.Kernels.decode`."""
