"""One task under several strategies: runs, a table, pictures."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `recipes` is importable from every folder

from netlab.lab import NetLabError, exit_on_signals
from recipes.errors import RecipeError
from recipes.files import FULL_DISK
from recipes.launch.processes import script
from recipes.opening import INTERRUPTED, announce, missing_packages_in_one_line, print_in_any_locale

if TYPE_CHECKING:
    from rich.console import Console

    from recipes.comparison.plan import Plan

USAGE = """\
examples:
  python recipes/compare.py +exp=quickstart
  python recipes/compare.py +exp=quickstart strategy=ddp,ddp_bf16,gqsgd seed=0,1,2
  python recipes/compare.py +exp=quickstart strategy=all trainer.devices=4
  python recipes/compare.py +exp=quickstart strategy=gqsgd strategy.bits=2,4,8
  python recipes/compare.py +exp=resnet_cifar hardware=netlab hardware.rate=1gbit target=0.9

  python recipes/compare.py --from outputs/resnet_cifar/*
  python recipes/compare.py +exp=resnet_cifar hardware=slurm hardware.nodes=2 strategy=ddp,gqsgd seed=0,1,2

Comma lists are the sweep: every combination is one run of recipes/run.py in processes of its own. Finished runs are
kept. strategy=all is ddp, ddp_bf16 and every preset that averages gradients in every step.
Settings of the comparison itself, beside all overrides of run.py:
  target=0.9        value of the task's metric whose time is reported (default: the worst best value less 1 %)
  output=FOLDER     default: outputs/compare
  links=100mbit,1gbit  with hardware=netlab: train once, on unlimited links, and measure the step of every strategy on
                    each of these in a run of probe_steps=30 steps; a table and plots for each, in seconds of that link
--from compares runs that have finished, wherever they were made: folders of runs, or folders above them. Runs of one
experiment on several kinds of hardware stand side by side. target= and output= go with it.
"""


#: Exit codes after the signals of `exit_on_signals`.
_STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGHUP)
#: What is said after them, and after an interrupt.
_GOES_ON = "finished runs are kept, and the same command goes on with the others"


class _Parser(argparse.ArgumentParser):
    """Refuses a command line in one line; the usage has two dozen."""

    def error(self, message: str) -> NoReturn:
        remedy = "; python recipes/compare.py --help has all" if message.startswith("unrecognized arguments") else ""
        print(f"compare.py: {message}{remedy}", file=sys.stderr)
        sys.exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, tabulate and draw a comparison.

    Returns:
        The exit code: 0, 1 if a run failed or the disk is full, or 130 after an interrupt.
    """
    print_in_any_locale()
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _Parser(description=__doc__, epilog=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="override", help="as for recipes/run.py, with comma lists")
    parser.add_argument("--fresh", action="store_true", help="run finished cells again")
    parser.add_argument(
        "--from", dest="runs", nargs="+", metavar="FOLDER", help="compare the finished runs in these folders; runs none"
    )
    if {"-m", "--multirun"} & set(arguments):
        parser.error("comma lists are the sweep here; leave -m out")
    parser.add_argument("--config-dir", "-cd", metavar="FOLDER", help="a folder of your own with further choices")
    options = parser.parse_intermixed_args(arguments)
    try:
        with missing_packages_in_one_line("compare.py"):
            return _compare_finished(options) if options.runs else _compare(options, arguments)
    except (RecipeError, NetLabError) as error:
        parser.error(str(error))
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        print(f"compare.py: no more room for its files ({error.strerror}); make room: {_GOES_ON}", file=sys.stderr)
        return 1


def _compare(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run what the command line asks for, and say how to go on where that ends early."""
    overrides = _overrides(options)
    command = shlex.join(["python", script("compare.py"), *overrides])
    try:
        announce("compare.py", "a comparison", arguments)
        return _run(overrides, options.fresh, command)
    except KeyboardInterrupt:
        print(f"\ninterrupted; {_GOES_ON}:\n  {command}")
        return INTERRUPTED
    except SystemExit as end:
        if end.code in _STOPPED:
            print(f"\nstopped by a signal; {_GOES_ON}:\n  {command}")
        raise


def _overrides(options: argparse.Namespace) -> list[str]:
    if not options.config_dir:
        return list(options.overrides)
    from recipes.own_folders import with_search_path

    return with_search_path([*options.overrides, f"--config-dir={options.config_dir}"])


def _run(overrides: Sequence[str], fresh: bool, command: str) -> int:
    # Here, not above: the first word comes before everything that takes time, and mistakes before what takes longer.
    from recipes.comparison.plan import make_plan
    from recipes.folders import check_writable, claimed

    console = _console()
    plan = make_plan(overrides)
    check_writable("output", plan.settings.output)
    console.print(_intention(plan), highlight=False)
    plan.folder.mkdir(parents=True, exist_ok=True)
    # A second comparison would delete the folders of the runs that are under way.
    with claimed("output", plan.folder):
        return _run_and_report(plan, fresh, command, console)


def _run_and_report(plan: Plan, fresh: bool, command: str, console: Console) -> int:
    from recipes.comparison.runner import run_all
    from recipes.comparison.submitted import is_submitted, submit_all

    submitted = tuple(cell for cell in plan.cells if is_submitted(cell))
    failures = submit_all(submitted, console, fresh) if submitted else []
    here = tuple(cell for cell in plan.cells if cell not in submitted)
    failures += run_all((*here, *plan.probes), console, fresh) if here else []
    from recipes.comparison.reporting import check_one_data_set, report, show_failure

    for failure in failures:
        show_failure(failure, console)
    failed = {failure.cell.folder for failure in failures}
    check_one_data_set(plan, failed)
    report(plan, failed, command, console)
    return 1 if failures else 0


def _compare_finished(options: argparse.Namespace) -> int:
    """Compare the runs of ``--from``, and run nothing."""
    announce("compare.py", "finished runs", ["--from", *options.runs])
    from recipes.comparison.finished import find
    from recipes.comparison.plan import check_target, settings_of
    from recipes.comparison.reporting import report_finished
    from recipes.errors import RecipeError
    from recipes.folders import check_writable

    # The option takes all words that follow it, and settings may be among them.
    own = [word for word in options.runs if word.startswith(("target=", "output="))]
    folders = [Path(word) for word in options.runs if word not in own]
    overrides = [*_overrides(options), *own]
    command = shlex.join(["python", script("compare.py"), *overrides, "--from", *map(str, folders)])
    if options.fresh:
        raise RecipeError("--fresh runs cells again, and --from runs none; leave one of them out")
    settings = settings_of(overrides)
    check_writable("output", settings.output)
    finished = find(folders)
    check_target(settings.target, finished.chosen[0].run.metric)
    report_finished(finished, settings, command, _console())
    return 0


def _console() -> Console:
    """Where a comparison prints. Square brackets are the user's own words, and no markup."""
    from rich.console import Console

    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160, markup=False)


def _intention(plan: Plan) -> str:
    """What is about to be run, in a line."""
    from lightning_gqsgd.errors import counted

    runs = counted(len(plan.cells), "training")
    probes = f" and {counted(len(plan.probes), 'probe')} of links" if plan.probes else ""
    variants = ", ".join(dict.fromkeys(cell.variant for cell in plan.cells))
    return f"{plan.experiment}: {runs}{probes} ({variants}), in {plan.folder}"


if __name__ == "__main__":
    exit_on_signals()  # schedulers end a comparison with SIGTERM, and its run has to end with it
    sys.exit(main())
