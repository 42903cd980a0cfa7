"""Lengths of codes, and lower bounds on them, against codes and sources written out in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_gqsgd.research import theory
from tests.unit.test_theory import Array, round_linear

# Bits


def test_sums_fit_their_bits() -> None:
    for levels in range(1, 40):
        for ranks in range(1, 40):
            bits = theory.sum_bits_linear(levels, ranks)
            needed = math.ceil(math.log2(2 * levels * ranks + 1))
            assert needed <= bits <= needed + 1
            codes = levels + 1 + math.ceil(math.log2(ranks))
            assert 2 ** (theory.sum_bits_exponential(levels, ranks) - 2) < codes
            assert codes <= 2 ** (theory.sum_bits_exponential(levels, ranks) - 1)
    assert [theory.sum_bits_linear(127, n) for n in (1, 4, 64)] == [8, 10, 14]
    assert [theory.sum_bits_exponential(7, n) for n in (1, 2, 64, 1024)] == [4, 5, 5, 6]


def elias_bits(values: Array) -> int:
    """Length of the Elias omega codes of positive integers: 1, plus those of k, floor(log2 k), ... while above 1."""
    total, left = len(values), values[values > 1]
    while len(left):
        length = np.floor(np.log2(left)).astype(int) + 1
        total += int(length.sum())
        left = (length - 1)[length > 2]
    return total


@pytest.mark.parametrize("levels", [1, 4, 16, 64])
def test_elias_code_of_a_block_is_within_its_bound(levels: int) -> None:
    assert [elias_bits(np.array([k])) for k in (1, 2, 3, 4, 8, 16, 100)] == [1, 3, 3, 6, 7, 11, 13]
    rng = np.random.default_rng(0)
    x = rng.standard_normal(4096) ** 3
    bits = []
    for _ in range(20):
        codes = round_linear(x, float(np.linalg.norm(x)), levels, rng) * levels / np.linalg.norm(x)
        codes = np.abs(np.rint(codes)).astype(int)
        places = np.flatnonzero(codes)
        bits.append(32 + elias_bits(np.diff(places, prepend=-1)) + elias_bits(codes[places]) + len(places))
    bound = theory.elias_bits_bound(4096, levels)
    assert np.mean(bits) < bound
    if levels == 64:
        assert bound == pytest.approx(9 * 4096 + 32)


# Lower bounds

CASES = [(1, 1.0, 0.5), (10, 1.0, 1.0), (4, 3.0, 0.2), (64, 0.1, 5.0)]


@pytest.mark.parametrize(("ranks", "signal", "noise"), CASES)
def test_ceo_rate_is_the_information_of_normal_messages(ranks: int, signal: float, noise: float) -> None:
    """½ log2 of the determinants of the messages' covariance with and without the gradients known."""
    for error in (0.01, 0.3, 4.0):
        covariance = signal * np.ones((ranks, ranks)) + (noise + error) * np.eye(ranks)
        rate = (np.linalg.slogdet(covariance)[1] - ranks * math.log(error)) / math.log(4)
        distortion = signal - signal**2 * np.linalg.solve(covariance, np.ones(ranks)).sum()
        assert theory.ceo_rate(distortion, ranks, signal, noise) == pytest.approx(rate, rel=1e-6)
        alone = ranks / 2 * math.log2(1 + (signal + noise) / error)
        assert theory.independent_rate(distortion, ranks, signal, noise) == pytest.approx(alone, rel=1e-6)
        assert rate < alone or ranks == 1


@pytest.mark.parametrize(("ranks", "signal", "noise"), [*CASES, (3, 2.0, 0.0)])
def test_distortion_of_rate_is_the_inverse(ranks: int, signal: float, noise: float) -> None:
    before = signal
    for bits in (0.01, 0.5, 3.0, 20.0):
        distortion = theory.distortion_of_rate(bits, ranks, signal, noise)
        assert distortion < before
        assert theory.ceo_rate(distortion, ranks, signal, noise) == pytest.approx(bits, rel=1e-6)
        before = distortion
    assert theory.distortion_of_rate(0, ranks, signal, noise) == signal
    least = 1 / (1 / signal + ranks / noise) if noise else 0.0
    assert theory.distortion_of_rate(1e5, ranks, signal, noise) == pytest.approx(least, rel=1e-9)


def test_ceo_rate_without_noise_is_that_of_one_source() -> None:
    for ranks in (1, 7):
        assert theory.ceo_rate(0.25, ranks, 4.0, 0.0) == pytest.approx(2)
        assert theory.ceo_rate(1e-300, ranks, 4.0, 0.0) == pytest.approx(math.log2(4e300) / 2)
    assert theory.independent_rate(0.25, 1, 4.0, 0.0) == pytest.approx(2)
    # No message is needed from the variance of the gradient on.
    assert theory.ceo_rate(4.0, 3, 4.0, 1.0) == theory.independent_rate(4.0, 3, 4.0, 1.0) == 0
    assert theory.ceo_rate(9.0, 3, 4.0, 1.0) == 0


def entropy(codes: Array) -> float:
    counts = np.unique(codes, return_counts=True)[1] / codes.size
    return float(-(counts * np.log2(counts)).sum())


def test_dithered_codes_lie_above_both_rates() -> None:
    """n = 10, variances 1 and 1, D = 0.109: the bound 13.9 bits, alone 16.6, dithered codes 19.1 and 19.8."""
    ranks, distortion = 10, 0.109
    bound = theory.ceo_rate(distortion, ranks, 1.0, 1.0)
    alone = theory.independent_rate(distortion, ranks, 1.0, 1.0)
    assert bound == pytest.approx(13.87, abs=0.01)
    assert alone == pytest.approx(16.58, abs=0.01)

    rng = np.random.default_rng(0)
    error = ranks / (1 / distortion - 1) - 1  # of a message, as in the bound; that of dithered codes is step²/12
    step = math.sqrt(12 * error)
    truth = rng.standard_normal(100_000)
    y = truth + rng.standard_normal((ranks, truth.size))
    u = np.floor(rng.random(y.shape) * 64) / 64  # 64 dithers, for a coder that knows which one it is
    codes = np.rint(y / step + u)
    mean = ((codes - u) * step).mean(0)
    weight = mean @ truth / (mean @ mean)
    measured = float(((weight * mean - truth) ** 2).mean())
    assert measured == pytest.approx(distortion, rel=0.02)

    blind = ranks * entropy(codes)
    aware = ranks * float(np.mean([entropy(codes[u == one]) for one in np.unique(u)]))
    assert bound < alone < aware < blind
    assert aware - alone < ranks * math.log2(2 * math.pi * math.e / 12) / 2 + 0.05
    assert blind == pytest.approx(19.8, abs=0.1)
    assert theory.gap(blind / ranks, measured, ranks, 1.0, 1.0) == pytest.approx((19.8 - 13.87) / 10, abs=0.03)


def test_gap_counts_bits_of_one_rank() -> None:
    total = theory.ceo_rate(0.2, 8, 1.0, 0.5)
    assert theory.gap(total / 8, 0.2, 8, 1.0, 0.5) == pytest.approx(0, abs=1e-12)
    assert theory.gap(total / 8 + 3, 0.2, 8, 1.0, 0.5) == pytest.approx(3)


def test_bits_at_is_below_entropy_coded_levels_of_every_mean() -> None:
    """Each rank's entropy is above the bound at the mean's error, by ½ log2(2πe/12) = 0.254 at fine steps."""
    rng = np.random.default_rng(0)
    for ranks in (1, 8):
        x = rng.standard_normal((ranks, 200_000))
        for step in (0.25, 1.0, 2.0):
            codes = np.rint(x / step)
            error = np.linalg.norm((codes * step - x).mean(0)) / np.linalg.norm(x.mean(0))
            excess = entropy(codes) - theory.bits_at(float(error))
            assert 0 < excess < (0.28 if step < 1 else 0.5)
            # The mean, rounded again at the same cost, takes about half a bit more.
            mean = (codes * step).mean(0)
            second = np.rint(mean * math.sqrt(ranks) / step) * step / math.sqrt(ranks)
            error = np.linalg.norm(second - x.mean(0)) / np.linalg.norm(x.mean(0))
            assert min(entropy(codes), entropy(second)) > theory.bits_at(float(error))
            if ranks > 1 and step < 1:
                assert entropy(codes) - theory.bits_at(float(error)) == pytest.approx(excess + 0.5, abs=0.05)


def test_rate_distortion_of_known_cases() -> None:
    assert theory.rate_distortion(1 / 16) == 2
    assert theory.bits_at(1 / 16) == 4
    assert theory.bits_at(0.1) == pytest.approx(theory.rate_distortion(0.01))
    assert theory.bits_at(1) == theory.bits_at(1.5) == theory.rate_distortion(7) == 0
