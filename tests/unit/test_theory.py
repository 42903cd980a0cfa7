"""Constants and bounds against quantisers written out in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.research import theory

Array = np.ndarray


def exact_variance(y: Array, levels: Array) -> Array:
    """Variance of stochastic rounding of 0 <= y <= 1 to ascending ``levels``: (y - below)(above - y)."""
    above = np.clip(np.searchsorted(levels, y), 1, len(levels) - 1)
    return (y - levels[above - 1]) * (levels[above] - y)


def round_linear(x: Array, scale: float, levels: int, rng: np.random.Generator) -> Array:
    return np.floor(x / scale * levels + rng.random(x.shape)) * scale / levels


def exponential_levels(levels: int, mantissa: int) -> Array:
    """0 and the ``levels`` largest of all 2^-k (1 + j/2^m) up to 1, ascending."""
    steps = 2**mantissa
    values = {1.0} | {2.0**-k * (1 + j / steps) for k in range(1, levels + 1) for j in range(steps)}
    return np.array([0.0, *sorted(values)[-levels:]])


def round_exponential(x: Array, rng: np.random.Generator) -> Array:
    """Stochastic rounding to signed powers of two, without a smallest one."""
    power = 2.0 ** np.floor(np.log2(np.abs(np.where(x == 0, 1, x))))
    return np.sign(x) * power * np.where(rng.random(x.shape) < np.abs(x) / power - 1, 2, 1)


def vectors(rng: np.random.Generator, dimension: int) -> list[Array]:
    """Dense, heavy-tailed, sparse, flat and one-hot ones, and two that are hard for coarse levels."""
    return [
        rng.standard_normal(dimension),
        rng.standard_normal(dimension) ** 5,
        rng.standard_normal(dimension) * (rng.random(dimension) < 0.1) + np.eye(dimension)[1],
        np.ones(dimension),
        np.eye(dimension)[0],
        np.where(np.arange(dimension) == 0, 1.0, 0.5),
        np.where(np.arange(dimension) == 0, 1.0, dimension**-0.5),
    ]


def norms(x: Array) -> list[float]:
    return [float(np.abs(x).max()), float((x**4).sum() ** 0.25), float(np.linalg.norm(x))]


# One quantiser


@pytest.mark.parametrize("levels", [1, 2, 7, 127])
@pytest.mark.parametrize("dimension", [2, 64, 4096])
def test_linear_variance_is_within_omega_under_every_norm_from_max_to_l2(dimension: int, levels: int) -> None:
    grid = np.arange(levels + 1) / levels
    omega = theory.omega_linear(dimension, levels)
    for x in vectors(np.random.default_rng(0), dimension):
        for scale in norms(x):
            variance = exact_variance(np.abs(x) / scale, grid).sum() * scale**2
            assert variance <= omega * (x @ x) * (1 + 1e-9)


def test_linear_omega_is_attained() -> None:
    for levels in (1, 3, 8):
        dimension = 4 * levels**2
        y = np.full(dimension, 1 / (2 * levels))  # halfway between levels, and of norm 1
        assert y @ y == pytest.approx(1)
        attained = exact_variance(y, np.arange(levels + 1) / levels).sum()
        assert attained == pytest.approx(theory.omega_linear(dimension, levels)) == pytest.approx(1)
    assert theory.omega_linear(4096, 1) == 64  # the other term
    # QSGD's d/s² is four times as large.
    assert theory.omega_linear(100, 10) == pytest.approx(0.25)


def test_subtractive_omega_is_the_error_of_a_spike() -> None:
    rng = np.random.default_rng(0)
    for levels in (2, 5, 16):
        y = np.eye(256)[0] * (levels - 1) / 2  # in steps; the maximum is the last level
        u = rng.random((2000, 256)) - 0.5
        codes = np.rint(y + u + (levels - 1) / 2)
        errors = ((codes - (levels - 1) / 2 - u - y) ** 2).sum(1) / (y @ y)
        assert errors.mean() == pytest.approx(theory.omega_subtractive(256, levels), rel=0.01)
    assert theory.omega_subtractive(3, 2) == 1
    assert theory.omega_subtractive(256, 256) == pytest.approx(256 * (2 / 255) ** 2 / 12)


def round_companded(x: Array, levels: int, slope: float, draws: Array) -> Array:
    """Companded codes under the scale 1, there and back; ``draws``: the dither, uniform on [-1/2, 1/2)."""
    m = (levels - 1) / 2
    y = np.sign(x) * m * (np.sqrt(slope**2 / 4 + (1 + slope) * np.abs(x)) - slope / 2)
    z = np.rint(y + draws) - draws
    knots = np.floor(z) + (z - np.floor(z) >= 0.5) - 0.5  # d is straight between numbers k + 1/2

    def curve(at: Array) -> Array:
        return (slope * at + np.sign(at) * (at * at - 0.25) / m) / (1 + slope) / m

    return curve(knots) + (z - knots) * (curve(knots + 1) - curve(knots))


@pytest.mark.parametrize("levels", [4, 7, 16, 256])
@pytest.mark.parametrize("slope", [0.25, 0.75, 2.0])
def test_companded_error_is_that_of_theory_and_without_bias(levels: int, slope: float) -> None:
    x = np.linspace(0, 1, 100)[:, None]
    draws = (np.arange(20000) + 0.5) / 20000 - 0.5
    errors = round_companded(x, levels, slope, draws) - x
    variances = np.array([theory.variance_companded(float(one), levels, slope) for one in x[:, 0]])
    step = 2 / (levels - 1)
    assert np.abs(errors.mean(1)).max() < 2e-4 * step
    assert np.allclose((errors**2).mean(1), variances, rtol=0.002)
    assert variances.mean() == pytest.approx(theory.mean_variance_companded(0.5, levels, slope), rel=0.03)
    bounds = step**2 / 12 * ((slope / (1 + slope)) ** 2 + 16 / 3 / (1 + slope) * x[:, 0])
    assert (variances <= bounds * (1 + 1e-9)).all()


@pytest.mark.parametrize("dimension", [1, 2, 64, 4096])
def test_companded_variance_is_within_omega(dimension: int) -> None:
    for levels, slope in ((4, 0.75), (16, 0.25), (256, 0.75)):
        omega = theory.omega_companded(dimension, levels, slope)
        rng = np.random.default_rng(0)
        for x in [*vectors(rng, max(dimension, 2)), *(np.eye(dimension)[0] + t for t in (1e-3, 0.01, 0.1))]:
            ratios = (np.abs(x) / np.abs(x).max())[:dimension]
            variance = sum(theory.variance_companded(float(ratio), levels, slope) for ratio in ratios)
            assert variance <= omega * (ratios @ ratios) * (1 + 1e-9) or ratios.max() < 1


@pytest.mark.parametrize("mantissa", [0, 1, 2, 3])
def test_smallest_level_is_the_last_of_the_list(mantissa: int) -> None:
    for levels in range(1, 30):
        assert theory.smallest_level(levels, mantissa) == exponential_levels(levels, mantissa)[1]
    assert theory.smallest_level(1, mantissa) == 1
    assert theory.smallest_level(10**6, mantissa) == 0  # below the smallest float


@pytest.mark.parametrize("mantissa", [0, 1, 3])
@pytest.mark.parametrize("levels", [1, 3, 7, 31])
def test_exponential_variance_is_within_omega(levels: int, mantissa: int) -> None:
    grid = exponential_levels(levels, mantissa)
    for dimension in (2, 64, 4096):
        omega = theory.omega_exponential(dimension, levels, mantissa)
        for x in vectors(np.random.default_rng(0), dimension):
            for scale in norms(x):
                variance = exact_variance(np.abs(x) / scale, grid).sum() * scale**2
                assert variance <= omega * (x @ x) * (1 + 1e-9)


@pytest.mark.parametrize(("mantissa", "worst"), [(0, 1 / 8), (1, 1 / 24), (2, 1 / 80)])
def test_exponential_omega_is_attained_between_two_levels(mantissa: int, worst: float) -> None:
    h = 2.0**-mantissa
    y = np.full(10**5, (1 + h) / (2 + h))  # twice the harmonic mean of 1/2 and (1+h)/2
    y[0] = 1
    attained = exact_variance(y, exponential_levels(80, mantissa)).sum() / (y @ y)
    omega = theory.omega_exponential(10**5, 300, mantissa)
    assert omega == pytest.approx(worst)
    assert 0.999 * omega < attained < omega


# n ranks


def test_shared_scale_has_the_root_of_n_d_and_independent_scales_that_of_d() -> None:
    """A flat gradient under the l2 norm, one level: 12.5 and 1.56 are the bounds."""
    dimension, ranks = 10_000, 64
    x = np.ones((ranks, dimension))
    rng = np.random.default_rng(0)
    measured = {}
    for shared in (True, False):
        scale = float(np.linalg.norm(x if shared else x[0]))
        rounded = [round_linear(x, scale, 1, rng) for _ in range(8)]
        measured[shared] = np.mean([((one.mean(0) - 1) ** 2).sum() for one in rounded]) / dimension
        nonzeros = np.mean([np.count_nonzero(one) for one in rounded])
        bound = theory.expected_nonzeros(dimension, ranks, 1, shared=shared)
        assert 0.97 * bound < nonzeros < bound
    theta = theory.theta_linear(dimension, ranks, 1)
    independent = theory.theta_independent(theory.omega_linear(dimension, 1), ranks)
    assert theta == pytest.approx(12.5)
    assert independent == pytest.approx(1.5625)
    assert measured[True] == pytest.approx((math.sqrt(ranks * dimension) - 1) / ranks, rel=0.02)
    assert measured[False] == pytest.approx((math.sqrt(dimension) - 1) / ranks, rel=0.02)
    assert independent < 0.2 * measured[True]  # QSGD's constant does not bound the shared scale's error
    assert measured[True] < theta


@pytest.mark.parametrize("ranks", [1, 3, 16])
def test_shared_scale_is_within_theta(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    for columns in vectors(rng, 256):
        x = columns * rng.lognormal(0, 1, (ranks, 1))
        squares = (x**2).sum() / ranks
        for scale in norms(x):
            y = np.abs(x) / scale
            linear = exact_variance(y, np.arange(4) / 3).sum() * scale**2 / ranks**2
            assert linear <= theory.theta_linear(256, ranks, 3) * squares * (1 + 1e-9)
            powers = exact_variance(y, exponential_levels(5, 1)).sum() * scale**2 / ranks**2
            assert powers <= theory.theta_exponential(256, ranks, 5, 1) * squares * (1 + 1e-9)


def test_theta_of_known_cases() -> None:
    assert theory.theta_linear(100, 4, 50) == pytest.approx(100 / (4 * 50**2))  # d/(4s²), whatever n
    assert theory.theta_exponential(100, 4, 40) == pytest.approx(1 / 32)
    assert theory.theta_exponential(100, 4, 1) == pytest.approx((1 / 8 + 20) / 4)
    assert theory.theta_two_shot(0.5, 0.25, 2) == 0.25 + 0.25 * 1.25
    assert theory.theta_two_shot(0.5, 0, 2) == theory.theta_independent(0.5, 2)
    assert theory.theta_two_shot(0.5, 0.25, 10**9) == pytest.approx(0.25)  # the mean's own rounding stays


def test_two_shot_error_is_within_theta_and_of_order_one_over_n_for_independent_gradients() -> None:
    rng = np.random.default_rng(0)
    ranks, dimension, levels = 8, 64, 8
    omega = theory.omega_linear(dimension, levels)
    theta = theory.theta_two_shot(omega, omega, ranks)
    shares = {}
    for kind, x in {
        "flat": np.full((ranks, dimension), 0.5 / levels),
        "equal": np.tile(rng.standard_normal(dimension), (ranks, 1)),
        "independent": rng.standard_normal((ranks, dimension)),
    }.items():
        if kind == "flat":
            x[:, 0] = 1.0
        total = 0.0
        for _ in range(400):
            up = np.stack([round_linear(one, np.abs(one).max(), levels, rng) for one in x]).mean(0)
            total += ((round_linear(up, np.abs(up).max(), levels, rng) - x.mean(0)) ** 2).sum() / 400
        squares, mean = (x**2).sum() / ranks, x.mean(0) @ x.mean(0)
        assert total <= (1 + omega) * omega / ranks * squares + omega * mean
        shares[kind] = total / squares / theta
    assert all(share < 1 for share in shares.values())
    assert shares["flat"] > 0.4  # the bound is not idle
    assert shares["independent"] < 0.4 * shares["equal"]


def test_noise_floor_of_sgd_grows_by_the_convergence_factor() -> None:
    """f = |x|²/2 in 64 coordinates, 8 ranks: the floor's ratio is 1 + θn for the θ that the quantiser really has."""
    rng = np.random.default_rng(0)
    ranks, dimension, step, runs = 8, 64, 0.01, 20
    floors = []
    for compressed in (False, True):
        x, floor, own_theta = np.zeros((runs, dimension)), 0.0, 0.0
        for t in range(900):
            g = x[:, None] + rng.standard_normal((runs, ranks, dimension))
            scale = np.linalg.norm(g, axis=-1, keepdims=True)
            q = np.floor(g / scale + rng.random(g.shape)) * scale if compressed else g
            x = x - step * q.mean(1)
            if t >= 300:
                floor += float((x**2).sum(1).mean())
                own_theta += ((q - g) ** 2).sum() / (g**2).sum() / ranks / 600
        floors.append(floor)
    ratio = floors[1] / floors[0]
    theta = theory.theta_independent(theory.omega_linear(dimension, 1), ranks)
    assert ratio == pytest.approx(theory.convergence_factor(own_theta, ranks), rel=0.15)
    assert ratio < theory.convergence_factor(theta, ranks) == 9
    assert theory.convergence_factor(0, 5) == 1


@pytest.mark.parametrize("aligned", [True, False])
def test_tree_of_rounded_sums_is_within_its_second_moment(aligned: bool) -> None:
    rng = np.random.default_rng(0)
    measured = {}
    for ranks in (4, 16, 64):
        x = rng.standard_normal((1 if aligned else ranks, 20_000)) * np.ones((ranks, 1))
        sums = round_exponential(x, rng)
        while len(sums) > 1:
            sums = round_exponential(sums[::2] + sums[1::2], rng)
        measured[ranks] = ((sums[0] / ranks - x.mean(0)) ** 2).sum() / ((x**2).sum() / ranks)
        assert 0.25 < measured[ranks] / theory.tree_second_moment(ranks, aligned) < 1
    if aligned:  # more ranks do not help, unlike in the claim that each level multiplies the variance by 9/8
        assert measured[64] > 0.9 * measured[4]
        assert 64 * measured[64] > 10 * (9 / 8) ** 6 / 8
    else:
        assert measured[64] < 0.3 * measured[4]


def test_tree_of_known_cases() -> None:
    r = 1 / 8
    assert theory.tree_second_moment(1, True) == theory.tree_second_moment(1, False) == pytest.approx(r)
    assert theory.tree_second_moment(2, True) == pytest.approx((1 + r) * r / 2 + r)
    assert theory.tree_second_moment(2**40, True) == pytest.approx(2 * r / (1 - r)) == pytest.approx(2 / 7)
    assert 16 * theory.tree_second_moment(16, False) == pytest.approx((9 / 8) ** 5 - 1)
    assert theory.tree_second_moment(64, True, 3) < theory.tree_second_moment(64, True, 2) / 3.5


@pytest.mark.parametrize("exponential", [True, False])
@pytest.mark.parametrize("levels", [1, 3, 6])
def test_nonzeros_are_within_their_bound(levels: int, exponential: bool) -> None:
    grid = exponential_levels(levels, 0) if exponential else np.arange(levels + 1) / levels
    rng = np.random.default_rng(0)
    for columns in vectors(rng, 1024):
        x = columns * rng.lognormal(0, 1, (4, 1))
        for shared in (True, False):
            y = np.abs(x) / np.linalg.norm(x, axis=None if shared else 1, keepdims=True)
            expected = np.minimum(y / grid[1], 1).sum()
            bound = theory.expected_nonzeros(1024, 4, levels, shared=shared, exponential=exponential)
            assert expected <= bound <= 4096


def test_nonzeros_of_known_cases() -> None:
    assert theory.expected_nonzeros(10_000, 64, 1, shared=True) == pytest.approx(801)
    assert theory.expected_nonzeros(10_000, 64, 1, shared=False) == pytest.approx(6464)
    assert theory.expected_nonzeros(10_000, 64, 3, shared=True, exponential=True) == pytest.approx(16 + 4 * 800)
    assert theory.expected_nonzeros(10_000, 64, 3, shared=False, exponential=True) == pytest.approx(64 * (16 + 400))
    assert theory.expected_nonzeros(100, 2, 10**6, shared=True, exponential=True) == 200  # no more than there are
    assert theory.expected_nonzeros(100, 1, 9, shared=True) == 100
    # With sqrt(n) as many levels, a shared norm has as many non-zeros as norms of the ranks' own.
    assert theory.expected_nonzeros(10_000, 64, 8, shared=True) == pytest.approx(6464)


# Memory


def test_memory_grows_by_the_stability_factor() -> None:
    """Flat memories under the l2 norm, whose error is (sqrt(d) - 1)|x|²: one step of h' = βh - Q(αh)."""
    rng = np.random.default_rng(0)
    h = np.ones((4000, 64))
    for alpha, beta in ((1.0, 1.0), (0.125, 1.0), (0.3, 0.9), (0.5, 0.2)):
        q = alpha * np.floor(h / 8 + rng.random(h.shape)) * 8
        growth = ((beta * h - q) ** 2).sum() / (h**2).sum()
        assert growth == pytest.approx(theory.stability(alpha, beta, 7.0), rel=0.03)


def test_best_alpha_has_the_smallest_factor() -> None:
    assert theory.best_alpha(1.0, 4.0) == pytest.approx(0.2)
    assert theory.stability(1.0, 1.0, 4.0) == 4  # classic error feedback
    for beta in (0.5, 1.0):
        for omega in (0.0, 0.3, 4.0, 100.0):
            best = theory.stability(theory.best_alpha(beta, omega), beta, omega)
            assert best == pytest.approx(beta**2 * omega / (1 + omega))
            assert best < 1
            assert all(best <= theory.stability(a, beta, omega) + 1e-12 for a in np.linspace(0, 1, 101).tolist())


# All


def test_constants_move_in_the_right_direction() -> None:
    def falling(values: list[float]) -> bool:
        return all(b < a for a, b in zip(values, values[1:], strict=False))

    counts = [1, 2, 4, 16, 64]
    assert falling([theory.omega_linear(256, s) for s in counts])
    assert falling([theory.omega_subtractive(256, 1 + s) for s in counts])
    assert falling([theory.omega_exponential(256, s) for s in counts])
    assert falling([theory.omega_exponential(256, 1000, m) for m in range(5)])
    assert falling([-theory.omega_linear(d, 5) for d in counts])
    assert falling([theory.theta_linear(256, n, 1) for n in counts])
    assert falling([theory.theta_exponential(256, n, 5) for n in counts])
    assert falling([theory.theta_two_shot(1.0, 1.0, n) for n in counts])
    assert falling([theory.tree_second_moment(n, False) for n in counts[1:]])
    assert falling([-theory.tree_second_moment(n, True) for n in counts])
    assert falling([-theory.elias_bits_bound(4096, s) for s in counts])
    assert falling([theory.ceo_rate(d, 10, 1.0, 1.0) for d in (0.1, 0.2, 0.5, 0.9, 1.0)])
    assert falling([theory.independent_rate(d, 10, 1.0, 1.0) for d in (0.1, 0.2, 0.5, 0.9, 1.0)])
    assert falling([theory.bits_at(r) for r in (0.001, 0.1, 0.5, 1.0)])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.omega_linear(0, 1), "dimension=0 is out of range: 1 to"),
        (lambda: theory.omega_linear(8, 1.5), "levels=1.5 must be an integer"),
        (lambda: theory.omega_linear(8, True), "levels=True must be an integer"),
        (lambda: theory.omega_linear(2**63, 1), "dimension=9223372036854775808 is out of range: 1 to"),
        (lambda: theory.omega_companded(8, 3, 0.5), "levels=3 is out of range: 4"),
        (lambda: theory.variance_companded(0.5, 4, 0.0), "slope=0.0 must be a finite number above 0"),
        (lambda: theory.mean_variance_companded(-0.5, 4, 1.0), "mean_magnitude=-0.5 must be a finite number of at"),
        (lambda: theory.omega_subtractive(8, 1), "levels=1 is out of range: 2"),
        (lambda: theory.omega_exponential(8, 3, 53), "mantissa=53 is out of range: 0 to 52"),
        (lambda: theory.smallest_level(3, -1), "mantissa=-1"),
        (lambda: theory.theta_linear(8, 0, 1), "ranks=0"),
        (lambda: theory.theta_independent(-1.0, 2), "omega=-1.0 must be a finite number of at least 0"),
        (lambda: theory.theta_two_shot(1.0, math.inf, 2), "omega_down=inf"),
        (lambda: theory.convergence_factor(math.nan, 2), "theta=nan"),
        (lambda: theory.tree_second_moment(6, True), "ranks=6 is not a power of two.*; take 4 or 8"),
        (lambda: theory.expected_nonzeros(8, 2, 0, shared=True), "levels=0"),
        (lambda: theory.sum_bits_linear(0, 2), "levels=0"),
        (lambda: theory.sum_bits_exponential(1, 0), "ranks=0"),
        (lambda: theory.elias_bits_bound(-1, 2), "dimension=-1"),
        (
            lambda: theory.ceo_rate(0.05, 10, 1.0, 1.0),
            "distortion=0.05 is not above 0.0909091.*about the true gradient",
        ),
        (lambda: theory.independent_rate(0.05, 10, 1.0, 1.0), "distortion=0.05 is not above 0.0909091"),
        (lambda: theory.gap(4.0, 0.05, 10, 1.0, 1.0), "error=0.05 is not above 0.0909091"),
        (lambda: theory.ceo_rate(0.0, 10, 1.0, 1.0), "distortion=0.0 must be a finite number above 0"),
        (lambda: theory.ceo_rate(0.5, 10, 0.0, 1.0), "signal=0.0 must be a finite number above 0"),
        (lambda: theory.distortion_of_rate(1.0, 10, 1.0, -1.0), "noise=-1.0"),
        (lambda: theory.distortion_of_rate("1", 10, 1.0, 1.0), "bits='1' must be a finite number"),
        (lambda: theory.rate_distortion(0.0), "relative_error=0.0 must be a finite number above 0"),
        (lambda: theory.bits_at(-0.1), "relative_l2=-0.1"),
        (lambda: theory.stability(-0.1, 1.0, 1.0), "alpha=-0.1"),
        (lambda: theory.best_alpha(1.0, -2.0), "omega=-2.0"),
    ],
)
def test_arguments_that_cannot_be(call, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()
