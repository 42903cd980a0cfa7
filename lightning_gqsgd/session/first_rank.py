"""Tensors get the values that they have on a group's first rank, as DistributedDataParallel does with a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

#: Bytes of tensors that are sent together, at most; a larger tensor is sent alone. They are copied, and a GPU may have
#: no room for two copies of a model.
MESSAGE_BYTES = 1 << 28


@torch.no_grad()
def take_from_first_rank(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give tensors the values that they have on the group's first rank. A collective on the group.

    Tensors are sent as bytes, so that every dtype can be sent. Coordinates are sent in the order of their indices, so
    that a tensor may have other strides on other ranks.
    """
    filled = [tensor.detach() for tensor in tensors if tensor.numel()]
    for device in dict.fromkeys(tensor.device for tensor in filled):
        for some in _messages([tensor for tensor in filled if tensor.device == device]):
            parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in some]
            together = torch.cat(parts)
            dist.broadcast(together, dist.get_global_rank(group, 0), group=group)
            for tensor, part in zip(some, together.split([part.numel() for part in parts]), strict=True):
                # A copy, because the part may not be aligned for this dtype.
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield consecutive tensors that are sent together."""
    some: list[Tensor] = []
    for tensor in tensors:
        if some and sum(one.nbytes for one in some) + tensor.nbytes > MESSAGE_BYTES:
            yield some
            some = []
        some.append(tensor)
    if some:
        yield some
