"""The tables of benchmarks/results, as figures quoted elsewhere need them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT, tables

RESULTS = ROOT / "benchmarks" / "results"

#: A row: its cells by their columns, and under "heading" that of its table.
Row = dict[str, str]


def rows_of(page: Path) -> list[Row]:
    """All rows of all tables of a Markdown page, in order."""
    return [
        {"heading": table.heading, **dict(zip(table.columns, row, strict=True))}
        for table in tables(str(page))
        for row in table.rows
    ]


def saved_rows(name: str) -> list[dict[str, Any]]:
    """The rows of ``benchmarks/results/NAME.json`` by their columns, as they were before the table rounded them."""
    saved = json.loads((RESULTS / f"{name}.json").read_text())
    return [dict(zip(saved["columns"], row, strict=True)) for row in saved["rows"]]


def cell(page: str, column: str, **wanted: str) -> str:
    """The cell of the only row of ``benchmarks/results/PAGE.md`` whose cells are as wanted.

    Args:
        page: name of the page, without its ending; or a path from the root that has one.
        column: the column of the cell.
        **wanted: cells of the row, by column; ``heading`` is the table's.
    """
    path = RESULTS / f"{page}.md" if not page.endswith(".md") else ROOT / page
    matching = [row for row in rows_of(path) if all(row.get(key) == value for key, value in wanted.items())]
    assert len(matching) == 1, f"{page}: {len(matching)} rows have {wanted}"
    return matching[0][column]
