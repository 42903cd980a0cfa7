"""The names of the devices of the machine that all processes of a run share."""

from __future__ import annotations

import platform
from pathlib import Path

_CPU_FACTS = Path("/proc/cpuinfo")


def processor_name() -> str:
    """Name of the processor's model, e.g. ``"AMD EPYC"``; its architecture where no model is known."""
    try:
        lines = _CPU_FACTS.read_text().splitlines()
    except OSError:
        lines = []  # only Linux has this file
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, models), "") or platform.processor() or platform.machine()


def device_name(*, on_cuda: bool) -> str:
    """Name of the device that computes: of the current CUDA device, or of the processor.

    Args:
        on_cuda: whether a CUDA device computes; torch must see one then.
    """
    if not on_cuda:
        return processor_name()
    import torch  # here, not above: a lab of hosts needs no torch, which takes seconds to import

    return torch.cuda.get_device_name()
