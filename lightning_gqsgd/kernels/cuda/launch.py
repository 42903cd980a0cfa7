"""Launches of kernels: a program for each tile of a block table, and keys in the form that kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_gqsgd.kernels.cuda.constants import Constants
from lightning_gqsgd.kernels.wire import Key


def run(kernel: Any, blocks: Tensor, c: Constants, *arguments: Any, **constants: Any) -> None:
    """Run a kernel on a block table.

    Args:
        kernel: the kernel.
        blocks: the block table.
        c: the kernel's constants.
        arguments: what the kernel takes, in order.
        constants: what the kernel takes as constants beside ``c``, by name.
    """
    if len(blocks):
        kernel[(-(-len(blocks) // c.shape.rows),)](*arguments, **constants, c=c, **options(c))


def options(c: Constants) -> dict[str, int]:
    """Returns the options with which a kernel is compiled for tiles of this shape."""
    warps = min(max(c.shape.rows * c.shape.half >> 9, 1), 32)  # 32 coordinates per thread
    # Tiles with the ends of parameters would take more than 128 registers, and leave all others too few threads.
    return {"num_warps": warps, "maxnreg": min(128, 2048 // warps), "enable_fp_fusion": False}


def packed(key: Key) -> int:
    """Both words of a key in one signed 64-bit integer, the first word in the lower half."""
    both = key[0] | key[1] << 32
    return both - (both >> 63 << 64)


def keys_on(device: torch.device, keys: Sequence[Key]) -> Tensor:
    """Returns the keys on the device, int64 [keys]; they are sent there once per step and stream, and the host does not
    wait."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _sent_keys(tuple(keys), device, stream)


@lru_cache(maxsize=64)
def _sent_keys(keys: tuple[Key, ...], device: torch.device, stream: int) -> Tensor:
    table = torch.tensor([packed(key) for key in keys], dtype=torch.int64, device="cpu")  # not the default device
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
