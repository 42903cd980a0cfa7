"""A comparison as one HTML page that needs no other file and no network."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any

import matplotlib
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lightning_gqsgd.errors import counted
from lightning_gqsgd.predict.model import Prediction
from lightning_gqsgd.predict.pictures import draw_steps
from pictures.style import STYLE as PICTURE_STYLE
from pictures.style import colours
from recipes.comparison.embedding import NARROW, on_dark, picture
from recipes.comparison.pairs import pair_table, pairs_of, signed
from recipes.comparison.plots import LABELS, Axis, save_curves, save_step_times
from recipes.comparison.results import (
    BOUND_NOTE,
    REFERENCE,
    Line,
    Run,
    cells,
    compare,
    contenders,
    headings,
    knows_bound,
    seeds_in_words,
    target_text,
)
from recipes.comparison.seeds_and_curves import CURVES_FILE, SEEDS_FILE
from recipes.comparison.slower_links import Elsewhere
from recipes.measuring.amounts import parameters_in_words
from recipes.measuring.metrics import LOSS

#: Names of files and strategies, and command lines, are escaped.
_TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined)

AXES: tuple[Axis, ...] = ("time", "epoch", "mb_sent")
#: Axes of the page's curves of the loss.
LOSS_AXES: tuple[Axis, ...] = ("time", "mb_sent")
#: Sizes of the curves in inches, on wide screens and on narrow ones: text keeps its size on both.
SIZES = ((8.6, 4.3), (4.2, 3.9))
#: Widths of the parts of a step in inches, on wide screens and on narrow ones.
STEP_WIDTHS = (6.0, 4.2)
#: Widths of predicted steps in inches, on wide screens and on narrow ones.
TIMELINE_WIDTHS = (8.6, 4.4)
PREDICTION_NOTE = (
    "Grey: computation. Orange: the codec. Blue: the link. Shades: DDP's buckets in turns. The model of gqsgd advise "
    "runs the reducers on a virtual clock. It knows the network, the rate of the links, the measured computation of "
    "plain DDP's step, and an estimate of a processor's speed in encoding. "
    "It knows nothing of hosts that share processors."
)
#: Background of the page, the same as that of its pictures.
PAPER = "#ffffff"
TABS: dict[Axis, str] = {"time": "against time", "epoch": "against epochs", "mb_sent": "against MB sent"}


@dataclass(frozen=True)
class Section:
    """The part of a comparison that belongs to one link, or the whole comparison if it names no links.

    Attributes:
        title: what was trained on which data.
        folder: where the tables and plots of this section are written.
        variants: the runs of each variant.
        lines: the table.
        target: value of the metric whose time is reported; NaN if there is none.
        elsewhere: predictions for slower links, which stand in the place of the headline: on one machine, the headline
            would say how long codecs take.
        predicted: predictions of the steps that were measured, by variant; empty where there are none.
    """

    title: str
    folder: Path
    variants: dict[str, list[Run]]
    lines: list[Line]
    target: float
    elsewhere: Elsewhere | None = None
    predicted: Mapping[str, Prediction] = field(default_factory=dict)

    @cached_property
    def in_loss(self) -> Section | None:
        """The section with the loss in the place of the metric; None if a run has not logged it in every validation."""
        runs = [run for runs in self.variants.values() for run in runs]
        known = all(run.val_loss.size and np.isfinite(run.val_loss).all() for run in runs)
        if not known or self.lines[0].metric.file == LOSS.file:
            return None
        variants = {variant: [run.in_loss for run in runs] for variant, runs in self.variants.items()}
        return replace(self, variants=variants, lines=compare(variants, math.nan), target=math.nan)


@dataclass(frozen=True)
class Overview:
    """A table that stands above all sections; its first row has the headings."""

    title: str
    rows: Sequence[Sequence[str]]


def write_page(
    sections: Sequence[Section],
    title: str,
    command: str,
    file: Path,
    overviews: Sequence[Overview] = (),
    notes: Sequence[str] = (),
) -> None:
    """Write the page: for every section its headline, curves on three axes, parts of a step, and the table."""
    page = _TEMPLATES.get_template("page.html.j2").render(
        title=title,
        command=command,
        chips=_chips(sections),
        overviews=overviews,
        sections=_views(sections, file.parent),
        prediction_note=PREDICTION_NOTE,
        notes=notes,
        footnote=BOUND_NOTE if any(knows_bound(section.lines) for section in sections) else "",
        paper=PAPER,
        dark_paper=on_dark(PAPER),
        narrow=NARROW,
    )
    file.write_text(page + "\n", encoding="utf-8")


def headlines(
    lines: Sequence[Line], target: float, variants: dict[str, list[Run]] | None = None
) -> list[tuple[str, str]]:
    """Pairs (number, what the number means) that the page says first.

    With ``variants``, the runs of each variant, the difference at the end is among them where both variants were
    trained with two seeds or more, with its standard deviation over these seeds.

    The list is empty if the comparison has no reference, or nothing to compare with the reference. The variant that
    reaches the target first, torch's own variants left out, is compared with the reference and with the best of torch's
    variants. If some variant does not reach the target, durations of steps are compared instead.
    """
    groups = contenders(lines)
    if groups is None:
        return []
    reference, baselines, others = groups
    timed = all(math.isfinite(line.time_to_target) for line in lines)
    seconds = {line.variant: line.time_to_target if timed else line.step_s for line in lines}
    best = min(others, key=lambda line: seconds[line.variant])
    strongest = min((reference, *baselines), key=lambda line: seconds[line.variant])
    metric = best.metric
    goal = f"to {metric.label} {target_text(metric, target)}" if timed else "a step"
    shown = [
        (_faster(seconds[other.variant] / seconds[best.variant], timed), f"{best.variant} than {other.variant}, {goal}")
        for other in dict.fromkeys((reference, strongest))
    ]
    if best.mb_sent:
        shown.append((f"{reference.mb_sent / best.mb_sent:.1f}× less", f"sent by {best.variant} than {REFERENCE}"))
    pairs = [pair for pair in pairs_of(variants or {}) if pair.variant == best.variant]
    # A difference from one seed says nothing: trainings that differ by their seed alone differ as much.
    if pairs and math.isfinite(pairs[0].spread):
        change = f"{signed(metric, best.final - reference.final)} ± {metric.text(pairs[0].spread)}"
        points = " points" if metric.percent else ""
        shown.append((change, f"{metric.label}{points} at the end, {best.variant} against {REFERENCE}"))
    return shown


def _faster(ratio: float, timed: bool) -> str:
    words = ("sooner", "later") if timed else ("shorter", "longer")
    return f"{ratio:.1f}× {words[0]}" if ratio >= 1 else f"{1 / ratio:.1f}× {words[1]}"


def _chips(sections: Sequence[Section]) -> list[str]:
    """What was trained, and on what; where runs differ, all that there is."""
    seeds = [len(runs) for section in sections for runs in section.variants.values()]
    firsts = [next(iter(section.variants.values()))[0].facts for section in sections]
    each = [" / ".join(dict.fromkeys(words)) for words in zip(*map(_facts_in_words, firsts), strict=True)]
    return [*each, seeds_in_words(seeds)]


def _facts_in_words(facts: dict[str, object]) -> list[str]:
    parameters = facts.get("parameters")
    nodes = counted(int(str(facts["nodes"])), "node")
    return [
        f"{facts['model']}" + (f", {parameters_in_words(parameters)}" if isinstance(parameters, int) else ""),
        f"{facts['data']}",
        f"{counted(int(str(facts['processes'])), 'process', 'processes')} on {nodes}",
        f"{facts['device']}",
        counted(int(str(facts["steps"])), "step"),
    ]


def _views(sections: Sequence[Section], folder: Path) -> list[dict[str, Any]]:
    """What the template shows of each section; differences that several sections have in common are shown once.

    Final values are the same on every link, and so are their differences.
    """
    tables = [pair_table(pairs_of(section.variants)) for section in sections]
    return [
        _view(section, [] if table in tables[:number] else table, folder)
        for number, (section, table) in enumerate(zip(sections, tables, strict=True))
    ]


def _view(section: Section, pairs: list[list[str]], folder: Path) -> dict[str, Any]:
    """What the template shows of a section."""
    steps = partial(save_step_times, section.variants, "", predicted=section.predicted)
    words = f"Parts of a step: {_in_words(section, 'step (ms)')}"
    heads, rows = _table(section)
    chosen = colours([line.variant for line in section.lines])
    in_loss = section.in_loss
    place = os.path.relpath(section.folder, folder)
    return {
        "title": section.title,
        "elsewhere": section.elsewhere,
        "tiles": _tiles(section),
        "tabs": [
            *(_tab(section, axis) for axis in AXES),
            *(_tab(in_loss, axis) for axis in LOSS_AXES if in_loss is not None),
        ],
        "files": [os.path.normpath(os.path.join(place, name)) for name in ("table.csv", SEEDS_FILE, CURVES_FILE)],
        "step": picture([partial(steps, width=width) for width in STEP_WIDTHS], words),
        "prediction": _prediction(section.predicted) if section.predicted else "",
        "heads": heads,
        "rows": rows,
        "colours": {variant: {"light": colour, "dark": on_dark(colour)} for variant, colour in chosen.items()},
        "pairs": pairs,
    }


def _tiles(section: Section) -> list[dict[str, Any]]:
    """The headlines: what is gained stands out, and what is lost looks like any other number."""
    return [
        {
            "value": value,
            "meaning": meaning,
            "is_gain": value.endswith(("sooner", "shorter", "less")) and not value.startswith("1.0×"),
        }
        for value, meaning in headlines(section.lines, section.target, variants=section.variants)
    ]


def _in_words(section: Section, heading: str) -> str:
    """A column of the table in words, for those who cannot see a picture."""
    heads = headings(section.lines[0].metric, section.target)
    column = heads.index(heading)
    return ", ".join(f"{line.variant} {cells(line)[column]}" for line in section.lines)


def _prediction(predicted: Mapping[str, Prediction]) -> Markup:
    """What each resource does in a step as it is predicted, in a picture."""
    words = ", ".join(f"{variant} {1e3 * made.step_s:.1f} ms" for variant, made in predicted.items())
    saves = [partial(_save_timeline, predicted, width) for width in TIMELINE_WIDTHS]
    return picture(saves, f"Predicted steps: {words}")


def _save_timeline(predicted: Mapping[str, Prediction], width: float, file: IO[bytes]) -> None:
    with matplotlib.rc_context(PICTURE_STYLE):
        draw_steps(predicted, file, width)


def _tab(section: Section, axis: Axis) -> dict[str, Any]:
    """One of the pictures of the curves, of which radio buttons show one at a time, without a script."""
    target = section.target if axis == "time" else math.nan
    saves = [partial(save_curves, section.variants, axis, "", target=target, size=size) for size in SIZES]
    metric = section.lines[0].metric
    quality = metric.heading
    ends = f"{quality} at the end: {_in_words(section, quality)}"
    words = f"{metric.label} against {LABELS[axis]}; {ends}"
    tab = f"{metric.label} {TABS[axis]}" if metric == LOSS else TABS[axis]
    return {"id": f"{metric.file}-{axis}", "label": tab, "picture": picture(saves, words)}


def _table(section: Section) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the table, without columns that say nothing."""
    heads = headings(section.lines[0].metric, section.target)
    rows = [cells(line) for line in section.lines]
    shown = [column for column in range(len(heads)) if any(row[column] != "–" for row in rows)]
    return [heads[column] for column in shown], [[row[column] for column in shown] for row in rows]
