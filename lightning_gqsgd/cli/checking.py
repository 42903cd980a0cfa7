"""The command ``gqsgd systems check``: compares claims of the literature with small experiments."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from lightning_gqsgd.cli.tables import table_of_texts
from lightning_gqsgd.errors import ConfigError, listed
from lightning_gqsgd.research.experiments import EXPERIMENTS, Row, source_of
from lightning_gqsgd.research.simulation.training import one_thread


@dataclass(frozen=True)
class Checked:
    """The result of an experiment.

    Attributes:
        system: its name.
        source: its paper.
        rows: claims and measurements.
        seconds: how long it took.
    """

    system: str
    source: str
    rows: tuple[Row, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        """Returns whether all claims hold."""
        return all(row.holds for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as plain values."""
        return {**asdict(self), "holds": self.holds}


def checked(names: Sequence[str], say: Callable[[str], None]) -> list[Checked]:
    """Run the experiments of systems, each once, in the order of the names. Returns their results.

    Args:
        names: names of `EXPERIMENTS`, or "all".
        say: called with the name of each step, for a progress line.

    Raises:
        ConfigError: if a system has no experiment.
    """
    wanted = EXPERIMENTS if "all" in names else dict.fromkeys(names)
    without = [name for name in wanted if name not in EXPERIMENTS]
    if without:
        raise ConfigError(
            f"{listed(without)} has no experiment yet; add a function for it to lightning_gqsgd/research/experiments, "
            "and its name to EXPERIMENTS there"
        )
    with one_thread():  # the experiments are so small that more threads are not faster
        return [_outcome(name, say) for name in wanted]


def _outcome(name: str, say: Callable[[str], None]) -> Checked:
    say(f"checking {name}")
    begun = time.perf_counter()
    # A comparison of numbers of NumPy's is a bool of NumPy's, which JSON does not know.
    rows = tuple(replace(row, holds=bool(row.holds)) for row in EXPERIMENTS[name]())
    return Checked(name, source_of(name), rows, round(time.perf_counter() - begun, 2))


def table(made: Sequence[Checked]) -> Table:
    """Returns the table for a terminal: a row for each claim, with its verdict."""
    headings = ("system", "claim", "measured", "holds", "source")
    shown = table_of_texts("Claims of the literature", headings, whole=("system", "holds"))
    for outcome in made:
        for number, row in enumerate(outcome.rows):
            first = (outcome.system, outcome.source) if number == 0 else ("", "")
            verdict = "yes" if row.holds else "NO"
            shown.add_row(first[0], row.claim, row.measured, verdict, first[1], style=None if row.holds else "bold red")
    return shown


def summary(made: Sequence[Checked]) -> str:
    """Returns a line: how many claims hold, and the systems of which some do not."""
    rows = [row for outcome in made for row in outcome.rows]
    holding = sum(row.holds for row in rows)
    failing = [outcome.system for outcome in made if not outcome.holds]
    seconds = sum(outcome.seconds for outcome in made)
    said = f"{holding} of {len(rows)} claims hold, after {seconds:.0f} s"
    return f"{said}; not all of: {', '.join(failing)}" if failing else said
