"""The rivals' formulas: errors that are known, and levels that are a table of THC's size."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from benchmarks import rivals
from lightning_gqsgd.research.simulation import relative_error


def gradients(ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(ranks)
    return [torch.randn(1 << 14, generator=generator) for _ in range(ranks)]


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
    xs = gradients(4)
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
