"""Buffers that cannot be averaged, such as counters, as one row of numbers that is sent with a merge."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_gqsgd.local_steps.starting import integer_buffers


class IntegerValues:
    """The buffers of a model whose dtype is not floating-point."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = integer_buffers(model)

    def read(self) -> Tensor:
        """Returns the buffers' bytes as int64 numbers on the CPU, [numel]; empty if there is no such buffer."""
        parts = [buffer.detach().cpu().contiguous().view(-1).view(torch.uint8) for buffer in self._buffers]
        if not parts:
            return torch.empty(0, dtype=torch.int64)
        together = torch.cat(parts)
        return F.pad(together, (0, -together.numel() % 8)).view(torch.int64)

    @torch.no_grad()
    def write(self, numbers: Tensor) -> None:
        """Copy the result of `read` to the buffers."""
        place = 0
        together = numbers.contiguous().view(torch.uint8)
        for buffer in self._buffers:
            # A copy, because the part may not be aligned for this dtype.
            part = together[place : place + buffer.nbytes].clone()
            buffer.copy_(part.view(buffer.dtype).view(buffer.shape))
            place += buffer.nbytes
