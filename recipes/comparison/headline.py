"""One picture for those who read nothing else: how much sooner a target is reached."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import IO, Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pictures.style import STYLE, colours
from recipes.comparison.embedding import dark, svg
from recipes.comparison.plots import on_common_points, save
from recipes.comparison.results import Line, Run, contenders, seeds_in_words, target_text

#: The least factor that is worth a picture.
WORTH = 1.05
#: Units of time, in seconds, with the longest time that is shown in each.
UNITS = (("s", 1.0, 300.0), ("min", 60.0, 3 * 3600.0), ("h", 3600.0, math.inf))


@dataclass(frozen=True)
class Layout:
    """How the picture is laid out for a screen.

    Attributes:
        size: in inches.
        title: size of the title in points, and characters in a line of it.
        words: characters in a line of the words below the title.
        ticks: most marks on the axis of time.
        beside: whether names stand at their curves; on a narrow screen there is room only below.
    """

    size: tuple[float, float]
    title: tuple[float, int]
    words: int
    ticks: int
    beside: bool


WIDE = Layout((7.6, 4.3), (12, 72), 105, 8, beside=True)
#: Text of 8 points is more than 9 CSS pixels high on a screen of 390 with margins of 24 on each side.
NARROW = Layout((4.0, 4.2), (10, 34), 50, 5, beside=False)


@dataclass(frozen=True)
class Headline:
    """What the picture says.

    Attributes:
        lines: plain DDP's line of the table, perhaps that of torch's best other variant, and that of the best of all
            others.
        runs: the runs of each of these variants.
        target: value of the metric whose time is compared.
        words: what was trained, and where.
    """

    lines: Sequence[Line]
    runs: Mapping[str, Sequence[Run]]
    target: float
    words: str

    @property
    def gain(self) -> float:
        """How many times sooner the target is reached than under plain DDP."""
        return self.lines[0].time_to_target / self.lines[-1].time_to_target

    @property
    def title(self) -> str:
        """The gain in words."""
        plain, best = self.lines[0], self.lines[-1]
        value, label = target_text(best.metric, self.target), best.metric.label
        goal = f"{value} {label}" if best.metric.percent else f"{label} {value}"
        return f"{best.variant} reaches {goal} {self.gain:.1f} times sooner than {plain.variant}"

    @property
    def notes(self) -> str:
        """The gain over the variant in the middle, what was trained, and how many seeds each curve has."""
        best = self.lines[-1].time_to_target
        middle = [f"{line.time_to_target / best:.1f} times sooner than {line.variant}" for line in self.lines[1:-1]]
        return "; ".join([*middle, self.words, self._seeds])

    @property
    def _seeds(self) -> str:
        counts = {line.variant: line.seeds for line in self.lines}
        if len({*counts.values()}) == 1:
            mean = "mean and range of " if self.lines[0].seeds > 1 else ""
            return mean + seeds_in_words(counts.values())
        return "mean and range of seeds: " + ", ".join(f"{name} {count}" for name, count in counts.items())


def save_headline(
    variants: Mapping[str, Sequence[Run]], lines: Sequence[Line], target: float, words: str, file: Path
) -> list[Path]:
    """Draw the curves of plain DDP, of the best other variant of torch's, and of the best of all others.

    Args:
        variants: the runs of each variant.
        lines: the table.
        target: value of the metric whose time is compared.
        words: what was trained, and where.
        file: the picture for wide, light screens; the names of the others are those of `variants_of`.

    Returns:
        The files; none if plain DDP is missing, a curve misses the target, or nothing is gained. Files of an earlier
        comparison are removed then.
    """
    for earlier in (file, *variants_of(file)):
        earlier.unlink(missing_ok=True)
    chosen = _chosen(lines)
    if not chosen or not all(math.isfinite(line.time_to_target) for line in chosen):
        return []
    headline = Headline(chosen, variants, target, words)
    if headline.gain < WORTH:
        return []
    _save(headline, WIDE, file)
    wide_dark, narrow, narrow_dark = variants_of(file)
    wide_dark.write_text(dark(svg(partial(_save, headline, WIDE))), encoding="utf-8")
    text = svg(partial(_save, headline, NARROW))
    narrow.write_text(text, encoding="utf-8")
    narrow_dark.write_text(dark(text), encoding="utf-8")
    return [file, wide_dark, narrow, narrow_dark]


def variants_of(file: Path) -> tuple[Path, ...]:
    """The same picture for dark screens, for narrow ones, and for screens that are both; SVG, which stays sharp."""
    return tuple(file.with_name(f"{file.stem}_{screen}.svg") for screen in ("dark", "narrow", "narrow_dark"))


def _save(headline: Headline, layout: Layout, file: Path | IO[bytes]) -> None:
    """Draw the picture for one kind of screen; an open file gets an SVG."""
    longest = max(float(run.time[-1]) for line in headline.lines for run in headline.runs[line.variant])
    unit, length, _ = next(unit for unit in UNITS if longest <= unit[2])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=layout.size, layout="constrained")
        axes = figure.subplots()
        shades = colours([line.variant for line in headline.lines])
        for line in headline.lines:
            _draw(axes, line, headline.runs[line.variant], length, shades[line.variant])
        _finish_axes(axes, headline, layout, 1.02 * longest / length)
        if layout.beside:
            _label_all(axes, headline, length, longest, shades)
        else:
            figure.legend(loc="outside lower left", labelcolor="linecolor", prop={"size": 8.5, "weight": "bold"})
        times = headline.lines[-1].time_to_target / length, headline.lines[0].time_to_target / length
        _mark(axes, headline.target, times, f"{headline.gain:.1f}× sooner")
        axes.set_xlabel(f"training time ({unit})")
        _head(axes, headline, layout)
        save(figure, file)


def _finish_axes(axes: Axes, headline: Headline, layout: Layout, end: float) -> None:
    metric = headline.lines[0].metric
    axes.set_xlim(0, end)
    if layout.beside:
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, top + 0.12 * (top - bottom))  # room for the names of the curves
    if metric.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        bottom, top = axes.get_ylim()
        axes.set_yticks([tick for tick in axes.get_yticks() if bottom <= tick <= min(1.0, top)])
    axes.xaxis.set_major_locator(MaxNLocator(layout.ticks, steps=[1, 2, 5, 10]))
    axes.set_ylabel(f"validation {metric.label}")


def _head(axes: Axes, headline: Headline, layout: Layout) -> None:
    """The title, and between it and the curves the notes."""
    size, length = layout.title
    notes = fill(headline.notes, layout.words)
    lines = 1 + notes.count("\n")
    axes.set_title(fill(headline.title, length), pad=14 + 10 * lines, fontsize=size)
    axes.annotate(
        notes,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 8),
        textcoords="offset points",
        fontsize=8,
        color="#555555",
    )


def _chosen(lines: Sequence[Line]) -> list[Line]:
    """Plain DDP, the fastest other baseline if there is one, and the fastest of the others; empty if one is missing."""
    groups = contenders(lines)
    if groups is None:
        return []
    reference, *rest = groups
    return [reference, *(min(group, key=lambda line: line.time_to_target) for group in rest if group)]


def _draw(axes: Axes, line: Line, runs: Sequence[Run], length: float, colour: str) -> None:
    seconds, values = on_common_points([run.time for run in runs], [run.value for run in runs])
    name = f"{line.variant}: {target_text(line.metric, line.final)} at the end"
    axes.plot(seconds / length, values.mean(0), color=colour, lw=2.4, label=name)
    if len(runs) > 1:
        axes.fill_between(seconds / length, values.min(0), values.max(0), color=colour, alpha=0.2, lw=0)


def _label_all(axes: Axes, headline: Headline, length: float, longest: float, shades: Mapping[str, str]) -> None:
    """Each variant's name and end, above the end of its curve, or below it where another name is."""
    ends = {}
    for line in headline.lines:
        runs = headline.runs[line.variant]
        value = sum(float(run.value[-1]) for run in runs) / len(runs)
        ends[line.variant] = (max(float(run.time[-1]) for run in runs), value)
    bottom, top = axes.get_ylim()
    placed: list[tuple[float, float]] = []
    for line in sorted(headline.lines, key=lambda line: ends[line.variant][1], reverse=True):
        end, value = ends[line.variant]
        others = sum(
            abs(time - end) < 0.35 * longest and value > other - 0.12 * (top - bottom) for time, other in placed
        )
        _label(axes, line, (end / length, value), end < 0.75 * longest, others, shades[line.variant])
        placed.append((end, value))


def _label(axes: Axes, line: Line, end: tuple[float, float], beside: bool, others: int, colour: str) -> None:
    """A variant's name and end.

    Args:
        axes: where to draw.
        line: the variant.
        end: end of its curve.
        beside: whether there is room on the right of it.
        others: number of names that are there already.
        colour: of the curve.
    """
    # A name has two lines of text. The first one is above its curve, the second one below, the third one below that.
    axes.annotate(
        f"{line.variant}\n{target_text(line.metric, line.final)} at the end",
        end,
        xytext=(5 if beside else 0, 5 if not others else 18 - 26 * others),
        textcoords="offset points",
        ha="left" if beside else "right",
        va="top" if others else "bottom",
        color=colour,
        fontweight="bold",
        fontsize=8.5,
        path_effects=_halo(),
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
        path_effects=_halo(),
    )


def _halo() -> list[Any]:
    """A white rim, with which words can be read on top of a curve."""
    return [withStroke(linewidth=2.5, foreground="#ffffff")]
