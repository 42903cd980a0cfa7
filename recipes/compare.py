"""One task under several strategies: runs, a table, pictures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `recipes` is importable from every folder

from rich import box
from rich.console import Console
from rich.table import Table

from recipes.comparison.dashboard import publish
from recipes.comparison.plan import Plan, PlanError, make_plan
from recipes.comparison.plots import save_curves, save_family, save_step_times
from recipes.comparison.results import (
    BOUND_NOTE,
    Run,
    cells,
    common_target,
    compare,
    headings,
    knows_bound,
    write_tables,
)
from recipes.comparison.runner import Failure, run_all

USAGE = """\
examples:
  python recipes/compare.py +exp=quickstart
  python recipes/compare.py +exp=quickstart strategy=ddp,ddp_bf16,gqsgd seed=0,1,2
  python recipes/compare.py +exp=quickstart strategy=all trainer.devices=4
  python recipes/compare.py +exp=quickstart strategy=gqsgd strategy.bits=2,4,8
  python recipes/compare.py +exp=resnet_cifar launcher=netlab hosts=2 rate=1gbit target=0.9

Comma lists are the sweep: every combination is one run of recipes/run.py in fresh processes. Finished runs are kept.
strategy=all is ddp, ddp_bf16 and every preset; not powersgd, which needs CUDA.
Settings of the comparison itself, beside all overrides of run.py:
  target=0.9        value of the task's metric whose time is reported (default: the worst best value less 1 %)
  launcher=netlab   hosts with shaped links on this machine, one process each: hosts=2 rate=1gbit
  output=FOLDER     default: outputs/compare
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, tabulate and draw a comparison; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="override", help="as for recipes/run.py, with comma lists")
    parser.add_argument("--fresh", action="store_true", help="run finished cells again")
    options = parser.parse_intermixed_args(arguments)
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    try:
        plan = make_plan(options.overrides)
    except PlanError as error:
        parser.error(str(error))
    try:
        failures = run_all(plan.cells, plan.settings, console, options.fresh)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on with the runs that are missing")
        return 130
    for failure in failures:
        _show(failure, console)
    _report(plan, {failure.cell.folder for failure in failures}, console)
    return 1 if failures else 0


def _report(plan: Plan, failed: set[Path], console: Console) -> None:
    variants: dict[str, list[Run]] = {}
    for cell in plan.cells:
        if cell.folder not in failed:
            variants.setdefault(cell.variant, []).append(Run.load(cell.folder))
    if not variants:
        console.print("no run has finished: no table")
        return
    given = plan.settings.target
    target = common_target(variants) if given is None else given
    title = _title(plan, variants)
    lines = compare(variants, target)
    metric = lines[0].metric
    heads, rows = headings(metric, target), [cells(line) for line in lines]
    shown, padding = _fitting(heads, rows, console.width)
    table = _table(title, [heads[one] for one in shown], [[row[one] for one in shown] for row in rows], padding)
    console.print(table, soft_wrap=False)
    left_out = [heading for number, heading in enumerate(heads) if number not in shown]
    if left_out:
        console.print(f"left out at this width, but in the files: {', '.join(left_out)}", style="dim", highlight=False)
    if knows_bound(lines) and len(heads) - 1 in shown:
        console.print(BOUND_NOTE, style="dim", highlight=False, soft_wrap=False)

    files = list(write_tables(lines, target, title, plan.folder))
    for axis in ("time", "epoch", "mb_sent"):
        files.append(plan.folder / f"{metric.label.lower()}_{axis}.png")
        save_curves(variants, axis, title, files[-1], target if axis == "time" else float("nan"))
    files.append(plan.folder / "step_time.png")
    save_step_times(variants, title, files[-1])
    family = plan.folder / "family.png"
    if save_family(lines, title, family):
        files.append(family)
    else:
        family.unlink(missing_ok=True)  # of an earlier comparison with more variants
    for file in files:
        console.print(f"{'plot' if file.suffix == '.png' else 'table'}: {file}", highlight=False)
    publish(plan, metric, title, files, console)


#: Columns that go first where there is no room for all, by number in `headings`.
LESS_IMPORTANT = (10, 3, 1, 7, 11, 12, 5)


def _fitting(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> tuple[list[int], int]:
    """Numbers of the columns that fit into ``width``, and the padding that is left: 1 or 0."""
    widths = _widths(heads, rows)
    shown = list(range(len(heads)))
    for column in (None, *LESS_IMPORTANT):
        shown = [one for one in shown if one != column]
        least = sum(widths[one] for one in shown) + len(shown) + 1
        if least <= width:
            break
    return shown, int(least + 2 * len(shown) <= width)


def _widths(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Least width of each column: headings may be broken at spaces, numbers never."""
    return [max(*(len(row[number]) for row in rows), *map(len, head.split())) for number, head in enumerate(heads)]


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], padding: int) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, padding))
    for number, (heading, width) in enumerate(zip(heads, _widths(heads, rows), strict=True)):
        table.add_column(heading, justify="left" if number == 0 else "right", width=width)
    for row in rows:
        table.add_row(*row)
    return table


def _title(plan: Plan, variants: dict[str, list[Run]]) -> str:
    facts = next(iter(variants.values()))[0].facts
    data = " / ".join(sorted({run.facts["data"] for runs in variants.values() for run in runs}))
    if plan.settings.launcher == "netlab":
        return f"{plan.experiment} on {data}: {facts['model']}, {plan.settings.hosts} hosts, {plan.settings.rate}"
    return f"{plan.experiment} on {data}: {facts['model']}, {facts['processes']} processes"


def _show(failure: Failure, console: Console) -> None:
    cell = failure.cell
    console.rule(f"{cell.variant}, seed {cell.seed}: {failure.reason}")
    console.print(failure.tail, markup=False, highlight=False)
    console.rule(str(cell.folder))


if __name__ == "__main__":
    sys.exit(main())
