"""The grid of relative differences: what decides in it, and what Adam makes of noise in rows that nobody touches."""

from __future__ import annotations

import pytest

from benchmarks import tolerance


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tolerance, "SIZES", (512,))
    monkeypatch.setattr(tolerance, "RANKS", (2,))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("name", "keeps_zeros"),
    [("companded, subtractive", False), ("linear, stochastic", True), ("companded, stochastic from any zero", True)],
)
def test_a_case_with_a_mean_of_zero_passes_if_zeros_stay_zeros(name: str, keeps_zeros: bool) -> None:
    found = tolerance.outcomes({"bits": 8, **tolerance.DITHERS[name]})
    assert len(found) == len(tolerance.INPUTS) * len(tolerance.DTYPES)
    zeros = [each for each in found if each.inputs in ("ramp from 0", "half zeros", "95 % zeros")]
    assert all(each.zeros for each in zeros)
    assert {each.difference <= tolerance.LIMIT for each in zeros} == {keeps_zeros}
    assert all(each.elsewhere <= tolerance.LIMIT for each in zeros)


@pytest.mark.parametrize(("name", "moves"), [("companded, subtractive", True), ("linear, stochastic", False)])
def test_adam_moves_rows_whose_gradient_is_noise(name: str, moves: bool) -> None:
    (ending,) = tolerance.adam(8, {"bits": 4, **tolerance.DITHERS[name]}, seeds=1, steps=3)
    assert (ending.moved > 0) is moves
    assert (ending.far > 0) is moves


def test_an_exact_mean_moves_no_row_that_nobody_touches() -> None:
    (ending,) = tolerance.adam(8, None, seeds=1, steps=3)
    assert (ending.moved, ending.far) == (0, 0)
    assert 0 < ending.touched < 3
