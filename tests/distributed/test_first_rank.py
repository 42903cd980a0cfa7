"""Values of the first rank, and means, where ranks have other strides."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gqsgd.ddp.unaveraged import average
from lightning_gqsgd.session.first_rank import take_from_first_rank
from tests.distributed.ranks import run


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


def _taken(rank: int) -> list[Tensor]:
    tensors = _tensors(rank)
    strides = [tensor.stride() for tensor in tensors]
    take_from_first_rank(tensors, dist.group.WORLD)
    assert [tensor.stride() for tensor in tensors] == strides
    return tensors


def test_the_values_of_the_first_rank_come_to_their_coordinates_whatever_the_strides(tmp_path: Path) -> None:
    for tensors in run(_taken, 2, tmp_path):
        for tensor, expected in zip(tensors, _tensors(0), strict=True):
            assert torch.equal(tensor, expected)


def _averaged(rank: int) -> list[Tensor]:
    tensors = _tensors(rank)[:2]
    average(tensors, dist.group.WORLD)
    return tensors


def test_the_mean_is_of_coordinates_whatever_the_strides(tmp_path: Path) -> None:
    for tensors in run(_averaged, 2, tmp_path):
        for tensor, first, second in zip(tensors, _tensors(0), _tensors(1), strict=False):
            assert torch.equal(tensor, first / 2 + second / 2)
