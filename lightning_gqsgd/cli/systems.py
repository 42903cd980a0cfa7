"""What the command line says of optimizers, rules of training and topologies of the literature."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from lightning_gqsgd.systems import SYSTEMS

HEADINGS = ("system", "in", "sends", "keeps", "needs", "paper")
NOTE = (
    "in: where a system runs, in training or in simulations. sends: what a rank sends, and bits per coordinate. keeps: "
    "numbers that a rank remembers, per coordinate. All of one, with what it guarantees: gqsgd presets NAME."
)


def row(name: str) -> list[str]:
    """Cells under `HEADINGS`."""
    system = SYSTEMS[name]
    return [name, system.where, system.sends, system.keeps, system.needs, system.paper]


def table() -> Table:
    """A row for each system; cells are folded where the terminal is narrow."""
    made = Table(title="Optimizers, rules of training, topologies", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in HEADINGS:
        made.add_column(heading, overflow="fold", no_wrap=heading in ("system", "in"))
    for name in SYSTEMS:
        made.add_row(*row(name))
    return made


def markdown() -> list[str]:
    """The lines of the table's section in docs/presets.md."""
    lines = [list(HEADINGS), ["---"] * len(HEADINGS), *(row(name) for name in SYSTEMS)]
    return [
        "## Optimizers, rules of training, topologies",
        "",
        "What is more than a configuration; [formulas and experiments](systems.md).",
        "",
        *("| " + " | ".join(cells) + " |" for cells in lines),
        "",
        NOTE.replace("gqsgd presets NAME", "`gqsgd presets NAME`"),
        "",
    ]


def in_full(name: str) -> Table:
    """All facts of a system."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in to_dict(name).items():
        plain = value if isinstance(value, str) else ", ".join(f"{field}={given!r}" for field, given in value.items())
        grid.add_row(label, plain or "any")
    return grid


def to_dict(name: str) -> dict[str, Any]:
    """Plain values only."""
    system = SYSTEMS[name]
    return {"name": name, **asdict(system), "fields": dict(system.fields)}
