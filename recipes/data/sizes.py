"""How many training samples a run has, as far as the configuration says it; nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_gqsgd.errors import counted
from recipes.errors import RecipeError

#: Training samples of the collections that are the same on every machine; a test compares them with what is loaded.
TRAINING_SAMPLES = {"recipes.data.digits.DigitsData": 1437}


def check_known_samples(data: Mapping[str, Any], processes: int) -> None:
    """Check what `check_fills_a_step` checks, for data whose size is known before they are loaded."""
    sizes = [data.get("train_samples"), TRAINING_SAMPLES.get(str(data.get("_target_")))]
    known = [size for size in sizes if isinstance(size, int)]
    if known:
        total = min(known)
        # One sample is too few in any case, and the message is about that.
        kept = kept_for_validation(data.get("val_samples"), total) if total > 1 else 0
        check_fills_a_step(total - kept, data["batch_size"], processes)


def kept_for_validation(val_samples: int | float | None, total: int) -> int:
    """How many training samples validation has and training does not.

    Args:
        val_samples: a number of samples; a share of them, below 1, which is one sample at least; None: none.
        total: number of training samples.

    Returns:
        0 for None; otherwise at least 1, and at least 1 fewer than all.
    """
    if val_samples is None:
        return 0
    count = max(1, round(val_samples * total)) if 0 < val_samples < 1 else val_samples
    if not isinstance(count, int) or not 1 <= count < total:
        raise RecipeError(
            f"data.val_samples={val_samples} is out of range: 1 to {total - 1}, of {total} training samples, or a "
            "share of them, such as 0.1"
        )
    return count


def check_fills_a_step(samples: int, batch_size: int, processes: int) -> None:
    """Check that training samples make at least one step of all processes."""
    if samples >= batch_size * processes:
        return
    most = samples // processes
    remedy = f"take data.batch_size={most} or less" if most else "take fewer processes, or more training samples"
    raise RecipeError(
        f"{counted(max(samples, 0), 'training sample')} cannot fill one step of "
        f"{counted(processes, 'process', 'processes')} with data.batch_size={batch_size}; {remedy}"
    )
