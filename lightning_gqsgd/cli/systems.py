"""What the command line says of optimizers, rules of training and topologies of the literature."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lightning_gqsgd.cli.listing import Listing
from lightning_gqsgd.research.systems import SYSTEMS


def row(name: str) -> list[str]:
    """Cells under the listing's headings."""
    system = SYSTEMS[name]
    return [name, system.where, system.sends, system.keeps, system.needs, system.paper]


def to_dict(name: str) -> dict[str, Any]:
    """Plain values only."""
    system = SYSTEMS[name]
    return {"name": name, **asdict(system), "fields": dict(system.fields), "left_out": system.left_out or "nothing"}


LISTING = Listing(
    title="Optimizers, rules of training, topologies",
    about="What is more than a configuration; [formulas and experiments](systems.md).",
    headings=("system", "in", "sends", "keeps", "needs", "paper"),
    whole=("system", "in"),
    note="in: where a system runs, in training or in simulations. sends: what a rank sends, and bits per coordinate. "
    "keeps: numbers that a rank remembers, per coordinate. All of one, with what it guarantees: gqsgd presets NAME.",
    names=SYSTEMS,
    row=row,
    to_dict=to_dict,
    nothing="any",
)
