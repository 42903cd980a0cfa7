"""The learning rates of trainings of character models."""

from __future__ import annotations

import math


def share_of_rate(step: int, steps: int, warmup: int) -> float:
    """Returns the share of the highest learning rate in a step, from 0: warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))
