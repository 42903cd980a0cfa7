"""Every configuration gives the bits that it gave before: see `tests.golden.cases`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.golden.cases import FILE, cases, digest

EXPECTED = json.loads(FILE.read_text())


@pytest.mark.parametrize(("name", "ranks", "fields"), list(cases()), ids=[name for name, _, _ in cases()])
def test_results_are_those_of_before(name: str, ranks: int, fields: dict[str, Any]) -> None:
    assert digest(ranks, fields) == EXPECTED[name]
