"""What the command line says of the systems of local steps."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from lightning_gqsgd.local_steps.presets import LOCAL_PRESETS

HEADINGS = ("preset", "H", "outer", "rule", "an average sends", "paper")
NOTE = (
    "H: optimizer steps between two averages. outer: what moves the anchor by the mean change. rule: how changes become"
    " their mean. All of one: gqsgd presets NAME. Every argument of LocalSteps replaces the preset's."
)


def row(name: str) -> list[str]:
    """Cells under `HEADINGS`."""
    preset = LOCAL_PRESETS[name]
    given = preset.options
    outer, rule = str(given.get("outer", "nesterov")), str(given.get("rule", "mean"))
    return [name, str(given["every"]), outer, rule, preset.compression.config.describe(), preset.paper]


def table() -> Table:
    """A row for each system; cells are folded where the terminal is narrow."""
    made = Table(title="Local steps", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in HEADINGS:
        made.add_column(heading, overflow="fold", no_wrap=heading == "preset")
    for name in LOCAL_PRESETS:
        made.add_row(*row(name))
    return made


def markdown() -> list[str]:
    """The lines of the table's section in docs/presets.md."""
    lines = [list(HEADINGS), ["---"] * len(HEADINGS), *(row(name) for name in LOCAL_PRESETS)]
    return [
        "## Local steps",
        "",
        "Ranks train by themselves and average seldom; [formulas and experiments](local_steps.md).",
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
        grid.add_row(label, plain or "none")
    return grid


def to_dict(name: str) -> dict[str, Any]:
    """Plain values only."""
    preset = LOCAL_PRESETS[name]
    return {
        "name": name,
        "what": preset.what,
        "paper": preset.paper,
        "local_steps": dict(preset.options),
        "config": preset.compression.config.describe(),
        "compression": preset.preset,
        "fields": dict(preset.fields),
    }
