"""The table of presets, on gradients that are too small to say anything."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import accuracy, presets, report
from lightning_gqsgd.presets import FIXED
from lightning_gqsgd.research.theory import bits_at


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(accuracy, "NUMEL", 1 << 14)
    monkeypatch.setattr(presets, "REPEATS", 3)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(presets, "RESULTS", tmp_path)
    monkeypatch.delenv("GQSGD_DATA", raising=False)
    return tmp_path


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["presets.py", *arguments])
    presets.main()


@pytest.mark.slow
def test_table_page_and_figure(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = small / "presets-page.md"
    kinds = ["gaussian", "heavy-tailed"]
    _run(monkeypatch, "--kinds", *kinds, "--ranks", "2", "9", "--save", "--docs", str(page))
    assert "gqsgd_exponential_tree" in capsys.readouterr().out

    facts = json.loads((small / "presets.json").read_text())["facts"]
    assert {one["case"] for one in facts} >= set(FIXED)
    repeated = [one for one in facts if one["steps"] == presets.REPEATS]
    assert {one["case"] for one in repeated} == {case.name for case in presets.cases() if case.remembers}
    assert {one["ranks"] for one in repeated} == {2}
    for one in facts:
        assert one["bound_bits"] == pytest.approx(bits_at(one["error"]), abs=1e-3)
        if one["kind"] == "gaussian" and one["steps"] == 1:
            assert one["error"] > 0.97 * one["bound_error"], one

    text = page.read_text()
    errors = page.with_name(presets.ERRORS).read_text()
    assert presets.COMMAND in text + errors
    for heading in ("## At 8 ranks", "# n = 2\n", "# n = 9\n", f"# n = 2, mean of {presets.REPEATS} steps"):
        assert heading in text + errors, heading
    assert (text + errors).count("| terngrad |") == 3
    assert (small / "presets-page.png").read_bytes().startswith(b"\x89PNG")

    before = page.read_bytes()
    _run(monkeypatch, "--from-results", "--docs", str(page))
    assert page.read_bytes() == before


def test_some_presets_that_are_not_saved_are_printed_without_rows_of_the_stored_ones(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = {"case": "terngrad", "ranks": 2, "kind": "sparse", "steps": 1, "error": 1.0, "bits": 2.0}
    facts = [{**stored, "bound_error": 0.25, "bound_bits": 0.0}]
    (small / "presets.json").write_text(json.dumps({"facts": facts, "images": "digits"}))
    _run(monkeypatch, "--only", "qsgd", "--kinds", "gaussian", "--ranks", "4")
    printed = capsys.readouterr().out
    assert "qsgd 2 bit" in printed
    assert "terngrad" not in printed
    assert "sparse" not in printed
    assert {line.split()[-5] for line in printed.splitlines() if line.startswith("  qsgd")} == {"4"}


def test_a_preset_that_cannot_sum_so_many_ranks_is_a_dash(small: Path) -> None:
    case = presets.Case("gqsgd_sum 2 bit", "gqsgd_sum", {"bits": 2})
    data = presets.synthetic("gaussian", 4)
    assert list(presets.errors(case, data.ranks, data.segments)) == []


@pytest.mark.parametrize("make", [presets.resnet, presets.transformer])
@pytest.mark.slow
def test_real_gradients_differ_between_ranks_and_change_with_training(small: Path, make: Callable[..., Any]) -> None:
    new, later = presets.trained(make, 0, 2), presets.trained(make, 1, 2)
    for data in (new, later):
        assert sum(one.numel for one in data.segments) == data.ranks[0].numel() > 200_000
        assert not data.ranks[0].equal(data.ranks[1])
    assert not new.ranks[0].equal(later.ranks[0])
    assert any(one.raw for one in new.segments)
    assert next(presets.errors(presets.cases()[0], new.ranks, new.segments))[1] < 0.05
