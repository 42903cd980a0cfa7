"""Values of the first rank, and means, where ranks have other strides."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gqsgd.ddp.unaveraged import average
from lightning_gqsgd.session import first_rank
from lightning_gqsgd.session.first_rank import take_from_first_rank
from tests.distributed.ranks import on_ranks


def _tensors(rank: int) -> list[Tensor]:
    """Tensors of the same shapes on all ranks, and of strides that differ."""
    numbers = torch.arange(24, dtype=torch.float32) + 100 * rank
    images = numbers.view(2, 3, 2, 2).clone()
    if rank:
        images = images.contiguous(memory_format=torch.channels_last)
    return [
        numbers.view(4, 6).clone() if rank else numbers.view(6, 4).t(),
        images,
        torch.arange(10)[:: 2 - rank][:5],
        torch.tensor([rank == 0]),
        torch.empty(0, 3),
    ]


@on_ranks(2)
def test_the_values_of_the_first_rank_come_to_their_coordinates_whatever_the_strides(rank: int) -> None:
    tensors = _tensors(rank)
    strides = [tensor.stride() for tensor in tensors]
    take_from_first_rank(tensors, dist.group.WORLD)
    assert [tensor.stride() for tensor in tensors] == strides
    for tensor, expected in zip(tensors, _tensors(0), strict=True):
        assert torch.equal(tensor, expected)


@on_ranks(2)
def test_a_model_is_not_copied_as_a_whole(rank: int) -> None:
    """A GPU may have no room for a second one."""
    sizes: list[int] = []
    broadcast = dist.broadcast

    def noted(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
        sizes.append(tensor.nbytes)
        broadcast(tensor, source, group=group)

    first_rank.dist.broadcast = noted
    first_rank.MESSAGE_BYTES = 150
    tensors = [*_tensors(rank), torch.arange(10) + rank]  # 96, 96, 40, 1 and 80 bytes
    take_from_first_rank(tensors, dist.group.WORLD)
    assert all(torch.equal(one, other) for one, other in zip(tensors, _tensors(0), strict=False))
    assert tensors[-1].tolist() == list(range(10))
    assert sizes == [96, 96 + 40 + 1, 80]


@on_ranks(2)
def test_the_mean_is_of_coordinates_whatever_the_strides(rank: int) -> None:
    tensors = _tensors(rank)[:2]
    average(tensors, dist.group.WORLD)
    for tensor, first, second in zip(tensors, _tensors(0), _tensors(1), strict=False):
        assert torch.equal(tensor, first / 2 + second / 2)
