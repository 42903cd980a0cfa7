"""What holds for every system: edges, types, faults, and no dependence on what else is reduced."""

from __future__ import annotations

import math
import re

import pytest
import torch

from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.presets import FIXED, PRESETS, make_config
from lightning_gqsgd.research.simulation import VirtualRanks, average, relative_error

STATELESS = [name for name, preset in FIXED.items() if not preset.config.remembers]
#: Rough relative L2 error of one step on Gaussian gradients of 3 ranks; those with memory lose more at first.
LIMITS = {"gqsgd": 0.02, "gqsgd_sum": 0.03, "gqsgd_exponential": 0.07, "gqsgd_4bit": 0.25, "dq_psgd": 0.4, "qsgd": 0.3}


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.float64, torch.float16)),
    ],
)
@pytest.mark.parametrize("numel", [0, 1, 7, 255, 257, 10_000])
@pytest.mark.parametrize("preset", FIXED)
def test_all_sizes_and_dtypes(preset: str, numel: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(numel)
    gradients = [torch.randn(numel, generator=generator).to(dtype) for _ in range(3)]
    means = average(gradients, preset=preset)
    assert all(torch.equal(means[0], mean) for mean in means)
    assert means[0].dtype == dtype
    assert means[0].isfinite().all()
    if numel > 1000 and preset in LIMITS:
        assert relative_error(means[0], gradients) < LIMITS[preset]


@pytest.mark.parametrize("preset", FIXED)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_on_one_rank_reach_all(preset: str, bad: float) -> None:
    gradients = [torch.randn(20_000) for _ in range(3)]
    gradients[1][300] = bad
    segments = [Segment(0, 9_000, False), Segment(1, 1000, True), Segment(2, 10_000, False)]
    means = average(gradients, preset=preset, segments=segments)
    for mean in means:
        assert torch.equal(mean.isnan(), means[0].isnan())
        assert not mean[300].isfinite()
        assert mean[9_000:10_000].isfinite().all()
        # Under one scale for a bucket, what is not finite reaches all that is quantised.
        assert mean[10_000:].isfinite().all() == (FIXED[preset].config.scale_per != "bucket")


@pytest.mark.parametrize("preset", FIXED)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 1e-30, 1.0, 1e30])
def test_constant_gradients_keep_their_sign_and_size(preset: str, value: float) -> None:
    gradients = [torch.full((3000,), value)] * 3
    mean = average(gradients, preset=preset)[0]
    assert mean.isfinite().all()
    if value == 0.0:
        assert (mean == 0).all()
    elif value >= 1e-30:
        assert float(mean.double().mean()) == pytest.approx(value, rel=1.0)
        assert float(mean.double().mean()) > 0


@pytest.mark.parametrize("preset", [name for name in STATELESS if FIXED[name].config.scale_per != "bucket"])
def test_result_of_a_parameter_does_not_depend_on_its_neighbours(preset: str) -> None:
    gradients = [torch.randn(5000) for _ in range(3)]
    together = average(gradients, preset=preset, segments=[Segment(4, 2000, False), Segment(5, 3000, False)])[0]
    alone = average([one[2000:].clone() for one in gradients], preset=preset, segments=[Segment(5, 3000, False)])[0]
    assert torch.equal(together[2000:], alone)


def test_a_scale_per_parameter_is_one_also_across_pieces() -> None:
    """The largest of four ternary levels is the same in all blocks of a parameter of several pieces' size."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1_200_000, generator=generator) * torch.logspace(-2, 0, 1_200_000)
    segments = [Segment(0, 1000, False), Segment(1, 1_199_000, False)]
    mean = average([x], preset="terngrad", clip=0.0, segments=segments)[0]
    for part in (mean[:1000], mean[1000:]):
        assert len(part.abs().unique()) == 2


@pytest.mark.parametrize("preset", [name for name in STATELESS if name != "terngrad"])
def test_stateless_presets_are_unbiased(preset: str) -> None:
    """Errors of different steps are independent with mean zero: their mean shrinks with the root of their number."""
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(20_000, generator=generator) for _ in range(3)]
    exact = torch.stack(gradients).double().mean(0)
    segments = [Segment(0, 20_000, False)]
    ranks, repeats = VirtualRanks(3, segments, preset=preset), 200
    total, squares = torch.zeros(20_000, dtype=torch.float64), 0.0
    for step in range(repeats):
        mean = ranks.mean(gradients, step).double()
        total += mean
        squares += float((mean - exact).square().sum())
    left = float((total / repeats - exact).square().sum())
    assert left == pytest.approx(squares / repeats / repeats, rel=0.1)
    gain = float((total / repeats - exact) @ exact / (exact @ exact))
    assert abs(gain) < 5 * math.sqrt(squares / repeats / repeats / 20_000) / float(exact.square().mean().sqrt())


def test_clipping_is_the_only_bias_of_terngrad() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    for clip, bias in ((0.0, 0.0), (2.5, float((x.abs() - 2.5).clamp(min=0).norm() / x.norm()))):
        ranks = VirtualRanks(1, [Segment(0, 100_000, False)], preset="terngrad", clip=clip)
        total, squares = torch.zeros(100_000, dtype=torch.float64), 0.0
        for step in range(200):
            mean = ranks.mean([x], step).double()
            total += mean
            squares += float((mean - x).square().sum())
        left = float((total / 200 - x).square().sum() - squares / 200 / 200)
        assert math.sqrt(max(0.0, left)) / float(x.norm()) == pytest.approx(bias, abs=0.03)


def test_elias_codes_are_shorter_where_most_levels_are_zero() -> None:
    gradients = [torch.randn(200_000, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    results, bits = [], []
    for coder in ("fixed", "elias"):
        ranks = VirtualRanks(2, [Segment(0, 200_000, False)], preset="qsgd_elias", coder=coder)
        results.append(ranks.mean(gradients, 0))
        bits.append(ranks.wire_bits)
    assert torch.equal(*results)
    assert bits[1] < 0.5 * bits[0]


def test_rotation_makes_heavy_tails_harmless() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1 << 16, generator=generator) ** 5
    plain, rotated = (
        relative_error(average([x], bits=4, dither="stochastic", rotation=rotation)[0], [x])
        for rotation in (False, True)
    )
    assert rotated < 0.5 * plain


def test_too_many_ranks_for_a_tree() -> None:
    config = GQSGDConfig(codec="exponential", bits=3, reducer="tree")
    assert resolve(config, 2).reducer == "tree"
    with pytest.raises(ConfigError, match="at most 2 ranks, not 3; take more bits"):
        resolve(config, 3)


def test_auto_chooses_by_codec_and_memory() -> None:
    def chosen(ranks: int = 8, **fields: object) -> str:
        return resolve(make_config(**fields), ranks).reducer

    assert chosen(codec="exponential") == "two_shot"
    assert chosen(2, codec="exponential") == "gather"
    assert chosen(codec="exponential", scale="global") == "tree"
    assert chosen(codec="sign", bits=1, memory="ef") == "gather"
    assert chosen(codec="sign", bits=1, memory="ef", memory_down="ef") == "two_shot"
    assert chosen(2, codec="sign", bits=1, memory="ef", memory_down="ef") == "two_shot"
    assert chosen(rotation=True, dither="stochastic") == "two_shot"


def test_configurations_survive_as_plain_values() -> None:
    for name, preset in FIXED.items():
        config = resolve(preset.config, 4)
        assert GQSGDConfig(**config.to_dict()) == config, name
        assert GQSGDConfig(**preset.config.to_dict()) == preset.config, name
        assert re.search(r"\bbits? \(", config.describe())
    assert resolve(PRESETS["dore"].config, 4).describe() == (
        "2 bits (linear, stochastic dither, blocks of 256, memory: rho 0.0294, memory on the way back: alpha 0.0588, "
        "beta 1)"
    )
