"""Runs the cells of a comparison one after another, each in processes of its own."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from recipes.comparison.plan import CELL_FILE, Cell
from recipes.comparison.processes import Starter
from recipes.files import RESULT_FILE
from recipes.measuring.amounts import megabytes_in_words
from recipes.measuring.metrics import Metric
from recipes.pace import LINE_EVERY_S, ComparisonPace, duration

LOG = "output.log"
TAIL_LINES = 25
#: Name of the line of the whole comparison.
WHOLE = "all runs"

#: Shows the number of a cell, its state, whether it has ended, and the time that is left.
Line = Callable[[int, str | Text, bool, str | None], None]


@dataclass(frozen=True)
class Failure:
    """A cell that did not finish.

    Attributes:
        cell: the cell.
        reason: what went wrong, in a few words.
        tail: the last lines of the cell's output.
        outcome: what the line of the cell says.
    """

    cell: Cell
    reason: str
    tail: str
    outcome: str = "failed"


def run_all(cells: tuple[Cell, ...], console: Console, fresh: bool) -> list[Failure]:
    """Run the cells in this order, finished ones again only if ``fresh``; a failure does not stop those that follow.

    Returns the failures.
    """
    failures = []
    with closing(Starter()) as starter, _lines(cells, console) as line:
        for number, cell in enumerate(cells):
            if not fresh and cell.is_finished():
                line(number, "finished before", done=True)
                continue
            try:
                line(number, "starting")
                failure = _run(cell, starter, partial(line, number))
            except KeyboardInterrupt:
                line(number, "stopped", done=True)
                raise
            line(number, Text(failure.outcome, "red") if failure else outcome_of(cell), done=True)
            failures += [failure] if failure else []
    return failures


def _run(cell: Cell, starter: Starter, say: Callable[[str], None]) -> Failure | None:
    if (cell.folder / CELL_FILE).exists():
        shutil.rmtree(cell.folder)  # an unfinished run, or one with another configuration
    cell.folder.mkdir(parents=True, exist_ok=True)
    (cell.folder / CELL_FILE).write_text(json.dumps(cell.config, indent=2) + "\n")
    log = cell.folder / LOG
    run = starter.start(cell, log)
    try:
        while (code := run.poll()) is None:
            time.sleep(0.3)
            say(_latest(log))
    finally:
        run.end()
    if code == 0 and (cell.folder / RESULT_FILE).is_file():
        return None
    return failure_of(cell, f"exit code {code}" if code else f"no {RESULT_FILE}")


def failure_of(cell: Cell, reason: str) -> Failure:
    """The failure of a cell that has ended; the reason, in a few words, holds unless the training has diverged."""
    tail = "\n".join(_read(cell.folder / LOG).splitlines()[-TAIL_LINES:])
    divergence = cell.divergence()
    if divergence:
        return Failure(cell, f"diverged, {divergence}", tail, "diverged")
    return Failure(cell, reason, tail)


def _latest(log: Path) -> str:
    """The last line of progress in a run's output."""
    lines = [line for line in _read(log)[-4000:].splitlines() if line.startswith(("epoch ", "step "))]
    return lines[-1] if lines else "starting"


def _read(log: Path) -> str:
    return log.read_text(errors="replace") if log.is_file() else ""


def outcome_of(cell: Cell) -> str:
    """What a finished cell has reached, in a line."""
    facts = json.loads((cell.folder / RESULT_FILE).read_text())
    metric = Metric.of_facts(facts)
    value = metric.of_run(facts["metrics"])
    shown = f"{metric.label} {metric.shown(value)}, " if value is not None else ""
    return f"{shown}{facts['train_time']:.1f} s of training, {megabytes_in_words(facts['mb_sent'])} MB sent"


def _share(text: str) -> float:
    """Part of a run that its line of progress says is done, 0 to 1; 0 if the line says nothing."""
    found = re.search(r"\((\d+) %\)", text)
    return int(found[1]) / 100 if found else 0.0


def name_of(cell: Cell) -> str:
    """What a cell is called while it runs."""
    return f"{cell.variant}, seed {cell.seed}" + (f", steps at {cell.link}" if cell.link else "")


@contextmanager
def _lines(cells: tuple[Cell, ...], console: Console) -> Iterator[Callable[..., None]]:
    """A function (number of the cell, text, done) that shows the state of a cell.

    On a terminal every cell has a live line, and so has the whole comparison. Elsewhere plain lines are printed in
    order, at the beginning and the end of each cell, and now and then.
    """
    pace = ComparisonPace(["probe" if cell.link else "training" for cell in cells])
    show = _live if console.is_terminal else _plain
    with show([name_of(cell) for cell in cells], console) as line:

        def follow(number: int, text: str | Text, done: bool = False) -> None:
            if text == "starting" and number not in started:
                started.add(number)
                pace.start(number)
            if done:
                pace.finish(number)
            left = pace.seconds_left(_share(str(text)))
            line(number, text, done, None if left is None else f"{duration(left)} left of the comparison")

        started: set[int] = set()
        yield follow


@contextmanager
def _plain(names: list[str], console: Console) -> Iterator[Line]:
    width = max(map(len, names))
    said: dict[int, tuple[float, str]] = {}

    def line(number: int, text: str | Text, done: bool, left: str | None) -> None:
        now = time.monotonic()
        latest, latest_text = said.get(number, (-math.inf, ""))
        if done or (now >= latest + LINE_EVERY_S and str(text) != latest_text):
            said[number] = (now, str(text))
            rest = f"; {left}" if left else ""
            console.print(f"[{number + 1}/{len(names)}] {names[number]:{width}}  {text}{rest}")

    yield line


@contextmanager
def _live(names: list[str], console: Console) -> Iterator[Line]:
    width = max(map(len, [*names, WHOLE]))
    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, min_width=width)),
        TimeElapsedColumn(Column(no_wrap=True, min_width=7)),
        TextColumn("[dim]{task.fields[status]}[/]", table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    with Progress(*columns, console=console) as progress:
        tasks: list[TaskID] = [progress.add_task(name, total=1, start=False, status="waiting") for name in names]
        whole = progress.add_task(WHOLE, total=len(names), status="")
        finished: set[int] = set()

        def line(number: int, text: str | Text, done: bool, left: str | None) -> None:
            if not progress.tasks[number].started:
                progress.start_task(tasks[number])
            status = text if isinstance(text, Text) else Text(text)
            progress.update(tasks[number], status=status.markup, completed=int(done))
            finished.update([number] if done else [])
            progress.update(whole, completed=len(finished), status=left or "")

        yield line
