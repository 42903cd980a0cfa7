"""Results of a benchmark: on the screen, and as Markdown and JSON in ``benchmarks/results``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numba
import torch
from rich import box
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"

Cell = str | float | None


@dataclass
class Report:
    """A table with the command that makes it.

    Attributes:
        name: of the files.
        title: what was measured.
        columns: heading -> format of its numbers, e.g. ``".2f"``.
        notes: paragraphs under the table: how to read it, what falls short and why.
        rows: one value per column; None is shown as a dash.
        raw: further numbers, for the JSON file only.
    """

    name: str
    title: str
    columns: dict[str, str]
    notes: Sequence[str] = ()
    rows: list[Sequence[Cell]] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)

    def show(self) -> None:
        """Print the table."""
        table = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for number, heading in enumerate(self.columns):
            table.add_column(heading, justify="left" if number == 0 else "right")
        for row in self._texts():
            table.add_row(*row)
        Console(width=None if sys.stdout.isatty() else 140).print(table)

    def save(self, program: str) -> None:
        """Write ``results/NAME.md`` and ``.json``; ``program`` is what was run with this process's arguments."""
        command = shlex.join([*program.split(), *sys.argv[1:]])
        lines = [f"# {self.title}", "", f"    {command}", "", f"{machine()}.", ""]
        lines.append("| " + " | ".join(self.columns) + " |")
        lines.append("| --- |" + " ---: |" * (len(self.columns) - 1))
        lines += ["| " + " | ".join(row) + " |" for row in self._texts()]
        for note in self.notes:
            lines += ["", note]
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{self.name}.md").write_text("\n".join(lines) + "\n")
        facts = {"command": command, "machine": machine(), "columns": list(self.columns), "rows": self.rows}
        (RESULTS / f"{self.name}.json").write_text(json.dumps({**facts, **self.raw}, indent=1) + "\n")
        print(f"written: {RESULTS / self.name}.md and .json")

    def _texts(self) -> list[list[str]]:
        forms = list(self.columns.values())
        return [[_text(cell, form) for cell, form in zip(row, forms, strict=True)] for row in self.rows]


def present(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Report]) -> None:
    """Measure what the command line says, and show it; with ``--save``, write it too."""
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/NAME.md and .json")
    options = parser.parse_args()
    report = measure(options)
    report.show()
    if options.save:
        report.save(parser.prog)


def machine() -> str:
    """Processor, cores and versions."""
    model = platform.processor() or platform.machine()
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    except OSError:
        pass  # no /proc: the platform's name has to do
    return f"{model}, {os.cpu_count()} cores, torch {torch.__version__}, numba {numba.__version__}"


def _text(cell: Cell, form: str) -> str:
    if cell is None:
        return "–"
    return cell if isinstance(cell, str) else format(cell, form)
