"""Finished runs read back from their folders, and the table that compares them."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_gqsgd.research.theory import bits_at
from recipes.files import METRICS_FILE, RESULT_FILE
from recipes.measuring import names
from recipes.measuring.amounts import megabytes_in_words
from recipes.measuring.metrics import LOSS, Metric

Curve = NDArray[np.float64]

#: The variant that all others are compared with.
REFERENCE = "ddp"

#: What the last columns of the table say.
BOUND_NOTE = (
    "bits above bound: message bits less log2(1/r), the least bits per coordinate for the relative L2 error r of the "
    "gradients' mean (of independent normal gradients; alike or sparse ones may need fewer). message bits: one rank's "
    "gradient on the wire, with scales, padding and uncompressed parameters. bits per coord.: all that a process sent, "
    "over a ring's 2 (n - 1)/n. r: mean over the sampled steps, each against the mean of its own step; few levels, or "
    "a memory, which sends older errors as well, may have r above 1, for which the bound is 0."
)


@dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes:
        facts: contents of ``result.json``.
        time: training seconds at each validation (points,); at the final test if there was no validation.
        epoch: epochs at the same points.
        mb_sent: 10^6 bytes of gradients sent at the same points.
        value: the task's metric at the same points.
        codec_s: median seconds per step in which gqsgd encoded and decoded, in whatever thread; NaN for other
            strategies.
        message_bits: bits per coordinate of one rank's messages; NaN for strategies other than gqsgd.
        rel_l2: relative L2 error of the gradients' mean, averaged over the sampled steps; NaN for strategies other than
            gqsgd.
        val_loss: the loss at the same points; NaN where none was logged.
        rows: the rows of ``metrics.csv`` in which the run has logged a loss or the metric, without those of the test.
    """

    facts: dict[str, Any]
    time: Curve
    epoch: Curve
    mb_sent: Curve
    value: Curve
    codec_s: float
    message_bits: float = math.nan
    rel_l2: float = math.nan
    val_loss: Curve = field(default_factory=lambda: np.empty(0))
    rows: Sequence[Mapping[str, float]] = ()

    @classmethod
    def load(cls, folder: Path) -> Run:
        """Read ``result.json`` and ``metrics.csv``."""
        facts = json.loads((folder / RESULT_FILE).read_text())
        # JSON has no NaN: a value that was not finite is null there.
        facts["metrics"] = {name: math.nan if value is None else value for name, value in facts["metrics"].items()}
        rows = read_rows(folder / METRICS_FILE)
        metric = Metric.of_facts(facts)
        # The test may have other samples than validations, so a curve has points of one of them only.
        points = [row for row in rows if metric.val in row]
        if not points:
            tested = [row for row in rows if metric.test in row][-1:]
            points = [
                {**row, metric.val: row[metric.test], names.VAL_LOSS: row.get(names.TEST_LOSS, math.nan)}
                for row in tested
            ]

        def column(name: str) -> Curve:
            return np.array([row.get(name, math.nan) for row in points], dtype=np.float64)

        codec = [row[names.ENCODE_S] + row.get(names.DECODE_S, 0.0) for row in rows if names.ENCODE_S in row]
        return cls(
            facts,
            time=column(names.TRAIN_TIME),
            epoch=column(names.SAMPLES) / facts["train_samples"],
            mb_sent=column(names.MB_SENT),
            value=column(metric.val),
            codec_s=statistics.median(codec) if codec else math.nan,
            message_bits=next((row[names.MESSAGE_BITS] for row in rows[::-1] if names.MESSAGE_BITS in row), math.nan),
            rel_l2=_mean(_samples([row[names.REL_L2] for row in rows if names.REL_L2 in row])),
            val_loss=column(names.VAL_LOSS),
            rows=[row for row in rows if {names.TRAIN_LOSS, names.VAL_LOSS, metric.val} & row.keys()],
        )

    @property
    def metric(self) -> Metric:
        """What the task is judged by."""
        return Metric.of_facts(self.facts)

    @property
    def final(self) -> float:
        """The metric of the last weights on the whole test split."""
        last = self.value[-1] if self.value.size else math.nan
        return float(self.facts["metrics"].get(self.metric.test, last))

    @property
    def best(self) -> float:
        """The metric's best value of all validations; NaN without validations."""
        return self.metric.worst_first(self.value.tolist())[-1] if self.value.size else math.nan

    @property
    def in_loss(self) -> Run:
        """This run as if its task were judged by the loss."""
        facts = {**self.facts, "metric": LOSS.key, "judged_by": asdict(LOSS)}
        return replace(self, facts=facts, value=self.val_loss)

    def last(self, name: str) -> float:
        """The value that the run has logged last under a name, the test's included; NaN if there is none."""
        logged = [row[name] for row in self.rows if name in row]
        return logged[-1] if logged else float(self.facts["metrics"].get(name, math.nan))

    def at_speed_of(self, probe: Run) -> Run:
        """This run with the median step of another run, for a link on which only a few steps were made.

        Training does not depend on time. Values, steps and bytes stay, and seconds become steps times the probe's step.
        """
        step = probe.facts["step_s"]["median"]
        per_sample = self.facts["steps"] * step / self.facts["samples"]
        seconds = self.epoch * self.facts["train_samples"] * per_sample
        timed = {key: probe.facts[key] for key in ("step_s", "exposed_s")}
        facts = {**self.facts, **timed, "train_time": self.facts["steps"] * step}
        rows = [{**row, names.TRAIN_TIME: row.get(names.SAMPLES, math.nan) * per_sample} for row in self.rows]
        return replace(self, facts=facts, time=seconds, codec_s=probe.codec_s, rows=rows)

    def time_to(self, target: float) -> float:
        """Training seconds at the first validation that is as good as ``target``; infinite if there is none."""
        reached = (
            float(t) for t, value in zip(self.time, self.value, strict=True) if self.metric.reached(value, target)
        )
        return next(reached, math.inf)


def read_rows(file: Path) -> list[dict[str, float]]:
    """Rows of a ``metrics.csv``, without empty cells; none if the run has logged nothing, and so has no such file."""
    if not file.is_file():
        return []
    with open(file, newline="") as lines:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(lines)]


def common_target(variants: dict[str, list[Run]]) -> float:
    """The worst of all runs' best values, less 1 %, so that every run reaches the target; NaN without validations."""
    every = [run for runs in variants.values() for run in runs if not math.isnan(run.best)]
    if not every:
        return math.nan
    metric = every[0].metric
    worst = metric.worst_first([run.best for run in every])[0]
    return (0.99 if metric.higher_is_better == (worst > 0) else 1.01) * worst


@dataclass(frozen=True)
class Line:
    """A variant's line of the table.

    Values are means over seeds, a spread is a standard deviation, times are in seconds, and the metric is not scaled.
    """

    variant: str
    metric: Metric
    seeds: int
    final: float
    final_spread: float
    best: float
    time_to_target: float
    train_time: float
    step_s: float
    step_ratio: float
    mb_sent: float
    bits_per_coordinate: float
    message_bits: float
    rel_l2: float
    train_loss: float = math.nan
    val_loss: float = math.nan
    test_loss: float = math.nan

    @property
    def bits_above_bound(self) -> float:
        """Message bits, less the fewest bits that the error allows; see `BOUND_NOTE`."""
        return self.message_bits - bits_at(self.rel_l2) if self.rel_l2 > 0 else math.nan


def compare(variants: dict[str, list[Run]], target: float) -> list[Line]:
    """One line per variant. Step times are given as ratios to `REFERENCE` as well, which are NaN if it is absent."""
    step = {variant: _mean([run.facts["step_s"]["median"] for run in runs]) for variant, runs in variants.items()}
    return [
        Line(
            variant,
            runs[0].metric,
            seeds=len(runs),
            final=_mean([run.final for run in runs]),
            final_spread=statistics.stdev([run.final for run in runs]) if len(runs) > 1 else math.nan,
            best=runs[0].metric.worst_first([run.best for run in runs])[-1],
            time_to_target=_mean([run.time_to(target) for run in runs]),
            train_time=_mean([run.facts["train_time"] for run in runs]),
            step_s=step[variant],
            step_ratio=step[variant] / step.get(REFERENCE, math.nan),
            mb_sent=_mean([run.facts["mb_sent"] for run in runs]),
            bits_per_coordinate=_mean([run.facts["bits_per_coordinate"] or math.nan for run in runs]),
            message_bits=_mean([run.message_bits for run in runs]),
            rel_l2=_mean([run.rel_l2 for run in runs]),
            train_loss=_mean([run.last(names.TRAIN_LOSS) for run in runs]),
            val_loss=_mean([run.last(names.VAL_LOSS) for run in runs]),
            test_loss=_mean([run.last(names.TEST_LOSS) for run in runs]),
        )
        for variant, runs in variants.items()
    ]


def contenders(lines: Sequence[Line]) -> tuple[Line, list[Line], list[Line]] | None:
    """Plain DDP, torch's other variants, and all others; None if plain DDP or the others are missing."""
    reference = next((line for line in lines if line.variant == REFERENCE), None)
    own = [line for line in lines if line.variant.startswith(("ddp", "powersgd"))]
    others = [line for line in lines if line not in own]
    if reference is None or not others:
        return None
    return reference, [line for line in own if line is not reference], others


def headings(metric: Metric, target: float) -> list[str]:
    """Column titles of `cells`."""
    unit = "%" if metric.percent else ""
    to_target = "time to target" if math.isnan(target) else f"time to {target_text(metric, target)} (s)"
    best = f"best ({unit})" if unit else "best"
    return [
        *("strategy", "seeds", metric.heading, best, to_target, "train (s)", "step (ms)"),
        *(f"step vs {REFERENCE}", "sent (MB)", "bits per coord.", "message bits", "rel. L2 error", "bits above bound"),
    ]


def target_text(metric: Metric, target: float) -> str:
    """A target with its unit, with one digit fewer than values have."""
    return metric.shown(target, max(0, metric.digits - 1))


def seeds_in_words(counts: Iterable[int]) -> str:
    """How many seeds variants have, e.g. "3 seeds"; "up to 3 seeds" if not all of them have as many."""
    each = {*counts}
    most = max(each)
    return f"up to {most} seeds" if len(each) > 1 else "one seed" if most == 1 else f"{most} seeds"


def cells(line: Line) -> list[str]:
    """The line as text."""
    spread = "" if math.isnan(line.final_spread) else f" ± {line.metric.text(line.final_spread)}"
    return [
        line.variant,
        str(line.seeds),
        f"{line.metric.text(line.final)}{spread}",
        line.metric.text(line.best),
        "not reached" if math.isinf(line.time_to_target) else _number(line.time_to_target, ".1f"),
        f"{line.train_time:.1f}",
        f"{1000 * line.step_s:.1f}",
        _number(line.step_ratio, ".2f"),
        megabytes_in_words(line.mb_sent),
        _number(line.bits_per_coordinate, ".2f"),
        _number(line.message_bits, ".2f"),
        _number(line.rel_l2, ".3g"),
        _number(line.bits_above_bound, ".2f"),
    ]


def knows_bound(lines: Sequence[Line]) -> bool:
    """Whether any line has bits above the bound."""
    return any(not math.isnan(line.bits_above_bound) for line in lines)


def write_tables(lines: Sequence[Line], target: float, title: str, folder: Path) -> tuple[Path, Path]:
    """Write ``table.md`` for reading and ``table.csv`` with plain numbers; returns both paths."""
    table = markdown_table(headings(lines[0].metric, target), [cells(line) for line in lines])
    markdown, plain = folder / "table.md", folder / "table.csv"
    text = f"**{title}**\n\n{table}" + (f"\n{BOUND_NOTE}\n" if knows_bound(lines) else "")
    markdown.write_text(text, encoding="utf-8")
    with open(plain, "w", newline="", encoding="utf-8") as file:
        rows = [plain_numbers(line, target) for line in lines]
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return markdown, plain


def plain_numbers(line: Line, target: float) -> dict[str, Any]:
    """The line as plain numbers by the name of their column."""
    return {**line.__dict__, "metric": line.metric.key, "bits_above_bound": line.bits_above_bound, "target": target}


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of a table whose first column is text, and whose other columns are numbers."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _samples(column: Sequence[float]) -> list[float]:
    """The column without NaN, and without the repetitions of a sample in the rows after it."""
    logged = [value for value in column if not math.isnan(value)]
    return [value for number, value in enumerate(logged) if not number or value != logged[number - 1]]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else f"{value:{form}}"
