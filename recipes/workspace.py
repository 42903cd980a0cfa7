"""The W&B workspace of a comparison: ``python recipes/workspace.py --group compare-quickstart --metric acc``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `recipes` is importable from every folder

from recipes.comparison.workspace import TABLE, Definition, save_workspace
from recipes.errors import RecipeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the workspace, or write it to a file where no key is configured; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", required=True, help="W&B group of the runs, as compare.py has printed it")
    parser.add_argument("--metric", required=True, metavar="KEY", help="what the task is judged by")
    parser.add_argument("--project", default="lightning-gqsgd", help="default: %(default)s")
    parser.add_argument("--entity", help="default: the one of the key")
    parser.add_argument("--by", action="append", metavar="KEY", help="one line per value; default: strategy.name")
    parser.add_argument("--plot", action="append", default=[], metavar="NAME", help="a picture of the comparison's run")
    parser.add_argument("--table", action="append", metavar="NAME", help="a table of it; default: comparison")
    parser.add_argument("--also", action="append", default=[], metavar="GROUP", help="a further W&B group of the runs")
    parser.add_argument("--file", type=Path, help="where it is written; default: outputs/workspaces/GROUP.json")
    options = parser.parse_args(arguments)
    file = options.file or Path("outputs", "workspaces", f"{options.group}.json")
    by = tuple(options.by or ["strategy.name"])
    plots, tables = tuple(options.plot), tuple(options.table or [TABLE])
    of_runs = (options.group, options.metric, options.project, options.entity)
    definition = Definition(*of_runs, by, plots, tables, tuple(options.also))
    try:
        url = save_workspace(definition, file)
    except RecipeError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"workspace: {url or file}")
    if url is None:
        print("no W&B key is configured, or WANDB_MODE forbids it: the same command makes it after `wandb login`")
    return 0


if __name__ == "__main__":
    sys.exit(main())
