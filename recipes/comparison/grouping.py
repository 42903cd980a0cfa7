"""Which settings tell the variants of a comparison apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def grouping(configs: Sequence[dict[str, Any]], across_seeds: bool = False) -> tuple[str, ...]:
    """Keys of the configuration whose values tell variants apart: strategy.name, and what else differs.

    Names of groups go first: a key that follows from a name, like the size of a model, is then not needed.

    Args:
        configs: the configurations of all runs.
        across_seeds: whether runs of different seeds are compared, too, as they must be where the runs are no product
            of settings and seeds. A key whose values are the seeds themselves is then no setting. A key outside of the
            strategy is then needed wherever it differs and does not follow from a key of its own node: runs of two
            strategies may have been made with two learning rates, and would look as if only their strategies differed.
    """
    runs = [dict(_flattened(config)) for config in configs]
    keys = list(dict.fromkeys(key for run in runs for key in run))
    first = () if across_seeds else ("seed",)
    if across_seeds:
        keys = [key for key in keys if not _is_the_seed(key, runs)]
    chosen = ["strategy.name"]
    for key in sorted(keys, key=lambda name: not name.endswith(".name")):
        apart = across_seeds and _node(key) != "strategy"
        known = [name for name in chosen if not apart or _node(name) == _node(key)]
        alike = [[repr(run.get(name)) for name in (*first, *known)] for run in runs]
        values = [repr(run.get(key)) for run in runs]
        if any(
            alike[number] == alike[other] and values[number] != values[other]
            for number in range(len(runs))
            for other in range(number)
        ):
            chosen.append(key)
    return tuple(chosen)


def _node(key: str) -> str:
    return key.partition(".")[0]


def _is_the_seed(key: str, runs: Sequence[dict[str, Any]]) -> bool:
    """Whether each run has its seed at a key, as with ``data.seed: ${seed}``."""
    return all(run[key] == run["seed"] for run in runs if key in run)


def _flattened(config: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs = []
    for key, value in config.items():
        if isinstance(value, dict):
            pairs += _flattened(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs
