"""What a strategy ends with, less what the reference ends with from the same seed.

Two trainings with one seed start from the same weights and see the same samples, so their difference says more than the
spread of either over seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.comparison.results import REFERENCE, Run, markdown_table
from recipes.measuring.metrics import Metric

#: The table of the differences, in the folder of a comparison.
PAIRS_FILE = "seeds.md"


@dataclass(frozen=True)
class Pairs:
    """The differences between a variant and the reference.

    Attributes:
        variant: name of the variant.
        metric: what is compared.
        differences: final value of the variant, less that of the reference, by seed; not scaled.
    """

    variant: str
    metric: Metric
    differences: Mapping[int, float]

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.differences.values())

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; NaN with one seed."""
        return statistics.stdev(self.differences.values()) if len(self.differences) > 1 else math.nan


def pairs_of(variants: Mapping[str, Sequence[Run]]) -> list[Pairs]:
    """The pairs of every other variant, from its runs, that has a seed in common with the reference."""
    ends = {run.facts["seed"]: run.final for run in variants.get(REFERENCE, ())}
    made = []
    for variant, runs in variants.items():
        shared = {run.facts["seed"]: run.final - ends[run.facts["seed"]] for run in runs if run.facts["seed"] in ends}
        if variant != REFERENCE and shared:
            made.append(Pairs(variant, runs[0].metric, dict(sorted(shared.items()))))
    return made


def pair_table(pairs: Sequence[Pairs]) -> list[list[str]]:
    """Heads and rows: mean, standard deviation, and the difference of each seed; empty where no pair has two seeds."""
    shown = [pair for pair in pairs if len(pair.differences) > 1]
    if not shown:
        return []
    seeds = sorted({seed for pair in shown for seed in pair.differences})
    heads = [
        "strategy",
        f"{shown[0].metric.heading}, less {REFERENCE}'s",
        "± over seeds",
        *(f"seed {s}" for s in seeds),
    ]
    return [
        heads,
        *(
            [pair.variant, signed(pair.metric, pair.mean), pair.metric.text(pair.spread)]
            + [signed(pair.metric, pair.differences.get(seed, math.nan)) for seed in seeds]
            for pair in shown
        ),
    ]


def write_pairs(heads: Sequence[str], rows: Sequence[Sequence[str]], folder: Path) -> Path:
    """Write what `pair_table` gives to `PAIRS_FILE`; returns its path."""
    file = folder / PAIRS_FILE
    file.write_text(markdown_table(heads, rows), encoding="utf-8")
    return file


def signed(metric: Metric, difference: float) -> str:
    """A difference with its sign, in the unit of the metric's heading."""
    if math.isnan(difference):
        return "–"
    return f"{'−' if difference < 0 else '+'}{metric.text(abs(difference))}"
