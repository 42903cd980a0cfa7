"""What a run is computed by."""

from __future__ import annotations

import platform
from typing import Any

import lightning
import torch

from lightning_gqsgd import __version__
from recipes.tasks.launch import cores


def machine_facts(accelerator: str) -> dict[str, Any]:
    """Device, cores, threads per process and versions; plain numbers and strings, for dashboards.

    Args:
        accelerator: of the Trainer: decides whether the GPU or the CPU is named.
    """
    on_gpu = accelerator in ("gpu", "cuda", "auto") and torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "lightning_gqsgd": __version__,
        },
    }
