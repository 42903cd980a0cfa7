"""The pages of the documentation as the tests of their figures read them: tables, and what is left of the text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Every page that people write. Those of benchmarks/results are tables, and those of docs/api have docstrings.
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("README.md", "docs/*.md", "docs/experiments/*.md", "recipes/README.md")
    for path in ROOT.glob(pattern)
)

_UNITS = r"%|×(?! ?[\d(√])|times|ns|ms|kB|MB|MiB|GB|points|nats|s\b|seconds|min\b|minutes|hours"
#: A number that somebody may have measured: one with a unit, or one with decimals.
FIGURE = re.compile(rf"(?<![\w.^])\d[\d,]*(?:\.\d+)? ?(?:{_UNITS})(?!\w)|(?<![\w.])\d*\.\d+(?![\w.]*\d)")
#: What is no text: code in fences, in indented blocks and in lines, and the targets of links.
_CODE = re.compile(
    r"^(```+).*?^\1[^\S\n]*$|^\n(?:(?: {4}|\t)[^\n]*\n)+|(`+)(?!`).*?(?<!`)\2(?!`)|\]\([^()\s]*\)|^\[[^\]]+\]: .*?$",
    re.MULTILINE | re.DOTALL,
)
#: What introduces tables.
_HEADING = re.compile(r"^#+ .*$|(?<=\n\n)\S.{0,40}:$(?=\n\n)", re.MULTILINE)


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes:
        heading: the latest heading before it, or a later paragraph that is one short line with a colon at its end.
        columns: the cells of its first row.
        rows: the cells of all other rows.
        source: the table as it stands on the page.
    """

    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    source: str


def cells(line: str) -> tuple[str, ...]:
    """The cells of a line of a table."""
    return tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1])


@cache
def text_of(page: str) -> str:
    """A page, by its path from the root."""
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def tables(page: str) -> tuple[Table, ...]:
    """All tables of a page, in order."""
    text, made = text_of(page), []
    for match in re.finditer(r"^\|.*\n\|[ :|-]+\|\n(?:\|.*\n)*", text, re.MULTILINE):
        headings = ["", *_HEADING.findall(text[: match.start()])]
        first, _, *rest = match[0].splitlines()
        made.append(Table(headings[-1].strip("# :"), cells(first), tuple(map(cells, rest)), match[0]))
    return tuple(made)


def without_code(text: str) -> str:
    """A text without code and targets of links."""
    return _CODE.sub(" ", text)


def figures(text: str) -> list[str]:
    """All figures of a text, each with what stands before and behind it."""
    plain = " ".join(without_code(text).split())
    return [plain[max(0, found.start() - 50) : found.end() + 30] for found in FIGURE.finditer(plain)]
