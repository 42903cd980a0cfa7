"""Bits that the noise of gradients allows, on gradients whose variances are known."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.adaptive.noise import NoiseGauge, NoiseSums, Way
from lightning_gqsgd.adaptive.sampling import SAMPLE_NUMEL, GradientSampler, Taken
from lightning_gqsgd.adaptive.steering import Steering
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.frameworks.fsdp_starting import check_request
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.research.simulation import average
from lightning_gqsgd.wire.agreement import Agreed
from tests.errors import check_refused_in_one_line

RANKS, NUMEL = 4, 3 * SAMPLE_NUMEL + 500
SEGMENTS = (Segment(0, 700, True), Segment(1, NUMEL, False))


def candidates(ranks: int = RANKS) -> dict[int, GQSGDConfig]:
    """The configurations to choose among."""
    config = GQSGDConfig(bits="auto")
    return {bits: resolve(candidate, ranks) for bits, candidate in config.candidates().items()}


def gauge(ranks: int = RANKS, *, decay: float = 0.0, least: int = 1) -> NoiseGauge:
    """A gauge that, unless told otherwise, decides from the first measurement on and forgets what was before."""
    ways = {bits: Way.of(config, ranks) for bits, config in candidates(ranks).items()}
    return NoiseGauge(ways, ranks, 0.05, decay, least)


def gradients(deviation: float, draw: int, ranks: int = RANKS, mean: float = 1.0) -> list[Tensor]:
    """One gradient for each rank: a Gaussian mean that is the same for all draws, and Gaussian noise about it."""
    numel = sum(segment.numel for segment in SEGMENTS)
    signal = mean * torch.randn(numel, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(1000 + draw)
    return [signal + deviation * torch.randn(numel, generator=generator) for _ in range(ranks)]


def measured(deviation: float, draw: int, bits: int = 4, mean: float = 1.0) -> list[NoiseSums]:
    """What each rank measures of one step that is compressed to ``bits`` bits."""
    each = gradients(deviation, draw, mean=mean)
    sampler = GradientSampler(candidates())
    decoded = average([x.clone() for x in each], bits=bits, step=draw)[0]
    return [collected(sampler, x, decoded, draw) for x in each]


def collected(sampler: GradientSampler, x: Tensor, decoded: Tensor, step: int) -> NoiseSums:
    """What a rank measures of its gradient."""
    measure(sampler, x, decoded, SEGMENTS, step)
    sums = sampler.collect()
    assert sums is not None
    return sums


def measure(sampler: GradientSampler, x: Tensor, mean: Tensor, segments: Sequence[Segment], step: int) -> Taken:
    """Measure one bucket, and return its sample."""
    taken = sampler.take(x, segments, step, seed=1)
    assert taken is not None
    sampler.measure(taken)
    sampler.watch(taken)(mean)
    return taken


def observations(deviation: float, count: int, bits: int) -> Iterator[NoiseSums]:
    """The means over ranks of what is measured in several steps."""
    return (
        tuple(math.fsum(column) / RANKS for column in zip(*measured(deviation, draw, bits), strict=True))
        for draw in range(count)
    )


@pytest.mark.parametrize("bits", [2, 4])
def test_the_sampling_variance_is_estimated_without_bias_whatever_the_rounding_adds(bits: int) -> None:
    deviation, count = 0.5, 20
    estimates, naive = [], []
    for square, inner, *_ in observations(deviation, count, bits):
        estimates.append((square - inner) / (RANKS - 1))
        naive.append(square)
    true = NUMEL * deviation**2 / RANKS
    mean = sum(estimates) / count
    error = (sum((estimate - mean) ** 2 for estimate in estimates) / count / (count - 1)) ** 0.5
    assert abs(mean - true) < 4 * error
    assert error < 0.05 * true
    # |G|² + S, as McCandlish et al. estimate it from the small batches.
    signal = float(gradients(0.0, 0)[0][SEGMENTS[0].numel :].square().sum())
    assert sum(naive) / count == pytest.approx(signal + NUMEL * deviation**2, rel=0.03)


def test_the_noise_scale_is_that_of_gradients_whose_mean_and_variance_are_known() -> None:
    state = gauge(decay=0.95)
    for draw in range(25):
        state.observe(measured(0.5, draw))
    assert state.noise_scale == pytest.approx(0.25, rel=0.12)  # σ²/μ², both per coordinate


@pytest.mark.parametrize(("ranks", "reducer"), [(2, "gather"), (4, "two_shot")])
def test_the_variance_of_rounding_is_predicted_for_widths_that_are_not_in_use(ranks: int, reducer: str) -> None:
    for bits, config in candidates(ranks).items():
        if bits > 8:
            continue
        assert config.reducer == reducer
        errors, relative, mean_squares, squares = [], [], [], []
        sampler = GradientSampler(candidates(ranks))
        for draw in range(6):
            each = gradients(0.7, draw, ranks)
            mean = torch.stack(each).mean(0)
            rounded = average([x.clone() for x in each], bits=bits, step=draw)[0]
            errors.append(float((rounded - mean)[700:].square().sum()))
            mean_squares.append(float(mean[700:].square().sum()))
            square, _, *rounding = collected(sampler, each[0], mean, draw)
            relative.append(rounding[(8, 4).index(bits)] / square)
            squares.append(float(torch.stack(each)[:, 700:].square().sum()) / ranks)
        square, inner = sum(squares) / 6, sum(mean_squares) / 6
        predicted = Way.of(config, ranks).variance(sum(relative) / 6, inner, (square - inner) / (ranks - 1))
        assert predicted == pytest.approx(sum(errors) / 6, rel=0.1), bits


def test_nodes_average_exactly_before_they_round() -> None:
    way, flat = Way("gather", 2), Way("gather", 8)
    # |G|² = 1 and S = 8: the mean of 8 ranks has V = 1 and |ḡ|² = 2, that of the 4 ranks of a node has |G|² + 8/4 = 3.
    assert way.variance(0.1, 2.0, 1.0) == pytest.approx(0.1 * 3 / 2)
    assert flat.variance(0.1, 2.0, 1.0) == pytest.approx(0.1 * 9 / 8)
    config = resolve(GQSGDConfig(bits=4, reducer="hierarchical", node_size=4), 8)
    assert Way.of(config, 8) == way


def test_on_one_node_nothing_is_rounded_so_that_the_fewest_bits_are_allowed() -> None:
    steering = Steering(GQSGDConfig(bits="auto", reducer="hierarchical", node_size=RANKS), RANKS)
    assert steering.gauge is not None
    assert steering.gauge.coded == ()
    for step in range(60):
        steering.begin_step(step, None)
        row = (0, 0, *_as_numbers((2.0, 1.0)))
        steering.receive({step: Agreed(0, (row,) * RANKS)})
    assert steering.bits == 4


@pytest.mark.parametrize(("deviation", "bits"), [(0.0, 32), (0.03, 16), (0.2, 8), (3.0, 4)])
def test_fewer_bits_are_taken_the_more_noise_the_gradients_have(deviation: float, bits: int) -> None:
    state = gauge()
    state.observe(measured(deviation, 0, bits=32))
    assert state.floor == bits
    assert state.allowed == tuple(width for width in (32, 16, 8, 4) if width >= bits)


def test_the_width_falls_with_the_batch_of_a_rank_and_rises_where_the_noise_vanishes() -> None:
    state, floors = gauge(), []
    for draw, samples in enumerate((4096, 256, 64, 1, 64, 256, 4096, 1 << 24)):  # of each rank; one has σ = 3
        state.observe(measured(3.0 / samples**0.5, draw, bits=state.floor))
        floors.append(state.floor)
    assert floors == sorted(floors[:4], reverse=True) + sorted(floors[4:])
    assert floors[3] == 4
    assert floors[-1] == 32
    assert 8 in floors


def test_where_the_mean_vanishes_the_ratio_of_the_variances_tends_to_that_of_pure_noise() -> None:
    state, ratios = gauge(), []
    for draw, mean in enumerate((10.0, 1.0, 0.01)):  # a training that converges under constant noise
        state.observe(measured(1.0, draw, mean=mean))
        ratios.append(state.ratio(4))
    assert ratios == sorted(ratios, reverse=True)
    square, _, _, error = measured(1.0, 9, mean=0.0)[0]
    rho = error / square
    assert ratios[-1] == pytest.approx(rho * (1 + (RANKS - 1) / RANKS), rel=0.15)


def sums_with_ratio(ratio: float, state: NoiseGauge) -> list[NoiseSums]:
    """Measurements with R/V = ``ratio`` at 4 bits, and a tenth of a hundredth of it at 8 bits."""
    # |ḡ|² = 1 and A = 1 + 3 V, with V = 1.
    square, inner = 4.0, 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        rho = (low + high) / 2
        low, high = (rho, high) if state.ways[4].variance(rho, inner, 1.0) < ratio else (low, rho)
    return [(square, inner, 1e-3 * low * square, low * square)] * RANKS


def test_bits_do_not_go_back_and_forth_where_the_ratio_is_near_the_limit() -> None:
    state = gauge()
    floors = []
    for ratio in (0.06, 0.048, 0.045, 0.042, 0.035, 0.042, 0.048, 0.042, 0.06, 0.048):
        state.observe(sums_with_ratio(ratio, state))
        assert state.ratio(4) == pytest.approx(ratio)
        floors.append(state.floor)
    assert floors == [8, 8, 8, 8, 4, 4, 4, 4, 8, 8]


def test_measurements_are_smoothed_and_the_first_ones_change_nothing() -> None:
    state = gauge(least=5, decay=0.9)
    for count in range(1, 6):
        state.observe(sums_with_ratio(0.01, state))
        assert state.floor == (4 if count == 5 else 32)
    state.observe(sums_with_ratio(0.2, state))
    assert state.ratio(4) < 0.05
    for _ in range(20):
        state.observe(sums_with_ratio(0.2, state))
    assert state.floor == 8


@pytest.mark.parametrize("shrinks_by", [1.0, 1e-4, 1e4])
def test_a_change_of_the_noise_shows_as_soon_whatever_the_norm_of_the_gradients_becomes(shrinks_by: float) -> None:
    state = gauge(least=5, decay=0.9)
    for _ in range(100):
        state.observe(sums_with_ratio(0.01, state))
    assert state.floor == 4
    for _ in range(10):
        state.observe([tuple(shrinks_by * value for value in sums) for sums in sums_with_ratio(0.2, state)])
    assert state.floor == 8


def test_a_state_of_an_earlier_version_goes_on_with_the_same_ratios() -> None:
    state, again = gauge(least=5, decay=0.9), gauge(least=5, decay=0.9)
    for _ in range(7):
        state.observe(sums_with_ratio(0.01, state))
    saved = state.state()
    absolute = {**saved, "sums": [1e6 * value for value in saved["sums"]]}
    del absolute["is_relative"]
    again.resume(json.loads(json.dumps(absolute)), is_same_world=True)
    for ratio in (0.01, 0.2, 0.2):
        state.observe(sums_with_ratio(ratio, state))
        again.observe(sums_with_ratio(ratio, again))
        assert again.ratio(4) == pytest.approx(state.ratio(4))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_a_measurement_that_one_rank_lacks_is_left_out_on_all(bad: float) -> None:
    state = gauge()
    state.observe([(bad,) * 4, *measured(1.0, 0)[1:]])
    assert state.count == 0
    assert state.floor == 32
    assert "not known yet" in state.describe()
    assert math.isnan(state.noise_scale)


def test_the_mean_over_ranks_does_not_depend_on_their_order() -> None:
    sums, state, other = measured(1.0, 3), gauge(), gauge()
    state.observe(sums)
    other.observe(sums[::-1])
    assert state.state() == other.state()


def test_samples_do_not_depend_on_buckets_and_have_every_coordinate_as_often_as_any_other() -> None:
    (x, *_), mean = gradients(1.0, 0), torch.ones(700 + NUMEL)
    together, apart = GradientSampler(candidates()), GradientSampler(candidates())
    one, two = (Segment(1, 9000, False), Segment(2, NUMEL - 8300, False))
    for sampler, buckets in ((together, [(one, two)]), (apart, [(two,), (one,)])):
        for segments in buckets:
            at = 0 if segments[0] is one else 9000
            part = slice(at, at + sum(segment.numel for segment in segments))
            measure(sampler, x[part], mean[part], segments, 4)
    assert together.collect() == apart.collect()
    assert together.collect() is None
    counts, draws = torch.zeros(700 + NUMEL), 200
    for step in range(draws):
        taken = together.take(x, SEGMENTS, step, seed=1)
        assert taken is not None
        (sample,) = taken.samples
        assert (sample.numel, sample.weight) == (SAMPLE_NUMEL, NUMEL / SAMPLE_NUMEL)
        assert sum(part.stop - part.start for part in sample.parts) == SAMPLE_NUMEL
        for part in sample.parts:
            counts[part] += 1
    assert not counts[:700].any()
    share = SAMPLE_NUMEL / NUMEL
    assert (counts[700:] - draws * share).abs().max() < 5 * (draws * share * (1 - share)) ** 0.5


def drive(steering: Steering, steps: range) -> list[int]:
    """The bits of steps of a steering whose ranks all measure what `measured` gives for draws that deviate by 2."""
    used = []
    for step in steps:
        steering.begin_step(step, None)
        used.append(steering.config.num_bits)
        steering.receive({step: Agreed(0, numbers_of(2.0, step))})
    return used


def numbers_of(deviation: float, step: int, bits: int = 4) -> tuple[tuple[int, ...], ...]:
    """What the stamps of all ranks have in a step: every tenth step, what was measured in the step before."""
    if step % 10 != 1:
        return ((0,) * 6,) * RANKS
    return tuple((0, 0, *_as_numbers(sums)) for sums in measured(deviation, step, bits))


def _as_numbers(sums: NoiseSums) -> list[int]:
    return torch.tensor(sums, dtype=torch.float64).view(torch.int64).tolist()


def test_a_resumed_run_chooses_as_the_run_does_that_was_not_interrupted() -> None:
    config = GQSGDConfig(bits="auto", max_slowdown=0.05)
    whole = Steering(config, RANKS)
    used = drive(whole, range(120))
    assert set(used) == {32, 4}
    (change,) = whole.decisions
    assert change.bits == 4
    assert "variance of rounding over sampling variance" in change.reason
    assert set(change.predicted.values()) == {None}
    for stop in (41, 42, 43):
        first = Steering(config, RANKS)
        before = drive(first, range(stop))
        saved = json.loads(json.dumps(first.state()))
        second = Steering(config, RANKS)
        second.resume(saved)
        assert before + drive(second, range(stop, 120)) == used
        assert second.average_bits == whole.average_bits == sum(used) / len(used)
        assert second.state() == whole.state()
    assert f"{whole.average_bits:.3g} bits on average over 120 steps" in whole.report(RANKS)


def test_time_decides_among_the_bits_that_the_noise_allows() -> None:
    config = GQSGDConfig(bits="auto", auto=True)
    steering, used = Steering(config, RANKS), []
    length_us = {32: 40_000, 16: 30_000, 8: 10_000, 4: 9_000}
    for step in range(500):
        steering.begin_step(step, None)
        used.append(steering.config.num_bits)
        deviation = 0.2 if step < 200 else 0.0
        rows = numbers_of(deviation, step, used[-1])
        steering.receive({step: Agreed(length_us[used[step - 1]] if step else 0, rows)})
    assert steering.trials is not None
    assert 4 not in used  # the noise never allows it
    assert used[100] == used[199] == 8
    assert used[-1] > 8  # without noise, no codes are exact enough
    assert set(used[:40]) == {32}  # five measurements come first
    assert "sampling variance" in steering.decisions[-1].reason


@pytest.mark.parametrize(
    "state", [{"decisions": []} | {"noise": noise} for noise in ({}, {"bits": 3}, {"bits": [8], "floor": "x"}, 7)]
)
def test_a_damaged_state_of_the_noise_is_refused_in_one_line(state: dict) -> None:
    steering = Steering(GQSGDConfig(bits="auto"), RANKS)
    check_refused_in_one_line(ConfigError, "'noise' that cannot be read", steering.resume, state)


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("damaged", [{"total_bits": "x"}, {"inbox": 3}, {"noise": {"bits": 3}}])
def test_a_state_that_is_refused_changes_nothing(auto: bool, damaged: dict) -> None:
    config = GQSGDConfig(bits="auto", auto=auto, max_slowdown=0.05)
    steering = Steering(config, RANKS)
    drive(steering, range(120))
    before = steering.state()
    beginning = Steering(config, RANKS)
    drive(beginning, range(8))
    with pytest.raises(ConfigError):
        steering.resume({**beginning.state(), **damaged})
    assert steering.state() == before


def test_a_state_of_another_number_of_ranks_keeps_the_bits_and_measures_anew() -> None:
    state = gauge()
    state.observe(measured(3.0, 0))
    other = gauge(ranks=2)
    other.resume(json.loads(json.dumps(state.state())), is_same_world=False)
    assert (other.floor, other.count) == (4, 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_slowdown": 0}, "finite number above 0"),
        ({"max_slowdown": -0.1}, "finite number above 0"),
        ({"max_slowdown": math.inf}, "finite number above 0"),
        ({"max_slowdown": "a little"}, "finite number above 0"),
        ({"codec": "sign"}, "leave codec and memory out"),
        ({"codec": "sign", "memory": "ef"}, "leave codec and memory out"),
        ({"codec": "top_k", "memory": "ef"}, "leave codec and memory out"),
        ({"memory": "ecq"}, "leave memory out"),
        ({"memory_down": "ef"}, "leave memory_down out"),
        ({"dither": "nearest", "memory": "none"}, "leave"),
        ({"reducer": "sum"}, "leave reducer out"),
        ({"reducer": "native"}, "leave reducer out"),
        ({"allow": (8,)}, "allow at least two"),
        ({"bits": 4, "max_slowdown": 0.1}, "leave bits out, or max_slowdown"),
        ({"bits": "four"}, "or 'auto'"),
    ],
)
def test_what_noise_does_not_go_with_is_refused_in_one_line_with_the_remedy(fields: dict, words: str) -> None:
    check_refused_in_one_line(ConfigError, words, GQSGDConfig, **{"bits": "auto", **fields})


def test_a_configuration_with_noise_can_be_written_and_is_refused_where_no_ddp_is() -> None:
    config = GQSGDConfig(bits="auto")
    assert config.max_slowdown == 0.05
    assert GQSGDConfig(**config.to_dict()) == config
    assert config.candidates()[4] == GQSGDConfig(bits=4)
    assert "by the noise of gradients (max_slowdown 0.05)" in config.describe()
    with pytest.raises(ConfigError, match="noise of the gradients of a DDP training; here, give one of bits=32"):
        resolve(config, 2)
    with pytest.raises(ConfigError, match="with FSDP2, give bits as a number"):
        check_request(config, None, True, None)
