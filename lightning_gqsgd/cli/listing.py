"""The further tables of ``gqsgd presets``: local steps, and optimizers, rules and topologies."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from lightning_gqsgd.cli.tables import grid_of, table_of_texts
from lightning_gqsgd.local_steps.options import LocalOptions
from lightning_gqsgd.presets import LOCAL_PRESETS
from lightning_gqsgd.research.systems import SYSTEMS


@dataclass(frozen=True)
class Listing:
    """A table with a row for each name.

    Attributes:
        title: heading of the table.
        headings: of the columns.
        whole: headings of the columns that are not folded where the terminal is narrow.
        note: the meaning of the columns.
        names: the names that have a row.
        row: the cells of a name, under the headings.
        to_dict: all facts of a name: texts, and mappings of texts to plain values.
        nothing: the word for an empty fact.
    """

    title: str
    headings: tuple[str, ...]
    whole: tuple[str, ...]
    note: str
    names: Collection[str]
    row: Callable[[str], list[str]]
    to_dict: Callable[[str], dict[str, Any]]
    nothing: str

    def table(self) -> Table:
        """Returns the table for a terminal."""
        made = table_of_texts(self.title, self.headings, self.whole)
        for name in self.names:
            made.add_row(*self.row(name))
        return made

    def in_full(self, name: str) -> Table:
        """Returns all facts of one name."""
        facts = {
            label: value if isinstance(value, str) else ", ".join(f"{key}={given!r}" for key, given in value.items())
            for label, value in self.to_dict(name).items()
        }
        return grid_of({label: fact or self.nothing for label, fact in facts.items()})


def _row_of_local_steps(name: str) -> list[str]:
    preset = LOCAL_PRESETS[name]
    given = preset.options
    outer = str(given.get("outer", "nesterov"))
    rule = str(given.get("rule", "mean"))
    messages = LocalOptions(**given).averaging.most_requests
    sends = preset.compression.config.describe()
    sends = sends if messages == 1 else f"{messages} messages of {sends}"
    return [name, str(given["every"]), outer, rule, sends, preset.paper]


def _local_steps_to_dict(name: str) -> dict[str, Any]:
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


LOCAL_STEPS = Listing(
    title="Local steps",
    headings=("preset", "H", "outer", "rule", "an average sends", "paper"),
    whole=("preset",),
    note="H: number of optimizer steps between two averages. outer: the outer optimizer, which moves the anchor by the "
    "mean change. rule: the rule by which changes become their mean. an average sends: bits per coordinate, without "
    "scales and before Elias codes, and the codec. gqsgd presets NAME prints all values of a preset. Every argument of "
    "LocalSteps overrides the preset's value.",
    names=LOCAL_PRESETS,
    row=_row_of_local_steps,
    to_dict=_local_steps_to_dict,
    nothing="none",
)


def _row_of_a_system(name: str) -> list[str]:
    system = SYSTEMS[name]
    return [name, system.where, system.sends, system.keeps, system.needs, system.paper]


def _system_to_dict(name: str) -> dict[str, Any]:
    system = SYSTEMS[name]
    return {"name": name, **asdict(system), "fields": dict(system.fields), "left_out": system.left_out or "nothing"}


OTHER_SYSTEMS = Listing(
    title="Optimizers, rules of training, topologies",
    headings=("system", "in", "sends", "keeps", "needs", "paper"),
    whole=("system", "in"),
    note="in: where a system runs, in training or in simulations. sends: what a rank sends, and bits per coordinate. "
    "keeps: numbers per coordinate that a rank remembers. gqsgd presets NAME prints all values of a system, and its "
    "guarantees.",
    names=SYSTEMS,
    row=_row_of_a_system,
    to_dict=_system_to_dict,
    nothing="any",
)
