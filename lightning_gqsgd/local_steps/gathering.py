"""Gathers values of all ranks on one rank, without pickles that could run code."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F


def gathered(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any] | None:
    """Returns the values of all ranks, by rank, on the first rank of a group; None on the others.

    A collective on the group. The first rank holds the values of all ranks at once.

    Args:
        value: plain values and tensors on the CPU, as ``torch.load(..., weights_only=True)`` reads them.
        group: process group.
        device: device of the messages.

    Raises:
        pickle.UnpicklingError: if a rank sent something else.
    """
    file = io.BytesIO()
    torch.save(value, file)
    mine = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8).to(device)
    length = torch.tensor([mine.numel()], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    numbers = [int(number) for number in lengths]
    mine = F.pad(mine, (0, max(numbers) - mine.numel()))  # a gather needs messages of one size
    rows = [torch.empty_like(mine) for _ in numbers] if dist.get_rank(group) == 0 else None
    dist.gather(mine, rows, dist.get_global_rank(group, 0), group=group)
    if rows is None:
        return None
    files = [io.BytesIO(row[:number].cpu().numpy().tobytes()) for row, number in zip(rows, numbers, strict=True)]
    return [torch.load(file, map_location="cpu", weights_only=True) for file in files]
