"""What computes a run, for dashboards."""

from __future__ import annotations

import platform
from typing import Any

import lightning
import torch

from lightning_gqsgd import __version__
from netlab.machine import cores, device_name


def machine_facts(accelerator: str) -> dict[str, Any]:
    """Device, number of cores, threads per process, and versions: plain numbers and strings.

    Args:
        accelerator: accelerator of the Trainer, which decides whether the GPU or the CPU is named.
    """
    on_cuda = accelerator in ("gpu", "cuda", "auto") and torch.cuda.is_available()
    return {
        "device": device_name(on_cuda=on_cuda),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
            "lightning_gqsgd": __version__,
        },
    }
