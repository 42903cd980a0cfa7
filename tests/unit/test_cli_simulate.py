"""``gqsgd simulate``."""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest

from lightning_gqsgd import simulate
from lightning_gqsgd.cli.simulating import DEFAULT_PRESETS, PROBLEMS
from tests.commands import output_of, refusal

_run = partial(output_of, "simulate")


def test_rows_are_what_simulate_returns() -> None:
    output = _run("gqsgd_4bit", "ddp", "--workers", "3", "--steps", "7", "--lr", "0.05", "--json")
    rows = json.loads(output)
    assert [row["preset"] for row in rows] == ["gqsgd_4bit", "ddp"]
    for row in rows:
        problem = PROBLEMS["least_squares"]()
        record = simulate(row["preset"], problem, workers=3, steps=7, lr=0.05, progress=False)
        assert row["loss"] == record.loss[-1]
        assert row["megabytes_sent"] == record.bytes_sent[-1] / 1e6
        assert row["bits"] == record.wire_bits[-1]
        assert row["relative_error"] == record.relative_error[-1]


def test_the_table_has_a_line_for_each_preset() -> None:
    output = _run("--workers", "2", "--steps", "2", "--problem", "logistic")
    lines = output.splitlines()
    assert lines[0] == "logistic, 2 virtual workers, 2 steps of SGD"
    assert [line.split()[0] for line in lines[4 : 4 + len(DEFAULT_PRESETS)]] == [*DEFAULT_PRESETS]


def test_bits_that_are_padding_are_explained() -> None:
    assert "least_squares has 256 parameters. Messages of most presets are padded" in _run("gqsgd", "--steps", "2")
    assert "padded" not in _run("gqsgd", "--steps", "2", "--problem", "digits")


def test_a_run_that_diverges_is_said_to() -> None:
    output = _run("ddp", "--steps", "200", "--lr", "1e6")
    assert "diverged" in output
    (found,) = json.loads(_run("ddp", "--steps", "1000", "--lr", "1e6", "--json"))
    assert found == {"preset": "ddp", **dict.fromkeys(("loss", "bits", "megabytes_sent", "relative_error"))}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gqsgd_9bit"], "unknown preset 'gqsgd_9bit'"),
        (["--problem", "chess"], "--problem='chess' is not one of 'least_squares', 'logistic', 'digits'"),
        (["gqsgd_auto"], "gqsgd: "),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(arguments: list[str], words: str) -> None:
    assert words in refusal("simulate", *arguments)


def test_a_problem_whose_package_is_missing_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    line = refusal("simulate", "gqsgd", "--problem", "digits")
    assert "pip install scikit-learn, or take the problem least_squares" in line
