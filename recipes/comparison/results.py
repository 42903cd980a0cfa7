"""Finished runs read back from their folders, and the table that compares them."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.tasks import names

Curve = NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes:
        facts: contents of ``result.json``.
        time: training seconds at each validation, and at the final test if there was none after the last step;
            likewise ``epoch``, ``mb_sent`` (10^6 bytes) and ``accuracy`` (0 to 1).
        codec_s: median seconds per step in which gqsgd encoded and decoded, in whatever thread; NaN for others.
    """

    facts: dict[str, Any]
    time: Curve
    epoch: Curve
    mb_sent: Curve
    accuracy: Curve
    codec_s: float

    @classmethod
    def load(cls, folder: Path) -> Run:
        """Read ``result.json`` and ``metrics.csv``."""
        facts = json.loads((folder / "result.json").read_text())
        rows = read_rows(folder / "metrics.csv")
        points = [row for row in rows if names.VAL_ACC in row]
        tests = [{**row, names.VAL_ACC: row[names.TEST_ACC]} for row in rows if names.TEST_ACC in row]  # the same split
        if tests and (not points or points[-1][names.SAMPLES] < tests[-1][names.SAMPLES]):
            points.append(tests[-1])

        def column(name: str) -> Curve:
            return np.array([row.get(name, math.nan) for row in points], dtype=np.float64)

        codec = [row[names.ENCODE_S] + row.get(names.DECODE_S, 0.0) for row in rows if names.ENCODE_S in row]
        return cls(
            facts,
            time=column(names.TRAIN_TIME),
            epoch=column(names.SAMPLES) / facts["train_samples"],
            mb_sent=column(names.MB_SENT),
            accuracy=column(names.VAL_ACC),
            codec_s=statistics.median(codec) if codec else math.nan,
        )

    @property
    def final(self) -> float:
        """Accuracy of the last weights on the whole test split, 0 to 1."""
        last = self.accuracy[-1] if self.accuracy.size else math.nan
        return float(self.facts["metrics"].get(names.TEST_ACC, last))

    @property
    def best(self) -> float:
        """Highest accuracy of all validations; NaN without one."""
        return float(self.accuracy.max()) if self.accuracy.size else math.nan

    def time_to(self, target: float) -> float:
        """Training seconds at the first validation with at least ``target``; infinite if there is none."""
        reached = np.flatnonzero(self.accuracy >= target)
        return float(self.time[reached[0]]) if reached.size else math.inf


def read_rows(file: Path) -> list[dict[str, float]]:
    """Rows of a ``metrics.csv``, without empty cells."""
    with open(file, newline="") as lines:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(lines)]


def common_target(variants: dict[str, list[Run]]) -> float:
    """99 % of the lowest best accuracy of all runs, so that every one of them gets there; NaN without validations."""
    bests = [run.best for runs in variants.values() for run in runs if not math.isnan(run.best)]
    return 0.99 * min(bests) if bests else math.nan


@dataclass(frozen=True)
class Line:
    """A variant's line of the table: means over seeds, spread = standard deviation, seconds, accuracies 0 to 1."""

    variant: str
    seeds: int
    accuracy: float
    accuracy_spread: float
    best: float
    time_to_target: float
    train_time: float
    step_s: float
    step_ratio: float
    mb_sent: float
    bits_per_coordinate: float


def compare(variants: dict[str, list[Run]], target: float, reference: str = "ddp") -> list[Line]:
    """One line per variant; step times are also given as ratios to the variant ``reference`` (NaN if it is absent)."""
    step = {variant: _mean([run.facts["step_s"]["median"] for run in runs]) for variant, runs in variants.items()}
    return [
        Line(
            variant,
            seeds=len(runs),
            accuracy=_mean([run.final for run in runs]),
            accuracy_spread=statistics.stdev([run.final for run in runs]) if len(runs) > 1 else math.nan,
            best=max(run.best for run in runs),
            time_to_target=_mean([run.time_to(target) for run in runs]),
            train_time=_mean([run.facts["train_time"] for run in runs]),
            step_s=step[variant],
            step_ratio=step[variant] / step.get(reference, math.nan),
            mb_sent=_mean([run.facts["mb_sent"] for run in runs]),
            bits_per_coordinate=_mean([run.facts["bits_per_coordinate"] or math.nan for run in runs]),
        )
        for variant, runs in variants.items()
    ]


def headings(target: float, reference: str = "ddp") -> list[str]:
    """Column titles of `cells`."""
    to_target = "time to target" if math.isnan(target) else f"time to {100 * target:.1f}% (s)"
    return [
        *("strategy", "seeds", "accuracy (%)", "best (%)", to_target, "train (s)", "step (ms)"),
        *(f"step vs {reference}", "sent (MB)", "bits per coord."),
    ]


def cells(line: Line) -> list[str]:
    """The line as text."""
    spread = "" if math.isnan(line.accuracy_spread) else f" ± {100 * line.accuracy_spread:.2f}"
    return [
        line.variant,
        str(line.seeds),
        f"{100 * line.accuracy:.2f}{spread}",
        _number(100 * line.best, ".2f"),
        "not reached" if math.isinf(line.time_to_target) else _number(line.time_to_target, ".1f"),
        f"{line.train_time:.1f}",
        f"{1000 * line.step_s:.1f}",
        _number(line.step_ratio, ".2f"),
        f"{line.mb_sent:,.1f}",
        _number(line.bits_per_coordinate, ".2f"),
    ]


def write_tables(lines: Sequence[Line], target: float, title: str, folder: Path) -> tuple[Path, Path]:
    """``table.md`` for reading and ``table.csv`` with plain numbers; returns both paths."""
    heads = headings(target)
    rows = [heads, ["---", *["---:"] * (len(heads) - 1)], *(cells(line) for line in lines)]
    markdown, plain = folder / "table.md", folder / "table.csv"
    markdown.write_text(f"**{title}**\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n")
    with open(plain, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*Line.__dataclass_fields__, "target"])
        writer.writeheader()
        writer.writerows({**line.__dict__, "target": target} for line in lines)
    return markdown, plain


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else f"{value:{form}}"
