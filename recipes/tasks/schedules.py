"""Learning-rate schedules by optimizer step."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

SCHEDULES = ("onecycle", "cosine")


def make_schedule(optimizer: Optimizer, name: str, steps: float, warmup: float) -> LambdaLR:
    """Schedule whose peak is the optimizer's rate.

    The factors are functions of the step alone, so a run resumed with more epochs follows the longer schedule.

    Args:
        name: ``"onecycle"`` (torch's OneCycleLR with constant momentum: cosine up from 1/25, cosine down to 1/250000)
            or ``"cosine"`` (linear up from the first step, cosine down to zero).
        steps: number of optimizer steps of the whole run.
        warmup: fraction of the steps in which the rate rises, 0 to less than 1.

    Raises:
        ValueError: an unknown name, a fraction out of range, or an unlimited run.
    """
    if name not in SCHEDULES:
        raise ValueError(f"optimizer.schedule={name!r} is not one of {', '.join(SCHEDULES)}")
    if not 0 <= warmup < 1:
        raise ValueError(f"optimizer.warmup={warmup} is out of range: 0 to less than 1")
    if not math.isfinite(steps):
        raise ValueError("the schedule needs the length of the run; set trainer.max_epochs or trainer.max_steps")
    factor = _onecycle if name == "onecycle" else _cosine
    return LambdaLR(optimizer, lambda step: factor(step, max(1, int(steps)), warmup))


def _onecycle(step: int, total: int, warmup: float) -> float:
    low, lowest, top = 1 / 25, 1 / 25e4, warmup * total - 1
    if step <= top:
        return _cosine_between(low, 1.0, step / top if top > 0 else 1.0)
    return _cosine_between(1.0, lowest, min(1.0, (step - top) / (total - 1 - top))) if total > 1 else 1.0


def _cosine(step: int, total: int, warmup: float) -> float:
    rising = round(warmup * total)
    if step < rising:
        return (step + 1) / rising
    return _cosine_between(1.0, 0.0, min(1.0, (step - rising) / max(1, total - rising)))


def _cosine_between(start: float, end: float, fraction: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * fraction))
