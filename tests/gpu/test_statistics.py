"""Bias and variance of the codecs on a GPU, as `tests.statistics` has them on the CPU."""

from __future__ import annotations

import pytest

from lightning_gqsgd.codecs import ExponentialCodec
from tests.gpu.card import DEVICE, marks
from tests.statistics.codecs import (
    BLOCK,
    REPEATS,
    check_linear,
    check_unbiased,
    errors_of,
    uniform_blocks,
    without_scales,
)

pytestmark = marks


@pytest.mark.parametrize("dither", ["subtractive", "stochastic"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_linear_codes_are_unbiased_with_the_variance_of_theory(bits: int, dither: str) -> None:
    check_linear(bits, dither, DEVICE)


@pytest.mark.parametrize(("bits", "mantissa"), [(4, 0), (8, 0), (8, 3)])
def test_exponential_codes_are_unbiased_and_within_their_bound(bits: int, mantissa: int) -> None:
    codec, x = ExponentialCodec(bits, mantissa), uniform_blocks(DEVICE)
    errors = without_scales(errors_of(codec, x))
    check_unbiased(errors, float(errors.square().mean().sqrt()))
    error = float(errors.square().sum()) / REPEATS / float(x.double().square().sum())
    bound = codec.omega(BLOCK)
    assert error < bound, f"E|Q(x) - x|^2 is {error:.3g} |x|^2, more than omega = {bound:.3g}"
