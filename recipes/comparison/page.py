"""A comparison as one HTML page that needs no other file and no network."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

import matplotlib

from lightning_gqsgd.errors import counted
from lightning_gqsgd.performance.model import Prediction
from lightning_gqsgd.performance.pictures import draw_steps
from pictures.style import STYLE as PICTURE_STYLE
from pictures.style import colours
from recipes.comparison.embedding import on_dark, picture
from recipes.comparison.page_style import STYLE
from recipes.comparison.pairs import pair_table, pairs_of, signed
from recipes.comparison.plots import LABELS, Axis, save_curves, save_step_times
from recipes.comparison.results import BOUND_NOTE, Line, Run, cells, headings, knows_bound, target_text
from recipes.comparison.slower_links import Elsewhere

AXES: tuple[Axis, ...] = ("time", "epoch", "mb_sent")
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


def write_page(sections: Sequence[Section], title: str, command: str, file: Path) -> None:
    """Write the page: for every section its headline, curves on three axes, parts of a step, and the table.

    Args:
        sections: parts of the page, in their order.
        title: heading of the page.
        command: the command line that reproduces the comparison.
        file: path of the page.
    """
    facts = next(iter(sections[0].variants.values()))[0].facts
    body = [
        f"<header><h1>{html.escape(title)}</h1>",
        f"<p class=facts>{_chips(facts, sections)}</p>",
        f"<pre>{html.escape(command)}</pre></header>",
        *(_section(number, section, len(sections) > 1) for number, section in enumerate(sections)),
    ]
    if any(knows_bound(section.lines) for section in sections):
        body.append(f"<footer>{html.escape(BOUND_NOTE)}</footer>")
    file.write_text(
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def headlines(
    lines: Sequence[Line], target: float, reference: str = "ddp", variants: dict[str, list[Run]] | None = None
) -> list[tuple[str, str]]:
    """Pairs (number, what the number means) that the page says first.

    With ``variants``, the runs of each variant, the difference at the end has its standard deviation over seeds that
    both variants were trained with.

    The list is empty if the comparison has no reference, or nothing to compare with the reference. The variant that
    reaches the target first, torch's own variants left out, is compared with the reference and with the best of torch's
    variants. If some variant does not reach the target, durations of steps are compared instead.
    """
    by_name = {line.variant: line for line in lines}
    baselines = [line for line in lines if line.variant.startswith(("ddp", "powersgd"))]
    others = [line for line in lines if line not in baselines]
    if reference not in by_name or not others:
        return []
    timed = all(math.isfinite(line.time_to_target) for line in lines)
    seconds = {line.variant: line.time_to_target if timed else line.step_s for line in lines}
    best = min(others, key=lambda line: seconds[line.variant])
    strongest = min(baselines, key=lambda line: seconds[line.variant])
    metric = best.metric
    goal = f"to {metric.label} {target_text(metric, target)}" if timed else "a step"
    shown = [
        (_faster(seconds[other.variant] / seconds[best.variant], timed), f"{best.variant} than {other.variant}, {goal}")
        for other in dict.fromkeys((by_name[reference], strongest))
    ]
    if best.mb_sent:
        shown.append(
            (f"{by_name[reference].mb_sent / best.mb_sent:.1f}× less", f"sent by {best.variant} than {reference}")
        )
    change = signed(metric, best.final - by_name[reference].final)
    points = " points" if metric.percent else ""
    spread = next(
        (pair.spread for pair in pairs_of(variants or {}, reference) if pair.variant == best.variant), math.nan
    )
    if math.isfinite(spread):
        change += f" ± {metric.text(spread)}"
    shown.append((change, f"{metric.label}{points} at the end, {best.variant} against {reference}"))
    return shown


def _faster(ratio: float, timed: bool) -> str:
    words = ("sooner", "later") if timed else ("shorter", "longer")
    return f"{ratio:.1f}× {words[0]}" if ratio >= 1 else f"{1 / ratio:.1f}× {words[1]}"


def _chips(facts: dict[str, object], sections: Sequence[Section]) -> str:
    seeds = max(len(runs) for section in sections for runs in section.variants.values())
    parameters = facts.get("parameters")
    nodes = counted(int(str(facts["nodes"])), "node")
    chips = [
        f"{facts['model']}" + (f", {parameters / 1e6:.2f} M parameters" if isinstance(parameters, int) else ""),
        f"{facts['data']}",
        f"{counted(int(str(facts['processes'])), 'process', 'processes')} on {nodes}",
        f"{facts['device']}",
        f"{facts['steps']} steps",
        f"{seeds} seeds" if seeds > 1 else "1 seed",
    ]
    return "".join(f"<span>{html.escape(chip)}</span>" for chip in chips)


def _section(number: int, section: Section, titled: bool) -> str:
    tiles = "".join(
        f'<div class="{_tone(value)}"><b>{html.escape(value)}</b>{html.escape(text)}</div>'
        for value, text in headlines(section.lines, section.target, variants=section.variants)
    )
    steps = partial(save_step_times, section.variants, "", predicted=section.predicted)
    bars = picture(
        [partial(steps, width=width) for width in STEP_WIDTHS], f"Parts of a step: {_in_words(section, 'step (ms)')}"
    )
    parts = [
        "<section>",
        f"<h2>{html.escape(section.title)}</h2>" if titled else "",
        _elsewhere(section.elsewhere) if section.elsewhere else f"<div class=tiles>{tiles}</div>" if tiles else "",
        _tabs(number, section),
        f"<h3>Parts of a step</h3><figure class=bars>{bars}</figure>",
        _predictions(section.predicted) if section.predicted else "",
        f"<h3>Table</h3>{_table(section)}",
        _pairs(section) if not number else "",  # final values are the same on every link
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _tone(value: str) -> str:
    """The classes of a tile: what is gained stands out, and what is lost looks like any other number."""
    is_gain = value.endswith(("sooner", "shorter", "less")) and not value.startswith("1.0×")
    return "tile good" if is_gain else "tile"


def _in_words(section: Section, heading: str) -> str:
    """A column of the table in words, for those who cannot see a picture."""
    heads = headings(section.lines[0].metric, section.target)
    column = heads.index(heading)
    return ", ".join(f"{line.variant} {cells(line)[column]}" for line in section.lines)


def _elsewhere(links: Elsewhere) -> str:
    """The predictions for slower links, in words and as a table."""
    heads, *rows = links.rows
    note = f"<p>{html.escape(links.note)}</p>" if links.note else ""
    return f"<p>{html.escape(links.words)}</p>{_plain_table(heads, rows)}{note}"


def _predictions(predicted: Mapping[str, Prediction]) -> str:
    """What each resource does in a step as it is predicted, in a picture and in words."""
    words = ", ".join(f"{variant} {1e3 * made.step_s:.1f} ms" for variant, made in predicted.items())
    saves = [partial(_save_timeline, predicted, width) for width in TIMELINE_WIDTHS]
    return (
        f"<h3>A step as it is predicted</h3><figure class=bars>{picture(saves, f'Predicted steps: {words}')}</figure>"
        f"<p>{html.escape(PREDICTION_NOTE)}</p>"
    )


def _save_timeline(predicted: Mapping[str, Prediction], width: float, file: IO[bytes]) -> None:
    with matplotlib.rc_context(PICTURE_STYLE):
        draw_steps(predicted, file, width)


def _tabs(number: int, section: Section) -> str:
    """The three pictures of the curves, one of them shown at a time; radio buttons switch without a script."""
    buttons, figures = [], []
    for place, axis in enumerate(AXES):
        identity = f"s{number}-{axis}"
        checked = " checked" if not place else ""
        buttons.append(
            f"<input type=radio name=s{number} id={identity}{checked}><label for={identity}>{TABS[axis]}</label>"
        )
        target = section.target if axis == "time" else math.nan
        saves = [partial(save_curves, section.variants, axis, "", target=target, size=size) for size in SIZES]
        quality = headings(section.lines[0].metric, section.target)[1]
        ends = f"{quality} at the end: {_in_words(section, quality)}"
        words = f"{section.lines[0].metric.label} against {LABELS[axis]}; {ends}"
        figures.append(f"<figure>{picture(saves, words)}</figure>")
    return f"<div class=tabs>{''.join(buttons)}{''.join(figures)}</div>"


def _table(section: Section) -> str:
    heads = headings(section.lines[0].metric, section.target)
    rows = [cells(line) for line in section.lines]
    shown = [column for column in range(len(heads)) if any(row[column] != "–" for row in rows)]
    chosen = colours([line.variant for line in section.lines])
    head = "".join(f"<th scope=col>{html.escape(heads[column])}</th>" for column in shown)
    body = ""
    for row in rows:
        dot = f'<i style="--light:{chosen[row[0]]};--dark:{on_dark(chosen[row[0]])}"></i>'
        values = "".join(f"<td>{html.escape(row[column])}</td>" for column in shown[1:])
        body += f"<tr><th scope=row>{dot}{html.escape(row[0])}</th>{values}</tr>"
    return _scrolled(head, body)


def _pairs(section: Section) -> str:
    """What strategies end with, less what ddp ends with from the same seed."""
    heads, *rows = pair_table(pairs_of(section.variants)) or [[]]
    return f"<h3>Seed by seed</h3>{_plain_table(heads, rows)}" if rows else ""


def _plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f"<th scope=col>{html.escape(cell)}</th>" for cell in heads)
    body = "".join(
        f"<tr><th scope=row>{html.escape(first)}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    )
    return _scrolled(titles, body)


def _scrolled(head: str, body: str) -> str:
    """A table that scrolls by itself on a narrow screen, also by keyboard."""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class=wide tabindex=0 role=region aria-label="Table">{table}</div>'
