"""Kernels are compiled before the first step needs them, and users are told when that takes time."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.layout import Segment
from lightning_gqsgd.plan import Plan
from lightning_gqsgd.reducers import REDUCERS, Setting, between_nodes, new_store, setting_for

#: Parameters that a first run is made on: one that is compressed, one that is not.
_SEGMENTS = (Segment(0, 64, raw=False), Segment(1, 8, raw=True))


def compile_kernels(config: GQSGDConfig, dtype: torch.dtype, device: torch.device, ranks: int) -> None:
    """Run what ``ranks`` ranks need once, on virtual ranks, so that no step waits for a compiler.

    Where the number of ranks is part of what is compiled, on a GPU, there are as many virtual ranks, and otherwise two.

    Args:
        config: the configuration, with its reducer chosen.
        dtype: dtype of the gradients.
        device: device of the gradients; nothing is done for other devices than CPUs and CUDA.
        ranks: number of ranks.
    """
    if not REDUCERS[config.reducer].compresses or device.type not in ("cpu", "cuda"):
        return
    count = max(2, ranks // max(1, config.node_size)) if device.type == "cuda" else 2
    between = between_nodes(config, ranks) if config.node_size else config
    if REDUCERS[between.reducer].adds_codes:  # two ranks may need more bits than the configuration has
        between = replace(between, bits=max(between.num_bits, 2))
    settings = [Setting(between, count, dtype)]
    if config.warmup_steps:
        settings.append(setting_for(settings[0], compressed=False))
    for setting in settings:
        stores = [new_store(setting.config, count, {0: 64}, dtype, device) for _ in range(count)]
        gradients = [torch.ones(72, dtype=dtype, device=device) for _ in range(count)]
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            Plan(_SEGMENTS, setting).average(gradients, 0, stores)
