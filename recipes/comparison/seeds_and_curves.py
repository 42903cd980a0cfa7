"""Numbers of a comparison for other programs: a row for each seed, and a row for each point of all curves."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.comparison.results import REFERENCE, Run, compare, plain_numbers
from recipes.measuring import names

#: A row for each variant and seed, and a row for each point, in the folder of a comparison.
SEEDS_FILE, CURVES_FILE = "seeds.csv", "curves.csv"


def write_seeds(variants: Mapping[str, Sequence[Run]], target: float, folder: Path) -> Path:
    """Write the columns of ``table.csv`` for each seed; ``step_ratio`` is that to the reference with the same seed."""
    return _write(_seeds(variants, target), folder / SEEDS_FILE)


def write_curves(variants: Mapping[str, Sequence[Run]], folder: Path) -> Path:
    """Write a row for each row of a run that has a loss or the metric; cells of what it has not logged are empty."""
    return _write(_points(variants), folder / CURVES_FILE)


def _seeds(variants: Mapping[str, Sequence[Run]], target: float) -> Iterable[dict[str, Any]]:
    references = {run.facts["seed"]: run for run in variants.get(REFERENCE, ())}
    for variant, runs in variants.items():
        for run in runs:
            seed = run.facts["seed"]
            beside = {REFERENCE: [references[seed]]} if seed in references else {}
            line = plain_numbers(compare({**beside, variant: [run]}, target)[-1], target)
            kept = {name: value for name, value in line.items() if name not in ("seeds", "final_spread")}
            yield {"variant": variant, "seed": seed, **kept}


def _points(variants: Mapping[str, Sequence[Run]]) -> Iterable[dict[str, Any]]:
    for variant, runs in variants.items():
        for run in runs:
            logged = (names.TRAIN_LOSS, names.VAL_LOSS, run.metric.val)
            for row in run.rows:
                yield {
                    "variant": variant,
                    "seed": run.facts["seed"],
                    "step": int(row["step"]) + 1,
                    "epoch": row.get(names.SAMPLES, math.nan) / run.facts["train_samples"],
                    "seconds": row.get(names.TRAIN_TIME, ""),
                    "mb_sent": row.get(names.MB_SENT, ""),
                    **{name: row.get(name, "") for name in logged},
                }


def _write(rows: Iterable[dict[str, Any]], path: Path) -> Path:
    every = list(rows)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(every[0]) if every else [])
        writer.writeheader()
        writer.writerows(every)
    return path
