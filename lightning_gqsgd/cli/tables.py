"""Tables for the terminal: those of all commands, and that of presets."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table

from lightning_gqsgd.cli.facts import COLUMNS, Facts
from lightning_gqsgd.config import GQSGDConfig

#: Characters in a line where the output is no terminal.
PIPED_WIDTH = 200

#: Columns of the table of presets that are left out where the terminal is too narrow, the first one first.
_DISPENSABLE = ("paper", "scale shared by", "bias", "state")


class FittingTable(Table):
    """A table that leaves out columns rather than shorten cells where a line has no room for all, and says which in
    its caption.

    Args:
        title: the title.
        dispensable: headings of the columns that may be left out, the first one first.
        remedy: where all columns are, for the caption.
    """

    def __init__(self, title: str, dispensable: Sequence[str], remedy: str) -> None:
        super().__init__(title=title, title_justify="left", box=box.SIMPLE_HEAD)
        self._dispensable = dispensable
        self._remedy = remedy

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Returns the columns for which a line has room."""
        unlimited = options.update(width=PIPED_WIDTH)
        shown = self._without(())
        for count in range(1, len(self._dispensable) + 1):
            if Measurement.get(console, unlimited, shown).maximum <= options.max_width:
                break
            shown = self._without(self._dispensable[:count])
        yield shown

    def _without(self, left_out: Sequence[str]) -> Table:
        """Returns a table without some columns."""
        shown = Table(title=self.title, title_justify=self.title_justify, box=self.box)
        if left_out:
            named = [str(column.header) for column in self.columns if column.header in left_out]
            shown.caption = f"No room for {', '.join(named)}: {self._remedy}."
            shown.caption_justify = "left"
        columns = [column for column in self.columns if column.header not in left_out]
        for column in columns:
            shown.add_column(column.header, justify=column.justify, no_wrap=True)
        for row, *cells in zip(self.rows, *(column.cells for column in columns), strict=True):
            shown.add_row(*cells, style=row.style)
        return shown


def plain_table(title: str, headings: Sequence[str]) -> Table:
    """Returns an empty table whose first column is text, and whose other columns are numbers. Of these, all but the
    first may be left out, the last one first."""
    made = FittingTable(title, headings[:1:-1], "a wider terminal shows more, and so does a pipe")
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return made


def three_digits(value: float) -> str:
    """Returns a number with three digits, or all digits before the point, and no exponent: ``0.357``, ``12,100``."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table_of_texts(title: str, headings: Sequence[str], whole: Collection[str]) -> Table:
    """Returns an empty table of texts; columns whose headings are in ``whole`` are not folded in narrow terminals."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in headings:
        made.add_column(heading, overflow="fold", no_wrap=heading in whole)
    return made


def grid_of(facts: Mapping[str, str]) -> Table:
    """Returns facts beside their names, without lines between them."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, fact in facts.items():
        grid.add_row(name, fact)
    return grid


def table_of_presets(rows: Sequence[Facts]) -> Table:
    """Returns a table with a row for each preset."""
    made = FittingTable(f"Presets at n = {rows[0].ranks}", _DISPENSABLE, "see --json, or one preset by name")
    for heading in COLUMNS:
        numbers = heading in ("bits", "sent / fp32", "state")
        made.add_column(heading, justify="right" if numbers else "left", no_wrap=True)
    for row in rows:
        made.add_row(*row.row(), style="dim" if row.problem else None)
    return made


def in_full(facts: Facts) -> Table:
    """Returns all facts and fields of a preset. A star marks each field that is not the default."""
    config = facts.config or facts.preset.config
    lines = {
        "preset": facts.name,
        "what": facts.preset.what,
        "paper": facts.preset.paper,
        "optimizer": facts.preset.optimizer,
        "left out": facts.preset.left_out or "nothing",
        "config": config.describe(),
    }
    if facts.problem:
        lines[f"at n = {facts.ranks}"] = f"cannot work: {facts.problem}"
    else:
        memories = ", ".join(f"{kind} {count:.4g}" for kind, count in facts.state.items()) or "nothing"
        scale = "" if facts.omega is None and facts.delta is None else f", scale shared by {facts.sharing}"
        lines |= {
            f"at n = {facts.ranks}": f"{config.reducer}, {facts.wire_bits:.3f} bits per coordinate, "
            f"{facts.sent_ratio:.3f} of the bytes of an fp32 ring all-reduce",
            "remembers": f"{memories} (numbers per coordinate)",
            "bias": facts.bias,
            "error": f"{facts.constant}{scale}" if scale else "no constant: the scale is a whole parameter's",
        }
    lines |= {"warning": " ".join(facts.warnings)} if facts.warnings else {}
    grid = grid_of(lines)
    grid.add_row("", "")
    usual = GQSGDConfig()
    for field, value in config.to_dict().items():
        plain = value if isinstance(value, str) else json.dumps(value)
        changed = getattr(config, field) != getattr(usual, field)
        grid.add_row(field, f"{plain}  *" if changed else plain)
    grid.add_row("", "* not the default")
    return grid


def show(*parts: RenderableType) -> None:
    """Print to the terminal at its width, or else as plain lines."""
    if sys.stdout.isatty():
        Console(highlight=False).print(*parts, sep="\n")
        return
    console = Console(width=PIPED_WIDTH, highlight=False, no_color=True)
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    typer.echo("\n".join(line.rstrip() for line in captured.get().rstrip().splitlines()))
