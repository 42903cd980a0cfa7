"""The tables of benchmarks/results, as figures quoted elsewhere need them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

#: A row: its cells by their columns, and under "heading" the latest heading before the table.
Row = dict[str, str]


@cache
def rows_of(page: Path) -> tuple[Row, ...]:
    """All rows of all tables of a Markdown page, in order."""
    rows: list[Row] = []
    heading, columns = "", []
    for line in page.read_text().splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if not columns:
                columns = cells
            elif not re.fullmatch(r"[\s:-]*", "".join(cells)):
                rows.append({"heading": heading, **dict(zip(columns, cells, strict=True))})
            continue
        columns = []
        if line.startswith("#") or re.fullmatch(r"\S.{0,40}:", line):  # some tables are introduced by a short line
            heading = line.strip("# :")
    return tuple(rows)


def cell(page: str, column: str, **wanted: str) -> str:
    """The cell of the only row of ``benchmarks/results/PAGE.md`` whose cells are as wanted.

    Args:
        page: name of the page, without its ending; or a path from the root that has one.
        column: the column of the cell.
        **wanted: cells of the row, by column; ``heading`` is the table's.
    """
    path = RESULTS / f"{page}.md" if not page.endswith(".md") else RESULTS.parents[1] / page
    matching = [row for row in rows_of(path) if all(row.get(key) == value for key, value in wanted.items())]
    assert len(matching) == 1, f"{page}: {len(matching)} rows have {wanted}"
    return matching[0][column]
