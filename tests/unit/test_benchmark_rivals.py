"""The rivals' formulas: errors that are known, and levels that are a table of THC's size."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch

from benchmarks import rivals
from benchmarks.report import RESULTS
from lightning_gqsgd.research.simulation import relative_error
from tests.unit.test_scatter import gaussian


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("torch fp16 hook", 2e-4, 1e-3),
        ("torch bf16 hook", 1e-3, 6e-3),
        ("torch per-tensor hook", 7e-3, 1.2e-2),
        ("torch per-channel hook", 5e-3, 9e-3),
        ("FP8, blocks of 1024", 0.03, 0.045),
        ("max-min 4 bit", 0.13, 0.2),
        ("THC", 0.12, 0.16),
    ],
)
def test_error_on_gaussian_gradients(name: str, low: float, high: float) -> None:
    (rival,) = [rival for rival in rivals.RIVALS if rival.name == name]
    xs = gaussian(4, 1 << 14)
    error = relative_error(rival.mean(xs, torch.Generator().manual_seed(0)).double(), xs)
    assert low < error < high


def test_thcs_table_has_16_of_31_points_that_lie_denser_in_the_middle() -> None:
    levels = rivals.thc_levels()
    assert len(levels) == 2**rivals.THC_BITS
    assert (levels[0], levels[-1]) == (0, rivals.THC_GRID)
    gaps = [high - low for low, high in pairwise(levels)]
    assert min(gaps) == min(gaps[5:10]) < max(gaps[0], gaps[-1])


def test_zeros_stay_zeros() -> None:
    xs = [torch.zeros(5000)] * 2
    for rival in rivals.RIVALS:
        assert not rival.mean(xs, torch.Generator().manual_seed(0)).any(), rival.name


def test_the_page_says_where_a_rival_wins_as_its_rows_do() -> None:
    rows = json.loads((RESULTS / "rivals.json").read_text())["rows"]
    page = (RESULTS / "rivals.md").read_text()
    for ranks in dict.fromkeys(row[1] for row in rows):
        assert rivals.in_words(rows, ranks) in page


def test_a_rival_wins_where_its_error_is_smaller_at_as_many_bits() -> None:
    mine = ["gqsgd_4bit", 8, 4.125, 0.125, 10.0, 10.0, 10.0, 10.0, 0.25]
    near = ["near", 8, 4.0, 0.25, 11.0, 9.0, 11.0, 11.0, 1.0]
    wider = ["wider", 8, 8.0, 0.25, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rivals.in_words([mine, near, wider], 8) == (
        "Where a rival wins, n = 8: `near` beats `gqsgd_4bit` on heavy-tailed 9.00 % against 10.00 %, and sends 2.0 "
        "times as much."
    )
    assert "no rival has a smaller error" in rivals.in_words([mine, wider], 8)
