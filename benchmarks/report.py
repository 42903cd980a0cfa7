"""Results of a benchmark: printed, and written as Markdown and JSON to ``benchmarks/results``."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numba
import torch
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from lightning_gqsgd.errors import counted
from lightning_gqsgd.wire.processors import processors
from netlab.errors import NetLabError
from netlab.machine import device_name

RESULTS = Path(__file__).resolve().parent / "results"

Cell = str | float | None


@dataclass
class Report:
    """A table with the command that makes it.

    Attributes:
        name: name of the files, without their suffix.
        title: what was measured.
        columns: heading -> format of the column's numbers, e.g. ``".2f"``.
        notes: paragraphs under the table: how the table is read, where the package falls short, and why.
        rows: one value per column; None is shown as a dash.
        raw: further numbers, for the JSON file only.
        machine: what the benchmark ran on; "" stands for this machine's processor.
        draw: writes a picture of the figures to a file; None: there is no picture.
    """

    name: str
    title: str
    columns: dict[str, str]
    notes: Sequence[str] = ()
    rows: list[Sequence[Cell]] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    machine: str = ""
    draw: Callable[[Path], None] | None = None

    def show(self) -> None:
        """Print the table."""
        table = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for number, heading in enumerate(self.columns):
            table.add_column(heading, justify="left" if number == 0 else "right")
        for row in self._texts():
            table.add_row(*row)
        console = Console()
        if not sys.stdout.isatty():  # a file has no width, so no cell is broken in two
            unlimited = console.options.update(width=10_000)
            console = Console(width=Measurement.get(console, unlimited, table).maximum)
        console.print(table)

    def save(self, program: str) -> None:
        """Write ``results/NAME.md``, ``.json`` and, if there is a picture, ``.png``.

        The page has the program with this process's arguments.
        """
        command, where = shlex.join([*program.split(), *sys.argv[1:]]), self.machine or machine()
        lines = [f"# {self.title}", "", f"    {command}", "", f"{where}.", ""]
        if self.draw is not None:
            lines += [f"![{self.title}]({self.name}.png)", ""]
        lines.append("| " + " | ".join(self.columns) + " |")
        lines.append("| --- |" + " ---: |" * (len(self.columns) - 1))
        lines += ["| " + " | ".join(row) + " |" for row in self._texts()]
        for note in self.notes:
            lines += ["", note]
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{self.name}.md").write_text("\n".join(lines) + "\n")
        facts = {"command": command, "machine": where, "columns": list(self.columns), "rows": self.rows}
        (RESULTS / f"{self.name}.json").write_text(json.dumps({**facts, **self.raw}, indent=1) + "\n")
        if self.draw is not None:  # last, because the figures stay where a picture cannot be drawn
            self.draw(RESULTS / f"{self.name}.png")
        print(f"written: {RESULTS / self.name}.md and {'.json' if self.draw is None else '.json and .png'}")

    def _texts(self) -> list[list[str]]:
        forms = list(self.columns.values())
        return [[_text(cell, form) for cell, form in zip(row, forms, strict=True)] for row in self.rows]


def listed(numbers: Iterable[float]) -> str:
    """Returns numbers for a note of a report, e.g. ``0.001, 0.002``."""
    return ", ".join(f"{number:g}" for number in numbers)


def command_line(description: str) -> argparse.ArgumentParser:
    """Returns a parser of the command line of the module with this docstring, which this process runs."""
    return argparse.ArgumentParser(prog=program(), description=description.split("\n")[0])


def program() -> str:
    """Returns the start of this process's command line, e.g. ``python -m benchmarks.reducers``."""
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name}" if spec is not None else sys.argv[0]  # a script, e.g. that of pytest


def present(
    parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Report], threads: int | None = None
) -> None:
    """Measure what the command line asks for, and print the report; ``--save`` writes the report, too."""
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/NAME.md and .json")
    options = parser.parse_args()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        report = measure(options)
    except NetLabError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    report.show()
    if options.save:
        report.save(parser.prog)


def machine() -> str:
    """Processor, number of cores and versions."""
    processor, number = device_name(on_cuda=False), counted(processors(), "core")
    return f"{processor}, {number}, torch {torch.__version__}, numba {numba.__version__}"


def gpu_machine(device: torch.device) -> str:
    """Name and memory of a CUDA device, driver and versions."""
    properties = torch.cuda.get_device_properties(device)
    return (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, driver {_driver()}, CUDA {torch.version.cuda}, "
        f"triton {_version('triton')}, torch {torch.__version__}"
    )


def slug(device_name: str) -> str:
    """Name of a CUDA device in names of files, without maker, memory and socket.

    ``NVIDIA H100 80GB HBM3`` becomes ``h100``.
    """
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    dull = re.compile(r"nvidia|tesla|geforce|generation|\d+gb|hbm\w*|sxm\w*")
    return "_".join(word for word in words if not dull.fullmatch(word)) or "unknown"


def _driver() -> str:
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.partition("\n")[0].strip() or "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _text(cell: Cell, form: str) -> str:
    if cell is None:
        return "–"
    return cell if isinstance(cell, str) else format(cell, form)
