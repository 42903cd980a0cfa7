"""``gqsgd systems check``: claims beside measurements, and an exit code that says whether they hold."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from typer.testing import CliRunner

from lightning_gqsgd.cli import checking
from lightning_gqsgd.cli.app import app
from lightning_gqsgd.presets import FIXED, LOCAL_PRESETS
from lightning_gqsgd.research.experiments import EXPERIMENTS, Row, source_of
from lightning_gqsgd.research.systems import SYSTEMS
from tests.commands import output_of, refusal

#: Systems whose experiments take a second or less.
QUICK = (
    "global_qsgd_linear",
    "global_qsgd_exponential",
    "natural_compression",
    "natural_dithering",
    "qsgd_elias",
    "wyner_ziv",
    "s2_reducer",
)


def test_every_system_has_an_experiment() -> None:
    assert sorted(EXPERIMENTS) == sorted([*FIXED, *LOCAL_PRESETS, *SYSTEMS])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in EXPERIMENTS]
)
def test_what_a_system_claims_holds(name: str) -> None:
    rows = list(EXPERIMENTS[name]())
    assert len(rows) > 1
    assert [row for row in rows if not row.holds] == []


def test_claims_measurements_and_sources_are_printed() -> None:
    output = output_of("systems", "check", "wyner_ziv", "natural_compression")
    lines = output.splitlines()
    assert lines[2].split() == ["system", "claim", "measured", "holds", "source"]
    (line,) = (line for line in lines if line.split()[:1] == ["natural_compression"])
    assert line.split()[-5:-4] == ["Horváth"] or source_of("natural_compression") in line
    assert " ω ≤ 1/8 " in output
    assert "5 of 5 claims hold" in output


def _of_numpy() -> Iterator[Row]:
    yield Row("1 is below 2", "1", np.float64(1) < np.float64(2))


def test_a_verdict_of_numpy_is_written_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checking.EXPERIMENTS, "qsgd", _of_numpy)
    assert json.loads(output_of("systems", "check", "qsgd", "--json"))[0]["rows"][0]["holds"] is True


def _failing() -> Iterator[Row]:
    yield Row("1 is 1", "1", True)
    yield Row("1 is 2", "1", False)


def test_a_claim_that_does_not_hold_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checking.EXPERIMENTS, "qsgd", _failing)
    runner = CliRunner()
    result = runner.invoke(app, ["systems", "check", "qsgd"])
    assert result.exit_code == 1
    assert "1 of 2 claims hold" in result.stdout
    assert "not all of: qsgd" in result.stdout
    result = runner.invoke(app, ["systems", "check", "qsgd", "--json"])
    assert result.exit_code == 1
    (entry,) = json.loads(result.stdout)
    assert (entry["system"], entry["holds"]) == ("qsgd", False)
    assert entry["rows"][1] == {"claim": "1 is 2", "measured": "1", "holds": False}
    assert entry["source"] == source_of("qsgd")


@pytest.mark.parametrize(
    ("name", "message"),
    [("qsdg", "did you mean 'qsgd'"), ("gqsgd_auto", "chooses bits by the length of steps")],
)
def test_a_name_without_an_experiment_is_refused_in_one_line(name: str, message: str) -> None:
    assert message in refusal("systems", "check", name)


def test_a_new_preset_without_an_experiment_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(checking.EXPERIMENTS, "qsgd")
    message = "'qsgd' has no experiment yet; add a function for it to lightning_gqsgd/research/experiments"
    assert message in refusal("systems", "check", "qsgd")
