"""Limits of the numbers of a configuration, and names that it takes. Nothing heavy is imported: both are checked before
torch is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from lightning_gqsgd.errors import did_you_mean
from recipes.errors import RecipeError, typed

#: Names that settings of the optimizer take.
OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("onecycle", "cosine", "step")
#: What Lightning's Trainer takes for ``precision``; a test compares the list with Lightning's.
PRECISIONS = (
    *("transformer-engine", "transformer-engine-float16", "16-true", "16-mixed", "bf16-true", "bf16-mixed"),
    *("32-true", "64-true", "64", "32", "16", "bf16"),
)
#: What Lightning's Trainer takes for ``accelerator``; a test compares the list with Lightning's.
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps", "tpu")
#: The largest seed that numpy takes.
LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Limit:
    """What a setting may be.

    Attributes:
        words: the limit in words.
        example: a value inside.
        holds: whether a value that is no text and no truth value is inside.
        optional: whether null is a value.
    """

    words: str
    example: Any
    holds: Callable[[Any], bool]
    optional: bool = False


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and value >= least


def _part(value: Any) -> bool:
    """Whether a value is a number of batches, or a part of all batches."""
    return _whole(value, 0) or isinstance(value, float) and 0 <= value <= 1


_COUNT = Limit("an integer of at least 1", 1, lambda value: _whole(value, 1))
_PIXELS = Limit("an integer of at least 0, in pixels", 2, lambda value: _whole(value, 0))
#: More threads than any machine has, which it would still try to start.
_MOST_THREADS = 1024
_THREADS = Limit(
    f"an integer from 1 to {_MOST_THREADS}, or null",
    1,
    lambda value: _whole(value, 1) and value <= _MOST_THREADS,
    optional=True,
)
_OPTIONAL_COUNT = Limit("an integer of at least 1, or null", 1, lambda value: _whole(value, 1), optional=True)
_FRACTION = Limit("a number from 0 to less than 1", 0.1, lambda value: _finite(value) and 0 <= value < 1)
#: A run of 0 steps would load everything, and end well with the network that it began with.
_DURATION = Limit("an integer of at least 1, or -1 for no limit", 20, lambda value: _whole(value, 1) or value == -1)
_BATCHES = Limit(
    "an integer of at least 0, a fraction from 0.0 to 1.0, or null for all batches", 0.5, _part, optional=True
)
_SOME_BATCHES = Limit(
    "an integer of at least 1, a fraction above 0.0 up to 1.0, or null for all batches",
    0.5,
    lambda value: _part(value) and value > 0,
    optional=True,
)

#: The limits by the names of settings; a setting that a configuration does not have has none.
LIMITS: dict[str, Limit] = {
    "optimizer.lr": Limit("a finite number above 0", 0.1, lambda value: _finite(value) and value > 0),
    "optimizer.scale_lr": _OPTIONAL_COUNT,
    "optimizer.weight_decay": Limit("a finite number of at least 0", 0.0005, lambda v: _finite(v) and v >= 0),
    "optimizer.momentum": _FRACTION,
    "optimizer.warmup": _FRACTION,
    "task.label_smoothing": Limit("a number from 0 to 1", 0.1, lambda value: _finite(value) and 0 <= value <= 1),
    "threads": _THREADS,
    "seed": Limit(f"an integer from 0 to {LARGEST_SEED}", 0, lambda v: _whole(v, 0) and v <= LARGEST_SEED),
    "model.width": _COUNT,
    "data.batch_size": _COUNT,
    "data.image_size": _COUNT,
    "data.shift": _PIXELS,
    "data.cutout": _PIXELS,
    "trainer.max_epochs": replace(_DURATION, optional=True),
    "trainer.max_steps": _DURATION,
    "trainer.accumulate_grad_batches": _COUNT,
    "trainer.log_every_n_steps": Limit("an integer of at least 0", 10, lambda value: _whole(value, 0)),
    "trainer.gradient_clip_val": Limit(
        "a finite number above 0, or null for no clipping", 0.5, lambda v: _finite(v) and v > 0, optional=True
    ),
    "trainer.check_val_every_n_epoch": _OPTIONAL_COUNT,
    "trainer.val_check_interval": _SOME_BATCHES,
    "trainer.limit_train_batches": _SOME_BATCHES,
    "trainer.limit_val_batches": _BATCHES,
    "trainer.limit_test_batches": _BATCHES,
}

#: Settings that take a name, with all names.
CHOICES: dict[str, tuple[str, ...]] = {
    "optimizer.name": OPTIMIZERS,
    "optimizer.schedule": SCHEDULES,
    "trainer.accelerator": ACCELERATORS,
    "trainer.precision": PRECISIONS,
}


def check_limits(config: Mapping[str, Any]) -> None:
    """Check the numbers and the names of a configuration.

    Raises:
        RecipeError: a number is not finite or out of range, a name is none of those that its setting takes, a name in
            the path of the run's folder leads out of it, or the run has no end.
    """
    for key, limit in LIMITS.items():
        node, _, leaf = key.rpartition(".")
        settings = config.get(node, {}) if node else config
        if leaf in settings:
            _check(key, settings[leaf], limit)
    for key, names in CHOICES.items():
        node, _, leaf = key.rpartition(".")
        if leaf not in config[node] or (key == "optimizer.name" and "_target_" in config[node]):
            continue  # a node of the user's own, where the name is a label
        value = typed(config[node][leaf])
        if value not in names:
            raise RecipeError(f"{key}={value} is not one of {', '.join(names)}{did_you_mean(value, names)}")
    for key, name in (("title", config["title"]), ("strategy.name", config["strategy"]["name"])):
        if ".." in PurePath(str(name)).parts:
            raise RecipeError(
                f"{key}={name} would lead out of the folder of all runs; take a name without '..', and paths.log_dir="
                "FOLDER for another folder of all runs"
            )
    _check_end(config["trainer"])


def _check(key: str, value: Any, limit: Limit) -> None:
    if value is None and limit.optional:
        return
    # True is an integer in Python, and no number that anybody means.
    if isinstance(value, bool) or not limit.holds(value):
        raise RecipeError(f"{key}={typed(value)} is out of range: {limit.words}, e.g. {key}={limit.example}")


def _check_end(trainer: Mapping[str, Any]) -> None:
    """Refuse a run without an end, whose rates would have no schedule."""
    epochs, steps = trainer["max_epochs"], trainer["max_steps"]
    # Lightning takes 1,000 epochs for null, where there is no limit of steps.
    if epochs == -1 and steps == -1:
        raise RecipeError(
            f"trainer.max_epochs={epochs} with trainer.max_steps={steps} makes a run without an end, for which there "
            "is no schedule of rates; set either, e.g. trainer.max_epochs=20"
        )
