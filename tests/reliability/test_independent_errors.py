"""Errors of codecs are independent of each other, uniform where theory says so, and fall as draws are averaged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs import CompandedCodec, LinearCodec
from lightning_gqsgd.codecs.companded.codec import SLOPE
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.choosing import codec_of
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.research.simulation.virtual import VirtualRanks
from tests.reliability.draws import (
    BLOCK,
    CONFIGS,
    FEW_DRAWS,
    NUMEL,
    by_blocks,
    deviations,
    errors_of,
    steps_for,
    structured,
    with_draws,
)

#: Codecs whose receivers take a uniform dither off again.
SUBTRACTIVE = [name for name in CONFIGS if "subtractive" in name or "adaptive" in name]


def fractions(config: GQSGDConfig, x: Tensor, errors: Tensor) -> Tensor:
    """Errors in units of the distance of two levels, from 0 to 1; companded ones on the axis of their levels."""
    codec = codec_of(config)
    if isinstance(codec, LinearCodec):
        return errors / codec.step() + 0.5
    assert isinstance(codec, CompandedCodec)
    middle = (2**codec.bits - 1) / 2
    return _levels(x.double() + errors, middle) - _compressed(x.double(), middle) + 0.5


def _compressed(x: Tensor, middle: float) -> Tensor:
    """y of `codecs.companded`: the root of (s y + y |y|/m)/(1 + s) = m x."""
    root = SLOPE * middle / 2
    return x.sign() * ((root**2 + (1 + SLOPE) * middle**2 * x.abs()).sqrt() - root)


def _levels(decoded: Tensor, middle: float) -> Tensor:
    """z of `codecs.companded`: the inverse of its decoder, which is straight between the numbers k + 1/2."""
    ends = torch.arange(0.5, middle + 1, dtype=torch.float64)  # d(k + 1/2) = (s (k + 1/2) + k (k + 1)/m)/(1 + s)
    heights = (SLOPE * ends + (ends**2 - 0.25) / middle) / (1 + SLOPE)
    value = decoded.abs() * middle
    r = torch.searchsorted(heights, value).double()
    return decoded.sign() * ((1 + SLOPE) * value + r * r / middle) / (SLOPE + 2 * r / middle)


@with_draws(SUBTRACTIVE)
def test_errors_of_subtractive_dither_are_uniform(name: str, draws: int) -> None:
    """The chi-square of errors in 256 bins, on every input."""
    config = GQSGDConfig(**CONFIGS[name])
    for kind, x in structured().items():
        parts = fractions(config, x, errors_of(config, x, steps_for(draws)))
        assert parts.min() > -1e-3
        assert parts.max() < 1 + 1e-3
        counts = torch.histc(parts.clamp(0, 1 - 1e-9), bins=256, min=0, max=1)
        expected = parts.numel() / 256
        chi_square = float(((counts - expected).square() / expected).sum())
        print(f"{name} on {kind}: chi-square of 256 bins {chi_square:.0f}")
        assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255), (name, kind)


def correlations(first: Tensor, other: Tensor) -> tuple[float, float]:
    """Deviations from zero of the correlation of errors, and of their squares.

    Means of each coordinate over its steps are taken off first, so that inputs may have any structure.
    """
    products = []
    for one, two in ((first, other), (first.square(), other.square())):
        products.append(deviations(by_blocks((one - one.mean(0)) * (two - two.mean(0)))))
    return products[0], products[1]


@with_draws([*CONFIGS])
def test_errors_are_independent(name: str, draws: int) -> None:
    """No correlation with another rank, the way back, the next step, another parameter, another seed, or neighbours."""
    config = GQSGDConfig(**CONFIGS[name])
    reseeded = config.replaced(seed=config.seed + 1)
    even, odd = steps_for(draws, stride=2), steps_for(draws, 1, stride=2)
    for kind, x in structured().items():
        first = errors_of(config, x, even, stream=1)
        others = {
            "rank": errors_of(config, x, even, stream=2),
            "way back": errors_of(config, x, even, stream=0),
            "step": errors_of(config, x, odd, stream=1),
            "parameter": errors_of(config, x, even, stream=1, parameter=1),
            "seed": errors_of(reseeded, x, even, stream=1),
            "next block": first.roll(config.block_size, 1),
        }
        if config.codec != "eden":  # its errors in one block depend on each other: they are orthogonal to the block
            others["neighbour"] = first.roll(1, 1)
            others["half a block away"] = first.roll(config.block_size // 2, 1)
        for other, errors in others.items():
            z, squares = correlations(first, errors)
            print(f"{name} on {kind}, {other}: z = {z:+.2f}, of squares {squares:+.2f}")
            assert abs(z) < 5, (name, kind, other)
            assert abs(squares) < 5, (name, kind, other)


def check_share(means: Tensor, variance: float, draws: int) -> None:
    """The errors of means over so many draws have so many times less variance, as far as this sample can tell."""
    excess = by_blocks(means.square() * draws - variance)
    resolution = float(excess.std()) / math.sqrt(excess.numel()) / variance
    print(f"mean of {draws}: {deviations(excess):+.2f} deviations of {100 * resolution:.1f} %")
    assert resolution < 0.1
    assert abs(deviations(excess)) < 5


def check_steps(name: str, draws: int) -> None:
    """Means over 4, 8 and all steps."""
    config, x = GQSGDConfig(**CONFIGS[name]), structured()["uniform"]
    errors = errors_of(config, x, steps_for(draws))
    variance = float(errors.square().mean())
    for size in (4, 8, len(errors)):
        groups = errors[: len(errors) // size * size].view(-1, size, NUMEL)
        check_share(groups.mean(1), variance, size)


def check_ranks(name: str, draws: int) -> None:
    """Means over the messages of ranks that encode the same numbers."""
    config, x = GQSGDConfig(**CONFIGS[name]), structured()["uniform"]
    variance = float(errors_of(config, x, steps_for(draws)).square().mean())
    for ranks in (2, 5, 16):
        check_share(errors_of(config, x, steps_for(draws, 1000), stream=1, ranks=ranks), variance, ranks)


@with_draws([*CONFIGS])
def test_the_error_of_a_mean_falls_as_one_over_the_root_of_its_draws(name: str, draws: int) -> None:
    check_steps(name, draws)
    check_ranks(name, draws)


@pytest.mark.parametrize("ranks", [2, 5, 16])
@pytest.mark.parametrize("dither", ["subtractive", "stochastic"])
def test_the_error_of_a_sum_of_codes_falls_with_its_ranks(dither: str, ranks: int) -> None:
    fields: dict[str, Any] = {"codec": "linear", "dither": dither, "bits": 6, "block_size": BLOCK, "reducer": "sum"}
    x, virtual = structured()["uniform"], VirtualRanks(ranks, [Segment(0, NUMEL, False)], **fields)
    gradients = [x] * ranks
    means = torch.stack([virtual.mean(gradients, step).double() - x.double() for step in steps_for(FEW_DRAWS)])
    variance = codec_of(virtual.config).error_variance(ranks)
    assert float(means.square().mean()) * ranks == pytest.approx(variance, rel=0.05)
