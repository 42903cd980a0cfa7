"""Gathers values of all ranks on one rank, without pickles that could run code."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

#: Bytes of all ranks that the first rank has on the device of the messages at once.
MOST_AT_ONCE = 1 << 28


def gathered(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any] | None:
    """Returns the values of all ranks, by rank, on the first rank of a group; None on the others.

    A collective on the group. The first rank holds the values of all ranks at once, in host memory.

    Args:
        value: plain values and tensors on the CPU, as ``torch.load(..., weights_only=True)`` reads them.
        group: process group.
        device: device of the messages.

    Raises:
        pickle.UnpicklingError: if a rank sent something else.
    """
    own = io.BytesIO()
    torch.save(value, own)
    mine = torch.frombuffer(bytearray(own.getbuffer()), dtype=torch.uint8)
    length = torch.tensor([mine.numel()], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    numbers = [int(number) for number in lengths]
    mine = F.pad(mine, (0, max(numbers) - mine.numel()))  # a gather needs messages of one size
    files = [io.BytesIO() for _ in numbers] if dist.get_rank(group) == 0 else []
    for some in mine.split(max(1, MOST_AT_ONCE // len(numbers))):
        part = some.to(device)
        rows = [torch.empty_like(part) for _ in files] or None
        dist.gather(part, rows, dist.get_global_rank(group, 0), group=group)
        for file, row in zip(files, rows or (), strict=True):
            file.write(row.cpu().numpy().tobytes())
    for file, number in zip(files, numbers, strict=False):
        file.truncate(number)
        file.seek(0)
    return [torch.load(file, map_location="cpu", weights_only=True) for file in files] or None
