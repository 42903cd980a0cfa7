"""Writes docs/cli.md from the commands of ``gqsgd``: what they do, their arguments and options.

python docs/_site/commands.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from lightning_gqsgd.cli.app import __doc__ as docs
from lightning_gqsgd.cli.app import app

PAGE = Path(__file__).resolve().parents[1] / "cli.md"
HEAD = """# Command line

This page lists the commands of `gqsgd`, which is installed with the package. None of them needs a GPU. Most users need
two of them: `gqsgd doctor` checks a machine, and `gqsgd advise` predicts what compression gains. In a terminal,
`gqsgd COMMAND --help` prints the same text. This page is written by

    python docs/_site/commands.py

Examples:
"""


def markdown() -> str:
    """Returns the page."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    examples = [f"    {line}" for line in (docs or "").splitlines() if line.startswith("gqsgd ")]
    sections = [line for name, command in commands.items() for line in _section(name, command)]
    return "\n".join([HEAD, *examples, "", *sections])


def _section(name: str, command: Any, level: int = 2) -> Iterator[str]:
    parameters = [one for one in command.params if one.name != "help"]
    yield from (f"{'#' * level} gqsgd {name}", "", " ".join(command.help.split()), "")
    if parameters:
        yield from ("| argument | meaning | default |", "|---|---|---|")
        yield from (_row(one) for one in parameters)
        yield ""
    for inner, part in getattr(command, "commands", {}).items():
        yield from _section(f"{name} {inner}", part, level + 1)


def _row(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    name = ", ".join(f"`{word}`" for word in parameter.opts) if is_option else f"`{_metavar(parameter)}`"
    # Where the default is chosen later, the help ends with it.
    text, _, told = " ".join(parameter.help.split()).partition(" [default: ")
    default = told.removesuffix("]")
    if not default and parameter.default not in (None, False, ()):
        default = f"`{parameter.default}`"
    return f"| {name} | {_escaped(text)} | {_escaped(default)} |"


def _metavar(parameter: Any) -> str:
    word = parameter.metavar or parameter.name.upper()
    return f"[{word}]..." if parameter.nargs == -1 else f"[{word}]"


def _escaped(text: str) -> str:
    """Text for a cell: words that stand for values are code, so that Markdown leaves them alone."""
    return re.sub(r"([|<>])", r"\\\1", text)


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
