"""Tables of presets for the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

from lightning_gqsgd.cli.facts import HEADINGS, Facts
from lightning_gqsgd.config import GQSGDConfig

#: Columns when nobody's terminal sets a limit.
PIPED_WIDTH = 200

#: What a narrow terminal goes without, in this order.
_DISPENSABLE = ("paper", "scale shared by", "bias", "state")


def fitting_table(found: Sequence[Facts]) -> Table:
    """A row for each preset, with as many columns as the terminal is wide enough for."""
    table = _table(found, ())
    if not sys.stdout.isatty():
        return table
    console = Console()
    unlimited = console.options.update(width=PIPED_WIDTH)
    for count in range(1, len(_DISPENSABLE) + 1):
        if Measurement.get(console, unlimited, table).maximum <= console.width:
            break
        table = _table(found, _DISPENSABLE[:count])
    return table


def _table(found: Sequence[Facts], left_out: tuple[str, ...]) -> Table:
    table = Table(title=f"Presets at n = {found[0].ranks}", title_justify="left", box=box.SIMPLE_HEAD)
    if left_out:
        table.caption = f"No room for {', '.join(left_out)}: see --json, or one preset by name."
        table.caption_justify = "left"
    kept = [column for column, heading in enumerate(HEADINGS) if heading not in left_out]
    for column in kept:
        heading = HEADINGS[column]
        numbers = heading in ("bits", "sent / fp32", "state")
        table.add_column(heading, justify="right" if numbers else "left", no_wrap=True)
    for one in found:
        cells = one.row()
        table.add_row(*(cells[column] for column in kept), style="dim" if one.problem else None)
    return table


def in_full(one: Facts) -> Table:
    """One preset: all facts and fields, those marked that are not the default."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    config = one.config or one.preset.config
    lines = {"preset": one.name, "what": one.preset.what, "paper": one.preset.paper, "optimizer": one.preset.optimizer}
    lines |= {"config": config.describe()}
    if one.problem:
        lines[f"at n = {one.ranks}"] = f"cannot work: {one.problem}"
    else:
        memories = ", ".join(f"{kind} {count:.4g}" for kind, count in one.state.items()) or "nothing"
        scale = "" if one.omega is None and one.delta is None else f", scale shared by {one.sharing}"
        lines |= {
            f"at n = {one.ranks}": f"{config.reducer}, {one.wire_bits:.3f} bits per coordinate, "
            f"{one.sent_ratio:.3f} of the bytes of an fp32 ring allreduce",
            "remembers": f"{memories} (numbers per coordinate)",
            "bias": one.bias,
            "error": f"{one.constant}{scale}" if scale else "no constant: the scale is a whole parameter's",
        }
    lines |= {"warning": " ".join(one.warnings)} if one.warnings else {}
    for label, value in lines.items():
        grid.add_row(label, value)
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
