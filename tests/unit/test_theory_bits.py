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


def entropy(codes: Array) -> float:
    counts = np.unique(codes, return_counts=True)[1] / codes.size
    return float(-(counts * np.log2(counts)).sum())


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


def test_bits_at_of_known_errors() -> None:
    assert theory.bits_at(1 / 16) == 4
    assert theory.bits_at(1) == theory.bits_at(1.5) == 0
