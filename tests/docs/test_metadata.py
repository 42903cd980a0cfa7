"""What several files say of the package: its version, its date, and what the first page of the site is called."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from lightning_gqsgd import __version__

ROOT = Path(__file__).resolve().parents[2]
CITATION: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_citation_is_of_this_version() -> None:
    assert CITATION["version"] == __version__


def test_the_citation_has_the_date_that_the_changelog_has_for_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    heading = re.search(rf"^## {re.escape(__version__)}(?: - (\d{{4}}-\d\d-\d\d))?$", changelog, re.MULTILINE)
    assert heading, f"CHANGELOG.md has no heading of version {__version__}"
    released = CITATION.get("date-released")
    assert (None if released is None else str(released)) == heading[1]


def test_every_python_that_is_named_is_allowed() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    named = [int(minor) for minor in re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', text)]
    assert re.search(r'requires-python = ">=3\.(\d+)"', text)[1] == str(min(named))  # type: ignore[index]
    assert named == list(range(min(named), max(named) + 1))


def test_the_first_page_is_named_after_the_package_and_ends_with_its_version() -> None:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "_site" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    index = (ROOT / "docs" / "index.md").read_text()
    page: Any = SimpleNamespace(file=SimpleNamespace(generated_by=None, src_uri="index.md"))
    lines = hooks.on_page_markdown(index, page, None, None).rstrip().split("\n")
    assert lines[0] == "# lightning-gqsgd"
    assert lines[-1] == f"This page is of version {__version__}."
    assert [line for line in lines[:-1] if __version__ in line] == []
