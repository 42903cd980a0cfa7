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

from lightning_gqsgd.cli.facts import HEADINGS, Facts
from lightning_gqsgd.config import GQSGDConfig

#: Characters in a line where the output is no terminal.
PIPED_WIDTH = 200

#: Columns that are left out where the terminal is too narrow, the first one first.
_DISPENSABLE = ("paper", "scale shared by", "bias", "state")


class TableOfNumbers(Table):
    """A table that never shortens a number. If a line has no room for all columns, the last ones are left out, and the
    caption says which."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Returns the columns for which a line has room, and at least two."""
        unlimited = options.update(width=PIPED_WIDTH)
        count = len(self.columns)
        shown = self._first(count)
        while count > 2 and Measurement.get(console, unlimited, shown).maximum > options.max_width:
            count -= 1
            shown = self._first(count)
        yield shown

    def _first(self, count: int) -> Table:
        """Returns a table with the first ``count`` columns."""
        shown = Table(title=self.title, title_justify=self.title_justify, box=self.box)
        left_out = [str(column.header) for column in self.columns[count:]]
        if left_out:
            shown.caption = f"No room for {', '.join(left_out)}: a wider terminal shows more, and so does a pipe."
            shown.caption_justify = "left"
        for column in self.columns[:count]:
            shown.add_column(column.header, justify=column.justify, no_wrap=True)
        for cells in zip(*(column.cells for column in self.columns[:count]), strict=True):
            shown.add_row(*cells)
        return shown


def plain_table(title: str, headings: Sequence[str]) -> Table:
    """Returns an empty table whose first column is text, and whose other columns are numbers."""
    made = TableOfNumbers(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return made


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


def fitting_table(rows: Sequence[Facts]) -> Table:
    """Returns a table with a row for each preset, and as many columns as fit the terminal."""
    table = _table(rows, ())
    if not sys.stdout.isatty():
        return table
    console = Console()
    unlimited = console.options.update(width=PIPED_WIDTH)
    for count in range(1, len(_DISPENSABLE) + 1):
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            break
        table = _table(rows, _DISPENSABLE[:count])
    return table


def _table(rows: Sequence[Facts], left_out: tuple[str, ...]) -> Table:
    table = Table(title=f"Presets at n = {rows[0].ranks}", title_justify="left", box=box.SIMPLE_HEAD)
    if left_out:
        table.caption = f"No room for {', '.join(left_out)}: see --json, or one preset by name."
        table.caption_justify = "left"
    kept = [column for column, heading in enumerate(HEADINGS) if heading not in left_out]
    for column in kept:
        heading = HEADINGS[column]
        numbers = heading in ("bits", "sent / fp32", "state")
        table.add_column(heading, justify="right" if numbers else "left", no_wrap=True)
    for row in rows:
        cells = row.row()
        table.add_row(*(cells[column] for column in kept), style="dim" if row.problem else None)
    return table


def in_full(facts: Facts) -> Table:
    """Returns all facts and fields of a preset. A star marks each field that is not the default."""
    config = facts.config or facts.preset.config
    lines = {
        "preset": facts.name,
        "what": facts.preset.what,
        "paper": facts.preset.paper,
        "optimizer": facts.preset.optimizer,
        "left out": facts.preset.left_out or "nothing",
    }
    lines |= {"config": config.describe()}
    if facts.problem:
        lines[f"at n = {facts.ranks}"] = f"cannot work: {facts.problem}"
    else:
        memories = ", ".join(f"{kind} {count:.4g}" for kind, count in facts.state.items()) or "nothing"
        scale = "" if facts.omega is None and facts.delta is None else f", scale shared by {facts.sharing}"
        lines |= {
            f"at n = {facts.ranks}": f"{config.reducer}, {facts.wire_bits:.3f} bits per coordinate, "
            f"{facts.sent_ratio:.3f} of the bytes of an fp32 ring allreduce",
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
