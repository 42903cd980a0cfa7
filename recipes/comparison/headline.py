"""One picture for those who read nothing else: how much sooner a target is reached."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pictures.style import DPI, STYLE, colours
from recipes.comparison.plots import on_common_points
from recipes.comparison.results import Line, Run, target_text

REFERENCE = "ddp"
#: The least factor that is worth a picture.
WORTH = 1.05
#: Size in inches, and characters in a line of the words below the title.
SIZE, WORDS = (7.6, 4.3), 105
#: Units of time, in seconds, with the longest time that is shown in each.
UNITS = (("s", 1.0, 300.0), ("min", 60.0, 3 * 3600.0), ("h", 3600.0, math.inf))


def save_headline(
    variants: Mapping[str, Sequence[Run]], lines: Sequence[Line], target: float, words: str, file: Path
) -> bool:
    """Draw the curves of plain DDP, of the best other variant of torch's, and of the best of all others.

    Args:
        variants: the runs of each variant.
        lines: the table.
        target: value of the metric whose time is compared.
        words: what was trained, and where.
        file: the picture.

    Returns:
        False, and no file, if plain DDP is missing, a curve misses the target, or nothing is gained.
    """
    chosen = _chosen(lines)
    if not chosen or not all(math.isfinite(line.time_to_target) for line in chosen):
        return False
    plain, best = chosen[0], chosen[-1]
    gain = plain.time_to_target / best.time_to_target
    if gain < WORTH:
        return False
    metric, seeds = best.metric, max(line.seeds for line in chosen)
    value = target_text(metric, target)
    goal = f"{value} {metric.label}" if metric.percent else f"{metric.label} {value}"
    longest = max(float(run.time[-1]) for line in chosen for run in variants[line.variant])
    unit, length, _ = next(unit for unit in UNITS if longest <= unit[2])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        shades = colours([line.variant for line in chosen])
        for line in chosen:
            _draw(axes, variants[line.variant], length, shades[line.variant])
        axes.set_xlim(0, 1.02 * longest / length)
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, top + 0.12 * (top - bottom))  # room for the names of the curves
        if metric.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
        for line in chosen:
            _label(axes, line, variants[line.variant], length, longest, shades[line.variant])
        _mark(axes, target, (best.time_to_target / length, plain.time_to_target / length), f"{gain:.1f}× sooner")
        axes.set_xlabel(f"training time ({unit})")
        axes.set_ylabel(f"validation {metric.label}")
        axes.set_title(
            f"{best.variant} reaches {goal} {gain:.1f} times sooner than {plain.variant}", pad=34, fontsize=12
        )
        notes = [
            f"{line.time_to_target / best.time_to_target:.1f} times sooner than {line.variant}" for line in chosen[1:-1]
        ]
        notes += [words, f"mean and range of {seeds} seeds" if seeds > 1 else "one seed"]
        axes.annotate(
            fill("; ".join(notes), WORDS),
            (0, 1),
            xycoords="axes fraction",
            xytext=(0, 8),
            textcoords="offset points",
            fontsize=8,
            color="#555555",
        )
        figure.savefig(file, dpi=DPI)
    return True


def _chosen(lines: Sequence[Line]) -> list[Line]:
    """Plain DDP, the fastest other baseline if there is one, and the fastest of the others; empty if one is missing."""
    by_name = {line.variant: line for line in lines}
    baselines = [line for line in lines if line.variant.startswith(("ddp_", "powersgd"))]
    others = [line for line in lines if line not in baselines and line.variant != REFERENCE]
    if REFERENCE not in by_name or not others:
        return []
    fastest = [min(group, key=lambda line: line.time_to_target) for group in (baselines, others) if group]
    return [by_name[REFERENCE], *fastest]


def _draw(axes: Axes, runs: Sequence[Run], length: float, colour: str) -> None:
    seconds, values = on_common_points([run.time for run in runs], [run.value for run in runs])
    axes.plot(seconds / length, values.mean(0), color=colour, lw=2.4)
    if len(runs) > 1:
        axes.fill_between(seconds / length, values.min(0), values.max(0), color=colour, alpha=0.2, lw=0)


def _label(axes: Axes, line: Line, runs: Sequence[Run], length: float, longest: float, colour: str) -> None:
    """The variant's name and its end, above the end of its curve, and beside it where there is room."""
    end = max(float(run.time[-1]) for run in runs)
    beside = end < 0.75 * longest
    axes.annotate(
        f"{line.variant}\n{target_text(line.metric, line.final)} at the end",
        (end / length, sum(float(run.value[-1]) for run in runs) / len(runs)),
        xytext=(5 if beside else 0, 5),
        textcoords="offset points",
        ha="left" if beside else "right",
        va="bottom",
        color=colour,
        fontweight="bold",
        fontsize=8.5,
    )


def _mark(axes: Axes, target: float, times: tuple[float, float], words: str) -> None:
    """An arrow at the target between two times."""
    axes.annotate(
        "", (times[0], target), (times[1], target), arrowprops={"arrowstyle": "<->", "color": "#222222", "lw": 1.2}
    )
    axes.annotate(
        words,
        (sum(times) / 2, target),
        xytext=(0, -4),
        textcoords="offset points",
        ha="center",
        va="top",
        fontsize=10,
        fontweight="bold",
        color="#222222",
    )
