"""A comparison as one HTML page that needs no other file and no network."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from lightning_gqsgd.errors import counted
from pictures.style import colours
from recipes.comparison.plots import LABELS, Axis, save_curves, save_step_times
from recipes.comparison.results import BOUND_NOTE, Line, Run, cells, headings, knows_bound, target_text
from recipes.comparison.slower_links import Elsewhere

AXES: tuple[Axis, ...] = ("time", "epoch", "mb_sent")
#: Size of the curves in inches; the page is wider than a separate picture.
SIZE = (8.6, 4.3)
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
    """

    title: str
    folder: Path
    variants: dict[str, list[Run]]
    lines: list[Line]
    target: float
    elsewhere: Elsewhere | None = None


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


def headlines(lines: Sequence[Line], target: float, reference: str = "ddp") -> list[tuple[str, str]]:
    """Pairs (number, what the number means) that the page says first.

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
    difference = metric.scaled(best.final - by_name[reference].final)
    signed = f"{'−' if difference < 0 else '+'}{abs(difference):.{metric.digits}f}"
    points = " points" if metric.percent else ""
    shown.append((signed, f"{metric.label}{points} at the end, {best.variant} against {reference}"))
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
        f"<div class=tile><b>{html.escape(value)}</b>{html.escape(text)}</div>"
        for value, text in headlines(section.lines, section.target)
    )
    bars = _picture(partial(save_step_times, section.variants, ""))
    parts = [
        "<section>",
        f"<h2>{html.escape(section.title)}</h2>" if titled else "",
        _elsewhere(section.elsewhere) if section.elsewhere else f"<div class=tiles>{tiles}</div>" if tiles else "",
        _tabs(number, section),
        f"<h3>Parts of a step</h3><figure class=bars>{bars}</figure>",
        f"<h3>Table</h3>{_table(section)}",
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _elsewhere(links: Elsewhere) -> str:
    """The predictions for slower links, in words and as a table."""
    head, *rows = links.rows
    titles = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f"<p>{html.escape(links.words)}</p><div class=wide><table><thead><tr>{titles}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


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
        picture = _picture(partial(save_curves, section.variants, axis, "", target=target, size=SIZE))
        label = f"{section.lines[0].metric.label} against {LABELS[axis]}"
        figures.append(f'<figure aria-label="{html.escape(label)}">{picture}</figure>')
    return f"<div class=tabs>{''.join(buttons)}{''.join(figures)}</div>"


def _picture(save: Callable[[IO[bytes]], None]) -> str:
    """An SVG as an image of its own, so that names and styles of one picture do not reach another."""
    to = io.BytesIO()
    save(to)
    return f'<img alt="" src="data:image/svg+xml;base64,{base64.b64encode(to.getvalue()).decode()}">'


def _table(section: Section) -> str:
    heads = headings(section.lines[0].metric, section.target)
    rows = [cells(line) for line in section.lines]
    shown = [column for column in range(len(heads)) if any(row[column] != "–" for row in rows)]
    chosen = colours([line.variant for line in section.lines])
    head = "".join(f"<th>{html.escape(heads[column])}</th>" for column in shown)
    body = ""
    for row in rows:
        dot = f'<i style="background:{chosen[row[0]]}"></i>'
        values = "".join(f"<td>{dot if column == 0 else ''}{html.escape(row[column])}</td>" for column in shown)
        body += f"<tr>{values}</tr>"
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


STYLE = """
:root{color-scheme:light;--ink:#1c1f24;--soft:#5c6470;--line:#e3e6ea;--accent:#d55e00}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1080px;padding:40px 28px 60px;font:15px/1.5 system-ui,"Segoe UI","DejaVu Sans",sans-serif;
color:var(--ink);background:#fff}
h1{font-size:28px;line-height:1.2;margin:0 0 12px;letter-spacing:-.01em}
h2{font-size:20px;margin:0 0 14px}
h3{font-size:15px;margin:30px 0 8px;color:var(--soft);font-weight:600}
.facts{margin:0 0 10px;display:flex;flex-wrap:wrap;gap:6px}
.facts span{background:#f3f4f6;border-radius:999px;padding:2px 12px;font-size:13px;color:#3a414b}
pre{background:#f7f8f9;border:1px solid var(--line);border-radius:8px;padding:10px 14px;font-size:12.5px;
white-space:pre-wrap;overflow-wrap:anywhere;margin:14px 0 0}
section{border-top:1px solid var(--line);margin-top:32px;padding-top:28px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:12px;margin-bottom:24px}
.tile{border:1px solid var(--line);border-radius:10px;padding:12px 16px;font-size:13.5px;color:var(--soft)}
.tile b{display:block;font-size:24px;line-height:1.25;color:var(--ink);font-variant-numeric:tabular-nums}
.tile:first-child b{color:var(--accent)}
.tabs{display:flex;flex-wrap:wrap}
.tabs input{position:absolute;opacity:0}
.tabs label{padding:5px 14px;border:1px solid var(--line);border-left-width:0;font-size:13.5px;cursor:pointer;
color:var(--soft)}
.tabs label:first-of-type{border-left-width:1px;border-radius:7px 0 0 7px}
.tabs label:last-of-type{border-radius:0 7px 7px 0}
.tabs input:checked+label{background:var(--ink);border-color:var(--ink);color:#fff}
.tabs input:focus-visible+label{outline:2px solid var(--accent);outline-offset:2px}
.tabs figure{display:none;width:100%;order:1}
.tabs input:nth-of-type(1):checked~figure:nth-of-type(1),.tabs input:nth-of-type(2):checked~figure:nth-of-type(2),
.tabs input:nth-of-type(3):checked~figure:nth-of-type(3){display:block}
figure{margin:16px 0 0}
figure img{width:100%;height:auto;display:block}
figure.bars{max-width:820px;margin-top:0}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums;width:100%}
th,td{text-align:right;padding:7px 10px;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:600;white-space:normal;vertical-align:bottom}
th:first-child,td:first-child{text-align:left}
td i{display:inline-block;width:9px;height:9px;border-radius:50%;margin-right:8px}
footer{margin-top:36px;font-size:12.5px;color:var(--soft);max-width:100ch}
"""
