"""The first words of a command, before anything is imported that takes time; the standard library is enough."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from recipes.launch.processes import global_rank

#: Exit code after an interrupt, as shells have it.
INTERRUPTED = 130

#: The packages of the clone. If one of their modules is missing, no installation helps.
_OWN = ("lightning_gqsgd", "netlab", "pictures", "recipes", "workloads")


def announce(script: str, doing: str, arguments: Sequence[str]) -> None:
    """Print what a command is about to do, unless another process of the same run prints it."""
    say(f"{script}: {doing} with {' '.join(arguments) or 'default settings'}; reading the configuration ...")


def print_in_any_locale() -> None:
    """Let standard output print a question mark for a character that the user's locale does not have.

    Tables have dashes and signs that e.g. ISO-8859-1 lacks. A comparison would end with an error after all its runs.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@contextmanager
def missing_packages_in_one_line(script: str) -> Iterator[None]:
    """End the process with one line on standard error, and exit code 2, where a package of recipes is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", *_OWN):
            raise
        if leads(os.environ):
            print(
                f"{script}: {sys.executable} has no package {package!r}, which recipes need; call `uv sync` in the "
                "clone and put `uv run` before the command, or call pip install '.[recipes]' there",
                file=sys.stderr,
            )
        sys.exit(2)


def say(text: str) -> None:
    """Print a line, unless another process of the same run prints it."""
    if speaks(os.environ):
        print(text, flush=True)


class PrintedRecords(logging.Handler):
    """Prints log records. A handler of `logging` keeps the stream of the start, and would write into a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        print(self.format(record), flush=True)


def speaks(environment: Mapping[str, str]) -> bool:
    """Whether this process is the one that speaks: not a rank above 0 of a launcher, of Lightning or of a lab."""
    return global_rank(environment) == 0


def leads(environment: Mapping[str, str]) -> bool:
    """Whether this process is the first one of its machine."""
    return all(environment.get(name, "0") in ("", "0") for name in ("LOCAL_RANK", "SLURM_LOCALID"))
