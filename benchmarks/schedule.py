"""The learning rates of trainings of character models."""

from __future__ import annotations

import math


def share_of_rate(step: int, steps: int, warmup: int) -> float:
    """Returns the share of the highest learning rate in a step: warm-up, then a cosine down to a tenth.

    Args:
        step: number of the step, from 0.
        steps: of the whole training.
        warmup: first steps, in which the rate rises.
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))
