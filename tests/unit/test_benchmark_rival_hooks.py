"""Rivals' messages: their lengths, what comes back, and the tables that they are read with."""

from __future__ import annotations

import pytest
import torch

from benchmarks import rivals
from benchmarks.rival_hooks import BlockwiseCodes, Codes, MaxMinCodes, RowCodes, UniformCodes, dynamic_levels, mean_of
from lightning_gqsgd.research.simulation import relative_error
from tests.unit.test_scatter import gaussian

#: Codes, bits of a message per coordinate at 200,000 normal numbers, and the range of one mean's error.
CODES: list[tuple[Codes, float, float, float]] = [
    (RowCodes(torch.float8_e4m3fn), 8.06, 0.03, 0.045),
    (RowCodes(torch.int8), 8.06, 0.015, 0.03),
    (UniformCodes(), 8.09, 0.005, 0.05),
    (BlockwiseCodes(), 8.03, 0.005, 0.03),
    (MaxMinCodes(), 4.14, 0.13, 0.2),
]


@pytest.mark.parametrize(("codes", "bits", "low", "high"), CODES)
def test_messages_have_their_length_and_their_mean_its_error(
    codes: Codes, bits: float, low: float, high: float
) -> None:
    xs = gaussian(2, 200_000)
    messages = [codes.encode(x) for x in xs]
    assert 8 * messages[0].numel() / xs[0].numel() == pytest.approx(bits, rel=0.01)
    assert low < relative_error(mean_of(codes, messages, xs[0].numel()), xs) < high


@pytest.mark.parametrize("codes", [each[0] for each in CODES])
@pytest.mark.parametrize("numel", [1, 513, 5000])
def test_zeros_stay_zeros_at_any_length(codes: Codes, numel: int) -> None:
    decoded = codes.decode(codes.encode(torch.zeros(numel)), numel)
    assert decoded.shape == (numel,)
    assert not decoded.any()


def test_packed_codes_say_what_the_formula_of_the_other_table_says() -> None:
    (x,) = gaussian(1, 4096)
    codes = MaxMinCodes()
    assert torch.equal(codes.decode(codes.encode(x), 4096), rivals.max_min(x, 512, 4))


def test_dynamic_numbers_are_256_and_lie_denser_near_zero() -> None:
    levels = dynamic_levels()
    assert len(levels.unique()) == 256
    assert float(levels.max()) == 1
    assert levels.diff().min() < 1e-6 < 1e-3 < levels.diff().max()
