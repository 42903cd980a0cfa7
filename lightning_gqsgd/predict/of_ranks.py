"""Collects the measurements of the default process group's ranks on the host of each of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def slowest(values: Tensor, device: torch.device) -> Tensor:
    """Element-wise maximum over the ranks. A collective; ``device``: where tensors are that ranks can send."""
    moved = _sendable(values, device)
    dist.all_reduce(moved, op=dist.ReduceOp.MAX)
    return moved.cpu()


def of_all_ranks(values: Tensor, device: torch.device) -> Tensor:
    """The values of each rank, stacked. A collective; ``device``: see `slowest`."""
    mine = _sendable(values, device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone).cpu()


def _sendable(values: Tensor, device: torch.device) -> Tensor:
    return values.to(device if dist.get_backend() == "nccl" else "cpu")
