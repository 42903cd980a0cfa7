"""Pictures of runs, about 900 pixels wide."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from recipes.comparison.results import Curve, Run

Axis = Literal["time", "epoch", "mb_sent"]

LABELS: dict[Axis, str] = {"time": "training time (s)", "epoch": "epochs", "mb_sent": "gradients sent per process (MB)"}

#: One colour per strategy in every picture (Okabe and Ito's palette, distinguishable with colour blindness).
COLOURS = {
    "ddp": "#4d4d4d",
    "ddp_bf16": "#56b4e9",
    "ddp_fp16": "#0072b2",
    "powersgd": "#cc79a7",
    "gqsgd": "#d55e00",
    "gqsgd_4bit": "#009e73",
}
OTHERS = ("#e69f00", "#7b3294", "#8c564b", "#1b7837", "#999933", "#882255")

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "figure.facecolor": "white",
}
SIZE = (6.0, 3.8)
DPI = 150


def colours(variants: Sequence[str]) -> dict[str, str]:
    """A colour for each variant: that of its strategy, or the next of the others."""
    others = itertools.cycle(OTHERS)
    return {variant: COLOURS.get(variant) or next(others) for variant in variants}


def save_curves(variants: dict[str, list[Run]], axis: Axis, title: str, file: Path, target: float = math.nan) -> None:
    """Validation accuracy of every variant against ``axis``: the mean over seeds, with the range of the seeds."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        chosen = colours(list(variants))
        for variant, runs in variants.items():
            x, curves = _on_common_grid([getattr(run, axis) for run in runs], [run.accuracy for run in runs])
            if not x.size:
                continue
            few = x.size <= 30 and len(runs) == 1
            axes.plot(x, curves.mean(0), color=chosen[variant], label=variant, lw=1.8, marker="o" if few else "", ms=3)
            if len(runs) > 1:
                axes.fill_between(x, curves.min(0), curves.max(0), color=chosen[variant], alpha=0.18, lw=0)
        _finish_accuracy_axis(axes, [run.accuracy for runs in variants.values() for run in runs])
        if not math.isnan(target):
            axes.axhline(target, color="#aaaaaa", lw=0.9, ls=(0, (4, 3)), zorder=1)
            axes.annotate(
                f"target\n{100 * target:.1f}%",
                (1, target),
                xycoords=("axes fraction", "data"),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                color="#777777",
                fontsize=7.5,
            )
        if axis == "mb_sent":
            _log_megabytes(axes, [run.mb_sent for runs in variants.values() for run in runs])
        else:
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10], integer=axis == "epoch"))
        axes.set_xlabel(LABELS[axis])
        axes.set_ylabel("validation accuracy")
        axes.set_title(title)
        if len(variants) > 1:
            axes.legend(loc="best", title=_seeds(variants), title_fontsize=7.5, alignment="left")
        figure.savefig(file, dpi=DPI)


def save_step_times(variants: dict[str, list[Run]], title: str, file: Path) -> None:
    """Median step of every variant: computation, and the communication that it did not hide."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(SIZE[0], 1.5 + 0.42 * len(variants)), layout="constrained")
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
        _step_legend(figure, bool(np.isfinite(codec).any()))
        axes.set_yticks(places, list(variants), color="#222222")
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlim(0, widest * 1.42)
        axes.set_xlabel("median training step (ms)")
        axes.set_title(title)
        figure.savefig(file, dpi=DPI)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _step_parts(runs: list[Run]) -> tuple[float, float, float]:
    """Milliseconds of a step, of its exposed communication, and of encoding and decoding (NaN if there is none)."""
    step = np.mean([run.facts["step_s"]["median"] for run in runs])
    exposed = np.mean([run.facts["exposed_s"].get("median", 0.0) for run in runs])
    return 1000 * float(step), 1000 * float(exposed), 1000 * float(np.mean([run.codec_s for run in runs]))


def _step_legend(figure: Figure, with_codec: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [
        Patch(facecolor="#888888", label="computation"),
        Patch(facecolor="white", edgecolor="#888888", hatch="//////", label="exposed communication"),
    ]
    if with_codec:
        handles.append(Line2D([], [], color="#222222", lw=2.5, label="encode + decode, in any thread"))
    figure.legend(handles=handles, loc="outside lower left", ncols=3, fontsize=7.5, handlelength=1.6, columnspacing=1.2)


def _on_common_grid(xs: Sequence[Curve], ys: Sequence[Curve]) -> tuple[Curve, Curve]:
    """Curves (seed, point) on the points of the first seed that all seeds cover, by linear interpolation."""
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if x.size]
    if not pairs:
        return np.empty(0), np.empty((0, 0))
    xs, ys = zip(*pairs, strict=True)
    if len(xs) == 1:
        return xs[0], np.stack(ys)
    start, end = max(x[0] for x in xs), min(x[-1] for x in xs)
    grid = np.linspace(start, end, max(2, *(x.size for x in xs))) if end > start else np.array([start])
    return grid, np.stack([np.interp(grid, x, y) for x, y in zip(xs, ys, strict=True)])


def _finish_accuracy_axis(axes: Axes, curves: Sequence[Curve]) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    values = np.concatenate([curve for curve in curves if curve.size] or [np.array([0.0, 1.0])])
    top = float(values.max())
    axes.set_ylim(max(0.0, float(values.min()) - 0.03), min(1.0, top) + 0.03 * max(0.2, top))


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
    most = max(len(runs) for runs in variants.values())
    return f"mean and range of {most} seeds" if most > 1 else None
