"""Pictures of runs: 900 pixels wide, or 1350 with many variants."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from types import MappingProxyType
from typing import IO, Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator, PercentFormatter

from lightning_gqsgd.predict.model import Prediction
from lightning_gqsgd.presets import PRESETS
from lightning_gqsgd.research.theory import bits_at
from pictures.labels import label_points
from pictures.style import DPI, STYLE, colours
from recipes.comparison.results import Curve, Line, Run, seeds_in_words, target_text
from recipes.measuring.metrics import Metric

Axis = Literal["time", "epoch", "mb_sent"]

LABELS: dict[Axis, str] = {"time": "training time (s)", "epoch": "epochs", "mb_sent": "gradients sent per process (MB)"}

#: With more variants than this, curves would hide each other, and each variant gets a panel of its own.
MANY = 8
PANELS_PER_ROW = 5
#: Marks of up to `MANY` variants, so that curves differ by more than their colour; a curve has about so many of them.
MARKERS, MARKS = ("o", "s", "^", "D", "v", "P", "X", "*"), 9

#: Fewest points of a picture of the family.
LEAST_FAMILY = 3

SIZE = (6.0, 3.8)

#: How the end of a predicted step is marked.
PREDICTED: dict[str, Any] = {
    "marker": "D",
    "ls": "",
    "mfc": "white",
    "mec": "#222222",
    "mew": 1.2,
    "ms": 6,
    "zorder": 4,
}

#: Number of characters that fit into a line of a title: over curves, over the family, and over step times.
CURVES_TITLE, FAMILY_TITLE, STEPS_TITLE = 66, 100, 54


def save_curves(
    variants: dict[str, list[Run]],
    axis: Axis,
    title: str,
    file: Path | IO[bytes],
    target: float = math.nan,
    size: tuple[float, float] = SIZE,
) -> None:
    """Draw the metric of every variant's validations against an axis: the mean over seeds, and the range of the seeds.

    Up to `MANY` variants share one picture. More variants get a panel each, with all other variants in grey behind.

    Args:
        variants: the runs of each variant.
        axis: key of `LABELS`.
        title: heading of the picture.
        file: a path, or an open file, which gets an SVG.
        target: value of the metric that is marked; NaN: none.
        size: size of the shared picture in inches.
    """
    with matplotlib.rc_context(STYLE):
        if len(variants) <= MANY:
            figure = _draw_together(variants, axis, title, target, size)
        else:
            figure = _draw_panels(variants, axis, title, target)
        save(figure, file)


def _draw_together(
    variants: dict[str, list[Run]], axis: Axis, title: str, target: float, size: tuple[float, float]
) -> Figure:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    chosen, metric = colours(list(variants)), _metric(variants)
    for (variant, runs), marker in zip(variants.items(), MARKERS, strict=False):
        _draw_curve(axes, runs, axis, chosen[variant], variant, marker)
    _finish_metric_axis(axes, metric, [run.value for runs in variants.values() for run in runs])
    if not math.isnan(target):
        axes.axhline(target, color="#aaaaaa", lw=0.9, ls=(0, (4, 3)), zorder=1)
        axes.annotate(
            f"target\n{target_text(metric, target)}",
            (1, target),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color="#777777",
            fontsize=7.5,
        )
    _finish_progress_axis(axes, variants, axis, ticks=7)
    axes.set_xlabel(LABELS[axis])
    axes.set_ylabel(f"validation {metric.label}")
    axes.set_title(fill(title, CURVES_TITLE))
    if len(variants) > 1:
        axes.legend(loc="best", title=_seeds(variants), title_fontsize=7.5, alignment="left")
    return figure


def _draw_panels(variants: dict[str, list[Run]], axis: Axis, title: str, target: float) -> Figure:
    rows = -(-len(variants) // PANELS_PER_ROW)
    figure = Figure(figsize=(1.5 * SIZE[0], 0.9 + 1.35 * rows), layout="constrained")
    grid = figure.subplots(rows, PANELS_PER_ROW, sharex=True, sharey=True, squeeze=False)
    chosen, metric = colours(list(variants)), _metric(variants)
    means = [
        on_common_points([getattr(run, axis) for run in runs], [run.value for run in runs])
        for runs in variants.values()
    ]
    for axes, (variant, runs) in zip(grid.flat, variants.items(), strict=False):
        for x, curves in means:
            if x.size:
                axes.plot(x, curves.mean(0), color="#d9d9d9", lw=0.6, zorder=1)
        _draw_curve(axes, runs, axis, chosen[variant], variant)
        if not math.isnan(target):
            axes.axhline(target, color="#999999", lw=0.7, ls=(0, (4, 3)), zorder=1)
        final = np.mean([run.final for run in runs])
        axes.set_title(variant, color=chosen[variant], fontsize=8, fontweight="normal", pad=3)
        axes.annotate(
            "" if math.isnan(final) else target_text(metric, float(final)),
            (0.97, 0.06),
            xycoords="axes fraction",
            ha="right",
            color=chosen[variant],
            fontsize=8,
        )
        axes.tick_params(labelsize=7.5, length=2)
    for place in range(len(variants), grid.size):
        grid.flat[place].set_visible(False)
        grid.flat[place - PANELS_PER_ROW].tick_params(labelbottom=True)
    first = grid[0, 0]
    _spread_metric_axis(first, metric, [run.value for runs in variants.values() for run in runs])
    _finish_progress_axis(first, variants, axis, ticks=4)
    figure.supxlabel(LABELS[axis], fontsize=9, color="#333333")
    notes = [] if math.isnan(target) else [f"dashed: target, {target_text(metric, target)}"]
    notes += [note] if (note := _seeds(variants)) else []
    figure.supylabel(f"validation {metric.label}", fontsize=9, color="#333333")
    figure.suptitle("  |  ".join([title, f"in numbers: final {metric.label}", *notes]), x=0.01, ha="left", fontsize=9)
    return figure


def _draw_curve(
    axes: Axes, runs: Sequence[Run], axis: Axis, colour: str, label: str, marker: str | None = None
) -> None:
    """Draw one variant; without a marker, points are marked where there are few."""
    x, curves = on_common_points([getattr(run, axis) for run in runs], [run.value for run in runs])
    if not x.size:
        return
    few = x.size <= 30 and len(runs) == 1
    marked: dict[str, Any] = {"marker": "o" if few else "", "ms": 3}
    if marker is not None:
        every, place = max(1, round(x.size / MARKS)), MARKERS.index(marker)
        # Marks of different curves stand at different places.
        marked = {"marker": marker, "ms": 4.5, "markevery": (place % every, every)}
    axes.plot(x, curves.mean(0), color=colour, label=label, lw=1.8, **marked)
    if len(runs) > 1 and x.size > 1:
        axes.fill_between(x, curves.min(0), curves.max(0), color=colour, alpha=0.18, lw=0)
    elif len(runs) > 1:
        axes.vlines(x, curves.min(0), curves.max(0), color=colour, alpha=0.5, lw=1.8)  # an area needs two points


def save_family(lines: Sequence[Line], title: str, file: Path) -> bool:
    """Draw the error against message bits of every variant that has both, and the bound.

    Returns:
        False if there are too few variants, in which case no file is written.
    """
    sampled = [line for line in lines if not math.isnan(line.bits_above_bound)]
    if len(sampled) < LEAST_FAMILY:
        return False
    chosen = colours([line.variant for line in lines])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.5 * SIZE[0], 1.5 * SIZE[1]), layout="constrained")
        axes = figure.subplots()
        _draw_bound(axes, sampled)
        for line in sampled:
            colour, round_ = chosen[line.variant], not _has_memory(line.variant)
            x, y = line.message_bits, line.rel_l2
            axes.plot([bits_at(y), x], [y, y], color=colour, lw=1.0, alpha=0.35, zorder=2, solid_capstyle="butt")
            axes.plot(x, y, "o" if round_ else "D", color=colour, ms=7 if round_ else 6, mec="white", mew=0.9, zorder=4)
        axes.set_xlabel(
            "message bits per coordinate (one rank's gradient, scales and uncompressed parameters included)"
        )
        axes.set_ylabel("relative L2 error of the gradients' mean, r")
        axes.set_title(fill(title, FAMILY_TITLE))
        axes.grid(visible=False, axis="x")
        names = [line.variant for line in sampled]
        points = [(line.message_bits, line.rel_l2) for line in sampled]
        legend = _family_legend(axes, sampled)
        label_points(figure, axes, points, names, [chosen[name] for name in names], taken=[legend])
        figure.savefig(file, dpi=DPI)
    return True


def _draw_bound(axes: Axes, sampled: Sequence[Line]) -> None:
    """Set the limits, and draw the line r = 2^-b with the area below the line shaded."""
    most = 1.14 * max(line.message_bits for line in sampled)
    low = min(line.rel_l2 for line in sampled) / 2
    high = max(2.0, 1.7 * max(line.rel_l2 for line in sampled))
    axes.set_yscale("log")
    axes.set_xlim(0, most)
    axes.set_ylim(low, high)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    decades = math.log10(high / low)
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if decades < 3.5 else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    bits = np.array([0.0, most])
    axes.fill_between(bits, low, 2.0**-bits, color="#f1f1f4", lw=0, zorder=0)
    axes.plot(bits, 2.0**-bits, color="#555555", lw=1.3, zorder=1)


def _family_legend(axes: Axes, sampled: Sequence[Line]) -> Legend:
    grey: dict[str, Any] = {"color": "#777777", "ls": "", "mec": "white"}
    handles: list[Patch | Line2D] = [
        Line2D([], [], color="#555555", lw=1.3, label="bound r = 2$^{-b}$ for independent normal gradients"),
        Line2D([], [], color="#777777", lw=1.0, alpha=0.5, label="bits above the bound"),
        Line2D([], [], marker="o", ms=7, label="every gradient by itself", **grey),
    ]
    if any(_has_memory(line.variant) for line in sampled):
        handles.append(Line2D([], [], marker="D", ms=6, label="with a memory of earlier steps", **grey))
    return axes.legend(handles=handles, loc="upper right", fontsize=8)


def _has_memory(variant: str) -> bool:
    """Whether the variant's preset has a memory."""
    preset = PRESETS.get(variant.split()[0])
    return preset is not None and preset.config.remembers


def save_step_times(
    variants: dict[str, list[Run]],
    title: str,
    file: Path | IO[bytes],
    width: float = SIZE[0],
    predicted: Mapping[str, Prediction] = MappingProxyType({}),
) -> None:
    """Draw the median step of every variant: the communication that backward did not hide, and the rest.

    The rest is computation, and all that runs beside it.

    Args:
        variants: the runs of each variant.
        title: heading of the picture.
        file: a path, or an open file, which gets an SVG.
        width: of the picture, in inches.
        predicted: predictions of variants, whose steps are marked.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, 1.5 + 0.42 * len(variants)), layout="constrained")
        axes = figure.subplots()
        chosen = colours(list(variants))
        places = np.arange(len(variants))
        step, exposed, codec = (np.array(column) for column in zip(*map(_step_parts, variants.values()), strict=True))
        faces = [chosen[variant] for variant in variants]
        axes.barh(places, step - exposed, color=faces, height=0.6)
        axes.barh(
            places, exposed, left=step - exposed, height=0.6, color="white", edgecolor=faces, hatch="//////", lw=1.0
        )
        widest = float(step.max())
        for place, total, waiting in zip(places, step, exposed, strict=True):
            text = f"{_three_digits(total)} ms"
            if waiting >= 0.005 * total:
                text += f"  ({_three_digits(waiting)} exposed)"
            axes.annotate(text, (total, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
        for place, seconds in zip(places, codec, strict=True):
            if not math.isnan(seconds):
                axes.plot([0, seconds], [place + 0.38] * 2, color="#222222", lw=2.5, solid_capstyle="butt")
        marks = {place: 1e3 * predicted[name].step_s for place, name in enumerate(variants) if name in predicted}
        axes.plot(list(marks.values()), [place - 0.36 for place in marks], **PREDICTED)  # above the words
        widest = max(widest, *marks.values(), 0.0)
        _step_legend(figure, bool(np.isfinite(codec).any()), bool(marks), columns=2 if width >= SIZE[0] else 1)
        axes.set_yticks(places, list(variants), color="#222222")
        axes.set_ylim(len(variants) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlim(0, widest * 1.42)
        axes.set_xlabel("median training step (ms)")
        axes.set_title(fill(title, STEPS_TITLE))
        save(figure, file)


def save(figure: Figure, file: Path | IO[bytes]) -> None:
    """Write a figure to a path, or as SVG to an open file."""
    # The SVG has no date and fixed names, so that the same runs make the same page.
    if isinstance(file, Path):
        figure.savefig(file, dpi=DPI)
    else:
        figure.savefig(file, format="svg", metadata={"Date": None})


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def _step_parts(runs: list[Run]) -> tuple[float, float, float]:
    """Milliseconds of a step, of its exposed communication, and of encoding and decoding (NaN if there is none)."""
    step = np.mean([run.facts["step_s"]["median"] for run in runs])
    exposed = np.mean([run.facts["exposed_s"].get("median", 0.0) for run in runs])
    return 1000 * float(step), 1000 * float(exposed), 1000 * float(np.mean([run.codec_s for run in runs]))


def _step_legend(figure: Figure, with_codec: bool, with_predictions: bool, columns: int) -> None:
    handles: list[Patch | Line2D] = [
        Patch(facecolor="#888888", label="step without exposed communication"),
        Patch(facecolor="white", edgecolor="#888888", hatch="//////", label="exposed communication"),
    ]
    if with_codec:
        handles.append(Line2D([], [], color="#222222", lw=2.5, label="encode + decode, in any thread"))
    if with_predictions:
        handles.append(Line2D([], [], label="predicted step", **PREDICTED))
    figure.legend(
        handles=handles, loc="outside lower left", ncols=columns, fontsize=7.5, handlelength=1.6, columnspacing=1.2
    )


def on_common_points(xs: Sequence[Curve], ys: Sequence[Curve]) -> tuple[Curve, Curve]:
    """Points (point,), and curves (seed, point) by linear interpolation.

    The points are those of the first seed that lie in the range of all seeds.
    """
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if x.size]
    if not pairs:
        return np.empty(0), np.empty((0, 0))
    xs, ys = zip(*pairs, strict=True)
    if len(xs) == 1:
        return xs[0], np.stack(ys)
    start, end = max(x[0] for x in xs), min(x[-1] for x in xs)
    grid = np.linspace(start, end, max(2, *(x.size for x in xs))) if end > start else np.array([start])
    return grid, np.stack([np.interp(grid, x, y) for x, y in zip(xs, ys, strict=True)])


def _metric(variants: dict[str, list[Run]]) -> Metric:
    return next(iter(variants.values()))[0].metric


def _finish_metric_axis(axes: Axes, metric: Metric, curves: Sequence[Curve]) -> None:
    values = np.concatenate([curve for curve in curves if curve.size] or [np.array([0.0, 1.0])])
    low, high = float(values.min()), float(values.max())
    if not metric.higher_is_better and low > 0:
        _logarithmic(axes, low, high)
        return
    if metric.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None, symbol=" %"))
    if metric.is_bounded:
        axes.set_ylim(max(0.0, low - 0.03), min(1.0, high) + 0.03 * max(0.2, high))


def _logarithmic(axes: Axes, low: float, high: float) -> None:
    """Set a logarithmic scale with plain numbers, which begins and ends just outside the values."""
    axes.set_yscale("log")
    axes.set_ylim(low / 1.06, high * 1.06)
    # A range of less than a decade holds too few round powers: ticks are at equal steps there.
    narrow = high < 5 * low
    axes.yaxis.set_major_locator(MaxNLocator(8) if narrow else LogLocator(10, subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _spread_metric_axis(axes: Axes, metric: Metric, curves: Sequence[Curve]) -> None:
    """Give accuracies a logarithmic scale of the error, which shows the difference between 98 and 99 %."""
    if not metric.percent:
        _finish_metric_axis(axes, metric, curves)
        return
    most = 1.005  # an error of 0 % has no place on the scale, which ends just above 100 %
    axes.set_yscale(
        "function", functions=(lambda y: -np.log10(np.maximum(most - y, 1e-9)), lambda y: most - 10.0 ** -np.asarray(y))
    )
    values = np.concatenate([curve for curve in curves if curve.size] or [np.array([0.0, 1.0])])
    axes.set_yticks([0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0])
    axes.set_ylim(max(0.0, float(values.min()) - 0.03), min(1.0, float(values.max()) + 0.002))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))


def _finish_progress_axis(axes: Axes, variants: dict[str, list[Run]], axis: Axis, ticks: int) -> None:
    if axis == "mb_sent":
        _log_megabytes(axes, [run.mb_sent for runs in variants.values() for run in runs])
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 5, 10], integer=axis == "epoch"))


def _log_megabytes(axes: Axes, curves: Sequence[Curve]) -> None:
    values = np.concatenate([curve for curve in curves if curve.size] or [np.array([1.0])])
    if values.max() <= 0:
        return  # a single process sends nothing
    axes.set_xscale("log")
    decades = np.log10(values.max() / values[values > 0].min())
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _seeds(variants: dict[str, list[Run]]) -> str | None:
    counts = [len(runs) for runs in variants.values()]
    return f"mean and range of {seeds_in_words(counts)}" if max(counts) > 1 else None
