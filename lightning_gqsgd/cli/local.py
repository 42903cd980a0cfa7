"""What the command line says of the systems of local steps."""

from __future__ import annotations

from typing import Any

from lightning_gqsgd.cli.listing import Listing
from lightning_gqsgd.presets import LOCAL_PRESETS


def row(name: str) -> list[str]:
    """Cells under the listing's headings."""
    preset = LOCAL_PRESETS[name]
    given = preset.options
    outer = str(given.get("outer", "nesterov"))
    rule = str(given.get("rule", "mean"))
    return [name, str(given["every"]), outer, rule, preset.compression.config.describe(), preset.paper]


def to_dict(name: str) -> dict[str, Any]:
    """Plain values only."""
    preset = LOCAL_PRESETS[name]
    return {
        "name": name,
        "what": preset.what,
        "optimizer": preset.optimizer,
        "paper": preset.paper,
        "local_steps": dict(preset.options),
        "config": preset.compression.config.describe(),
        "compression": preset.preset,
        "fields": dict(preset.fields),
        "left_out": preset.left_out or "nothing",
    }


LISTING = Listing(
    title="Local steps",
    about="Ranks train by themselves and average seldom; [formulas and experiments](local_steps.md).",
    headings=("preset", "H", "outer", "rule", "an average sends", "paper"),
    whole=("preset",),
    note="H: optimizer steps between two averages. outer: what moves the anchor by the mean change. rule: how changes "
    "become their mean. All of one: gqsgd presets NAME. Every argument of LocalSteps replaces the preset's.",
    names=LOCAL_PRESETS,
    row=row,
    to_dict=to_dict,
    nothing="none",
)
