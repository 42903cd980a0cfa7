"""Learning-rate schedules by optimizer step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from recipes.limits import SCHEDULES


def make_schedule(
    optimizer: Optimizer, name: str, steps: float, warmup: float, milestones: Sequence[float] = ()
) -> LambdaLR:
    """A schedule whose largest rate is that of the optimizer.

    The rate is the optimizer's times a factor, which depends on the step alone. So a run that is resumed with more
    epochs follows the longer schedule.

    * ``"onecycle"`` is torch's OneCycleLR with constant momentum: a cosine up from 1/25, a cosine down to 1/250000.
    * ``"cosine"`` rises linearly from the first step, and falls along a cosine to zero.
    * ``"step"`` rises linearly, and falls to a tenth of the rate at each of ``milestones``.

    Args:
        optimizer: the optimizer.
        name: name of the schedule.
        steps: number of optimizer steps of the whole run.
        warmup: fraction of the steps in which the rate rises, 0 to less than 1.
        milestones: of ``"step"``: rising fractions of the steps, from ``warmup`` to less than 1.

    Raises:
        ValueError: an unknown name, a fraction out of range, or a run without a limit.
    """
    if name not in SCHEDULES:
        raise ValueError(f"optimizer.schedule={name!r} is not one of {', '.join(SCHEDULES)}")
    if not 0 <= warmup < 1:
        raise ValueError(f"optimizer.warmup={warmup} is out of range: 0 to less than 1")
    if not math.isfinite(steps):
        raise ValueError("the schedule needs the length of the run; set trainer.max_epochs or trainer.max_steps")
    total = max(1, int(steps))
    if name == "step":
        _check_milestones(milestones, warmup)
        return LambdaLR(optimizer, lambda step: _step(step, total, warmup, milestones))
    factor = _onecycle if name == "onecycle" else _cosine
    return LambdaLR(optimizer, lambda step: factor(step, total, warmup))


def _check_milestones(milestones: Sequence[float], warmup: float) -> None:
    rising = list(milestones) == sorted(set(milestones))
    if not milestones or not rising or milestones[0] < warmup or milestones[-1] >= 1:
        raise ValueError(
            f"optimizer.milestones={list(milestones)} of optimizer.schedule=step: "
            f"need at least one fraction, rising, from optimizer.warmup={warmup} to less than 1"
        )


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


def _step(step: int, total: int, warmup: float, milestones: Sequence[float]) -> float:
    rising = round(warmup * total)
    if step < rising:
        return (step + 1) / rising
    return float(0.1 ** sum(step >= round(milestone * total) for milestone in milestones))


def _cosine_between(start: float, end: float, fraction: float) -> float:
    """Half a cosine from ``start`` at fraction 0 to ``end`` at fraction 1."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * fraction))
