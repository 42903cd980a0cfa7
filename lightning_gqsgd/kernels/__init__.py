"""The inner loops: `reference` (PyTorch, any device, the truth) and `cpu` (Numba), with the same functions."""

from __future__ import annotations

from types import ModuleType

import torch


def kernels_for(device: torch.device) -> ModuleType:
    """The fastest module whose functions take tensors on ``device``."""
    if device.type == "cpu":
        from lightning_gqsgd.kernels import cpu

        return cpu
    from lightning_gqsgd.kernels import reference

    return reference
