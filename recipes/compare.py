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

from recipes.comparison.plan import Plan, PlanError, make_plan
from recipes.comparison.plots import save_curves, save_step_times
from recipes.comparison.results import Run, cells, common_target, compare, headings, write_tables
from recipes.comparison.runner import Failure, run_all

USAGE = """\
examples:
  python recipes/compare.py +exp=quickstart
  python recipes/compare.py +exp=quickstart strategy=ddp,ddp_bf16,gqsgd seed=0,1,2
  python recipes/compare.py +exp=quickstart strategy=gqsgd strategy.bits=2,4,8
  python recipes/compare.py +exp=resnet_cifar launcher=netlab hosts=2 rate=1gbit target=0.9

Comma lists are the sweep: every combination is one run of recipes/run.py in fresh processes. Finished runs are kept.
Settings of the comparison itself, beside all overrides of run.py:
  target=0.9        accuracy whose time is reported (default: 99 % of the lowest best accuracy)
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
    table = _table(title, headings(target), [cells(line) for line in lines], narrow=console.width < 92)
    console.print(table, soft_wrap=False)

    files = list(write_tables(lines, target, title, plan.folder))
    for axis in ("time", "epoch", "mb_sent"):
        files.append(plan.folder / f"accuracy_{axis}.png")
        save_curves(variants, axis, title, files[-1], target if axis == "time" else float("nan"))
    files.append(plan.folder / "step_time.png")
    save_step_times(variants, title, files[-1])
    for kind, file in zip(("table", "table", "plot", "plot", "plot", "plot"), files, strict=True):
        console.print(f"{kind}: {file}", highlight=False)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], narrow: bool) -> Table:
    """Ten columns in 80 characters: headings may be broken at spaces, numbers never."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0 if narrow else 1))
    for number, heading in enumerate(heads):
        width = max(*(len(row[number]) for row in rows), *map(len, heading.split()))
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
