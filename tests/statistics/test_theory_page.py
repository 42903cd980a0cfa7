"""Sentences of docs/theory.md that neither its doctests nor tests of a codec hold."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lightning_gqsgd.cli.facts import facts_at
from lightning_gqsgd.codecs.companded.codec import SLOPE
from lightning_gqsgd.kernels.wire import DITHER_FIRST, DITHER_UNIT
from lightning_gqsgd.presets import make_config
from lightning_gqsgd.research import theory
from lightning_gqsgd.research.simulation import average, relative_error

Array = np.ndarray
#: Midpoints of equal parts of the dither's interval, and of a decoder's box.
BOX = (np.arange(1 << 13) + 0.5) / (1 << 13) - 0.5


def box_mean(decoder: Callable[[Array], Array], y: Array) -> Array:
    """The mean of a decoder over a box of length 1 around each y."""
    return decoder(y[:, None] + BOX).mean(1)


def companded(levels: int) -> Callable[[Array], Array]:
    """The package's decoder, up to its factor."""
    middle = (levels - 1) / 2

    def decoder(z: Array) -> Array:
        whole = np.rint(z)
        return SLOPE * z + np.abs(whole) * (2 * z - whole) / middle

    return decoder


DECODERS: dict[str, Callable[[Array], Array]] = {
    "linear": lambda z: z,
    "cubic": lambda z: z + 0.3 * z**3,
    "steps": lambda z: 0.1 * z + np.floor(2 * z) + np.ceil(2 * z),
    "companded": companded(16),
}


@pytest.mark.parametrize("name", DECODERS)
def test_any_increasing_odd_decoder_is_without_bias_under_its_box_mean(name: str) -> None:
    y = np.linspace(-3, 3, 41) + 0.013
    codes = np.rint(y[:, None] + BOX)
    decoded = DECODERS[name](codes - BOX).mean(1)
    assert decoded == pytest.approx(box_mean(DECODERS[name], y), abs=1e-3)
    # A curve that is undone by its own inverse has a bias, unless it is linear.
    assert (np.abs(decoded - DECODERS[name](y)).max() > 0.01) == (name != "linear")


@pytest.mark.parametrize("levels", [4, 16, 256])
def test_sixteen_bits_of_dither_make_the_mean_exact_to_a_part_of_a_level(levels: int) -> None:
    dither = np.arange(1 << 16) * DITHER_UNIT + DITHER_FIRST - 0.5
    middle = (levels - 1) / 2
    y = np.random.default_rng(0).uniform(-middle, middle, 40)
    shift = middle % 1  # codes are whole numbers beside the middle
    codes = np.rint(y[:, None] + dither + shift) - shift
    assert np.abs((codes - dither).mean(1) - y).max() <= 2**-17 * 1.001
    curve = SLOPE * y + y * np.abs(y) / middle
    distance = SLOPE + 2 * np.abs(y) / middle
    whole = codes - dither
    nearest = np.rint(whole)
    decoded = (SLOPE * whole + np.abs(nearest) * (2 * whole - nearest) / middle).mean(1)
    assert (np.abs(decoded - curve) / distance).max() <= 2**-17 * (1 + 1 / middle)


def saw(angle: Array) -> Array:
    """A wave of period 2 pi that is straight but for its jumps."""
    return (angle / np.pi + 1) % 2 - 1


@pytest.mark.parametrize("wave", [np.sin, saw], ids=["sine", "saw"])
@pytest.mark.parametrize("size", [0.05, 0.5])
def test_no_other_decoder_with_the_same_box_mean_has_a_smaller_error(
    wave: Callable[[Array], Array], size: float
) -> None:
    """An odd function of period 1 leaves the box mean, and adds its variance on average over y from k - 1/2 to k +
    1/2, for k other than 0."""
    decoder = companded(16)

    def periodic(z: Array) -> Array:
        return size * wave(2 * np.pi * z)

    for k in (1, 2, 5):
        y = k + BOX[::32]
        mean = box_mean(decoder, y)
        z = y[:, None] + BOX
        assert periodic(z).mean(1) == pytest.approx(0, abs=1e-3)
        error = ((decoder(z) - mean[:, None]) ** 2).mean()
        other = ((decoder(z) + periodic(z) - mean[:, None]) ** 2).mean()
        assert other == pytest.approx(error + (periodic(BOX) ** 2).mean(), rel=2e-3)


@pytest.mark.parametrize("levels", [4, 16])
def test_around_zero_another_decoder_would_have_a_slightly_smaller_error(levels: int) -> None:
    decoder = companded(levels)
    middle = (levels - 1) / 2
    y = BOX[::32]
    z = y[:, None] + BOX
    mean = box_mean(decoder, y)

    def best(z: Array) -> Array:
        """The odd function of period 1 that takes off most, for |y| < 1/2."""
        t = z - np.floor(z)
        return 2 / middle * np.where(t < 0.5, t * (0.5 - t), (1 - t) * (0.5 - t))

    error = ((decoder(z) - mean[:, None]) ** 2).mean()
    taken = error - ((decoder(z) + best(z) - mean[:, None]) ** 2).mean()
    assert taken == pytest.approx(1 / (120 * middle**2), rel=0.01)
    assert levels != 16 or 100 * taken / error == pytest.approx(0.3, abs=0.05)


def companded_error(x: Array, levels: int) -> Array:
    """The error of companded codes at a share x of the largest magnitude, as the page has it."""
    step = 2 / (levels - 1)
    linear_share = SLOPE / (1 + SLOPE)
    return step**2 / 12 * (linear_share**2 + 4 * x / (1 + SLOPE))


@pytest.mark.parametrize("levels", [8, 16, 256])
def test_the_error_of_companded_codes_grows_like_the_magnitude(levels: int) -> None:
    shares = np.linspace(0, 1, 401)
    exact = np.array([theory.variance_companded(float(share), levels, SLOPE) for share in shares])
    gaussian = np.abs(np.random.default_rng(0).standard_normal((100, 256)))
    gaussian /= gaussian.max(1, keepdims=True)
    for x in (shares, gaussian):
        assert np.interp(x, shares, exact).mean() == pytest.approx(companded_error(x, levels).mean(), rel=0.01)
    assert np.abs(exact / companded_error(shares, levels) - 1).max() < 0.12


def test_companded_codes_are_better_where_the_mean_magnitude_is_small() -> None:
    linear = (2 / 255) ** 2 / 12
    assert theory.mean_variance_companded(0.35, 256, 0.75) < linear < theory.mean_variance_companded(0.36, 256, 0.75)
    rng = np.random.default_rng(0)
    shares = {}
    for name, blocks in (("normal", rng.standard_normal((4000, 256))), ("heavy", rng.standard_t(3, (4000, 256)))):
        magnitudes = np.abs(blocks)
        shares[name] = float((magnitudes.mean(1) / magnitudes.max(1)).mean())
    assert round(shares["normal"], 2) == 0.27
    assert shares["heavy"] < 0.5 * shares["normal"]


def test_the_presets_of_the_paper_are_its_defaults_and_cannot_overflow() -> None:
    for name in ("global_qsgd_linear", "global_qsgd_exponential"):
        config = make_config(name)
        assert (config.norm, config.norm_over_ranks, config.bits) == ("max", "max", 8)
        assert (config.scale_per, config.min_numel) == ("bucket", 0)
    ranks = 8
    assert ranks * math.ceil(127 / ranks) > 127, "127/n levels, rounded up by all ranks, are more than a byte holds"
    ones = [torch.ones(512)] * ranks
    mean = torch.stack([average(ones, preset="global_qsgd_linear", step=step)[0] for step in range(50)])
    assert float(mean.mean()) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("kind", ["normal", "one rank is large"])
def test_the_largest_norm_of_all_ranks_has_the_least_error(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [1.0] * 4 if kind == "normal" else [0.1, 1.0, 10.0, 100.0]
    gradients = [size * torch.randn(2048, generator=generator) for size in sizes]
    errors = [
        sum(
            relative_error(
                average(gradients, step=step, preset="global_qsgd_linear", norm_over_ranks=over, levels=15)[0],
                gradients,
            )
            for step in range(10)
        )
        for over in ("max", "l2", "l1")
    ]
    assert errors[0] < errors[1] < errors[2]


def test_two_shots_reach_theta_on_a_block_of_one_coordinate_that_all_ranks_have() -> None:
    spike = torch.zeros(256)
    spike[3] = 1.0
    codec = {"codec": "linear", "bits": 4, "dither": "subtractive", "block_size": 256}
    omega = theory.omega_subtractive(256, 16)
    theta = theory.theta_two_shot(omega, omega, 8)
    errors = []
    for step in range(150):
        mean = average([spike] * 8, step=step, reducer="two_shot", **codec)[0]
        errors.append(relative_error(mean, [spike]) ** 2)
    assert 0.9 * theta < np.mean(errors) < theta
    adaptive = {**codec, "dither": "adaptive"}
    assert relative_error(average([spike] * 8, reducer="two_shot", **adaptive)[0], [spike]) < 0.1 * math.sqrt(theta)


def test_bits_of_two_shots_do_not_grow_with_the_number_of_ranks() -> None:
    bits = [facts_at("gqsgd_4bit", ranks).wire_bits for ranks in (8, 64)]
    assert bits[0] == pytest.approx(bits[1])


def test_the_largest_of_128_normal_numbers_and_what_a_tenth_of_a_bit_is() -> None:
    blocks = np.abs(np.random.default_rng(0).standard_normal((20_000, 128)))
    assert round(float(blocks.max(1).mean()), 1) == 2.8
    assert round(2**0.1 - 1, 2) == 0.07
    linear = (2 / 15) ** 2 / 12
    assert math.sqrt(linear / theory.mean_variance_companded(0.27, 16, 0.75)) > 2**0.1, "companded codes gain more"


def energy(vectors: Array) -> float:
    """The mean square."""
    return float((vectors**2).mean())


@pytest.mark.parametrize("noise", [0.3, 20.0])
def test_what_a_running_mean_of_reduced_gradients_leaves_to_be_sent(noise: float) -> None:
    """The shares of energy of a rank's gradient, of the mean, and of a gradient beside another rank's; the gradient
    behind them stays."""
    ranks, rho, numel = 4, 0.1, 20_000
    rng = np.random.default_rng(0)
    truth = rng.standard_normal(numel)

    def drawn() -> Array:
        return truth + math.sqrt(noise) * rng.standard_normal((ranks, numel))

    reference = truth.copy()
    for _ in range(100):
        reference += rho * (drawn().mean(0) - reference)
    gradients = drawn()
    v = rho / (2 - rho) * noise / ranks
    of_rank = energy(gradients - reference) / energy(gradients)
    assert of_rank == pytest.approx((noise + v) / (noise + 1), rel=0.05)
    of_mean = energy(gradients.mean(0) - reference) / energy(gradients.mean(0))
    assert of_mean == pytest.approx((noise / ranks + v) / (noise / ranks + 1), rel=0.05)
    of_other = energy(gradients[0] - gradients[1]) / energy(gradients[0])
    assert of_other == pytest.approx(2 * noise / (noise + 1), rel=0.05)
    assert of_other > of_rank
    assert (of_other < 1) == (noise < 1)


def square_error_of_mean(rounding: str, *, together: bool, correlation: float, step: float, ranks: int = 8) -> float:
    """The mean square error of a mean of normal gradients, whose dithers are independent or, as in algorithm 1 of arXiv
    2203.04925, drawn together: U_i = π_i/n + γ_i, π a random permutation, each γ_i uniform on [0, 1/n)."""
    rng, numel = np.random.default_rng(7), 200_000
    signal = rng.standard_normal(numel)
    x = math.sqrt(correlation) * signal + math.sqrt(1 - correlation) * rng.standard_normal((ranks, numel))
    dither = rng.random((ranks, numel))
    if together:
        order = np.argsort(dither, axis=0)
        dither = (order + rng.random((ranks, numel))) / ranks
    if rounding == "stochastic":
        rounded = step * np.floor(x / step + dither)
    else:
        rounded = step * (np.rint(x / step + dither - 0.5) - (dither - 0.5))
    return float(((rounded - x).mean(0) ** 2).mean())


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("together", [False, True])
def test_stochastic_rounding_gains_from_dithers_drawn_together_what_subtractive_dither_has(
    together: bool, ranks: int
) -> None:
    def error_of(rounding: str) -> float:
        return square_error_of_mean(rounding, together=together, correlation=0, step=0.25, ranks=ranks)

    one_rank = 0.25**2 / 12
    assert error_of("subtractive") == pytest.approx(one_rank / ranks, rel=0.02)
    stochastic = one_rank / ranks * (1 + 1 / ranks**2) if together else 2 * one_rank / ranks
    assert error_of("stochastic") == pytest.approx(stochastic, rel=0.02)


@pytest.mark.parametrize(("correlation", "gain"), [(0.5, 0.0), (0.95, 0.37)])
def test_dithers_drawn_together_gain_where_gradients_of_ranks_are_within_a_step(
    correlation: float, gain: float
) -> None:
    independent = square_error_of_mean("subtractive", together=False, correlation=correlation, step=2)
    together = square_error_of_mean("subtractive", together=True, correlation=correlation, step=2)
    assert 1 - together / independent == pytest.approx(gain, abs=0.01)
