"""The table of docs/frameworks.md: every cell names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
TEXT = PAGE.read_text()
DEFINED = re.findall(r'^\[(\d+)\]: (\S+) "(\w+)"$', TEXT, re.MULTILINE)


def test_every_cell_is_a_test_that_exists() -> None:
    table = TEXT.split("## What works with what")[1].split("\n1. ")[0]
    rows = [line.strip("| ").split(" | ")[1:] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    cells = [cell for row in rows for cell in row]
    assert len(cells) == 6 * len(rows)
    used = [re.fullmatch(r"–|\[[^\]]+\]\[(\d+)\]", cell) for cell in cells]
    assert all(used), [cell for cell, match in zip(cells, used, strict=True) if not match]
    assert {match[1] for match in used if match and match[1]} == {label for label, _, _ in DEFINED}
    for _, file, test in DEFINED:
        tree = ast.parse((PAGE.parent / file).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, test)


def test_every_example_is_linked() -> None:
    linked = set(re.findall(r"\(\.\./examples/(\w+)\.\w+\)", TEXT))
    assert linked == {path.stem for path in (PAGE.parents[1] / "examples").glob("*.py")}
