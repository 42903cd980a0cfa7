"""Bias, variance and error of companded codes against theory, on coordinates of every size and on whole gradients."""

import math

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs import CompandedCodec
from lightning_gqsgd.codecs.companded.codec import SLOPE
from lightning_gqsgd.codecs.variance import mean_variance_companded, variance_companded
from lightning_gqsgd.kernels.wire import SCALE_FORMATS
from lightning_gqsgd.reducers import REDUCERS
from lightning_gqsgd.research.simulation import average, relative_error
from tests.statistics.codecs import NUMEL, REPEATS, errors_of


def scales_of(x: Tensor, block_size: int) -> Tensor:
    """The largest magnitude of each block, rounded up as it travels: fp32 [blocks]."""
    form, largest = SCALE_FORMATS[torch.float32], x.view(-1, block_size).abs().amax(1)
    return form.floats(form.rounded_up(largest.view(torch.int32).long()))


def predicted(x: Tensor, bits: int, block_size: int) -> Tensor:
    """Mean square error of each coordinate by theory, fp64 [numel]."""
    scales = scales_of(x, block_size).double().repeat_interleave(block_size)
    ratios = (x.double().abs() / scales).tolist()
    return torch.tensor([variance_companded(ratio, 2**bits, SLOPE) for ratio in ratios]).double() * scales.square()


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_error_has_mean_zero_and_the_variance_of_theory_at_every_magnitude(bits: int) -> None:
    x = torch.linspace(-1, 1, NUMEL)[torch.randperm(NUMEL, generator=torch.Generator().manual_seed(bits))]
    errors = errors_of(CompandedCodec(bits), x, NUMEL)  # the scale is 1
    z = errors.mean(0) / (errors.std(0) / math.sqrt(REPEATS))
    assert 0.93 < float(z.std()) < 1.07
    assert float(z.abs().max()) < 5.5
    variances = predicted(x, bits, NUMEL)
    for region in x.argsort().view(32, -1):  # by size, from the most negative coordinates to the largest
        part = errors[:, region]
        assert abs(float(part.mean() / part.std())) * math.sqrt(part.numel()) < 4
        assert float(part.square().mean()) == pytest.approx(float(variances[region].mean()), rel=0.03)
    mean = mean_variance_companded(0.5, 2**bits, SLOPE)
    assert float(errors.square().mean()) == pytest.approx(mean, rel=0.03)


def gaussian(numel: int, generator: torch.Generator) -> Tensor:
    """Standard normal coordinates."""
    return torch.randn(numel, generator=generator)


def heavy(numel: int, generator: torch.Generator) -> Tensor:
    """Student's t distribution with 3 degrees of freedom, times a lognormal one."""
    normal = torch.randn(5, numel, generator=generator)
    return normal[0] / (normal[1:4].square().sum(0) / 3).sqrt() * normal[4].exp()


def sparse(numel: int, generator: torch.Generator) -> Tensor:
    """Gaussian coordinates, of which most are zero: 60 % in one half, 99 % in the other."""
    draws = torch.rand(numel, generator=generator)
    return gaussian(numel, generator) * (draws < torch.tensor([0.4, 0.01]).repeat_interleave(numel // 2))


KINDS = {"gaussian": gaussian, "heavy": heavy, "sparse": sparse}


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "sparse"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gradients_are_unbiased_with_the_variance_of_theory(kind: str, bits: int) -> None:
    x = KINDS[kind](NUMEL, torch.Generator().manual_seed(bits))
    dither = "adaptive" if kind == "sparse" else "subtractive"
    errors = errors_of(CompandedCodec(bits, dither), x, 128)
    scale = scales_of(x, 128).repeat_interleave(128).double()
    relative = (errors / scale)[:, scale > 0]
    assert abs(float(relative.mean() / relative.std())) * math.sqrt(relative.numel()) < 4
    gains = errors @ x.double() / float(x.double().square().sum())
    assert abs(float(gains.mean() / gains.std())) * math.sqrt(REPEATS) < 4
    if kind != "sparse":
        assert float(errors.square().mean()) == pytest.approx(float(predicted(x, bits, 128).mean()), rel=0.05)
    else:  # the sparser half is rounded stochastically: its zeros stay
        assert (errors[:, NUMEL // 2 :][:, x[NUMEL // 2 :] == 0] == 0).float().mean() > 0.95


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_adaptive_dither_has_no_more_error_than_subtractive(bits: int) -> None:
    block, count = 256, 60
    generator = torch.Generator().manual_seed(bits)
    density = torch.linspace(0.002, 0.3, count).repeat_interleave(block)
    x = torch.randn(block * count, generator=generator) * (torch.rand(block * count, generator=generator) < density)
    squares = [
        errors_of(CompandedCodec(bits, dither), x, block, 40).view(40, count, block).square().sum(2).mean(0)
        for dither in ("adaptive", "subtractive")
    ]
    assert float(squares[0].sum()) < 0.97 * float(squares[1].sum())
    assert (squares[0] < 1.25 * squares[1] + 1e-12).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_error_of_a_block_is_within_omega(bits: int) -> None:
    codec = CompandedCodec(bits, "adaptive")
    generator = torch.Generator().manual_seed(0)
    spike, few = torch.zeros(256), torch.zeros(256)
    spike[0], few[:8] = 1.0, torch.randn(8, generator=generator)
    hard = torch.full((256,), 0.1)
    hard[0] = 1.0
    for x in (torch.randn(256, generator=generator), spike, few, hard):
        ratio = float(errors_of(codec, x, 256, 200).square().sum(1).mean() / x.double().square().sum())
        assert ratio <= codec.omega(256)


#: rel-L2 of the mean of 8 ranks in per cent: at most so much, and at most this share of that of linear codes.
LIMITS = {
    ("gaussian", 2): (77, 0.86), ("gaussian", 3): (31.2, 0.87),
    ("gaussian", 4): (14.4, 0.87), ("gaussian", 8): (0.84, 0.88),
    ("heavy", 2): (135, 0.6), ("heavy", 3): (56, 0.6), ("heavy", 4): (26, 0.6), ("heavy", 8): (1.6, 0.6),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "bits"), LIMITS)
def test_the_error_of_the_mean_is_that_of_the_table(kind: str, bits: int) -> None:
    generator = torch.Generator().manual_seed(1)
    gradients = [KINDS[kind](1 << 15, generator) for _ in range(8)]
    companded, linear = (
        100 * relative_error(average(gradients, bits=bits, reducer="two_shot", **fields)[0], gradients)
        for fields in ({"codec": "companded", "block_size": 128}, {"codec": "linear"})
    )
    limit, share = LIMITS[kind, bits]
    assert companded < limit
    assert companded < share * linear


@pytest.mark.parametrize(("reducer", "ranks"), [("gather", 2), ("two_shot", 8)])
def test_error_of_the_mean_of_gaussian_gradients_is_as_predicted(reducer: str, ranks: int) -> None:
    """Equal gradients, so that the mean has the ranks' scales; the prediction is for blocks of 256."""
    x = gaussian(1 << 16, torch.Generator().manual_seed(2))
    error = average([x] * ranks, codec="companded", block_size=256, bits=5, reducer=reducer)[0].double() - x.double()
    scales = scales_of(x, 256).double()
    relative = (error.view(-1, 256) / scales[:, None]).square().mean()
    assert float(relative) == pytest.approx(REDUCERS[reducer].mean_error(CompandedCodec(5), ranks), rel=0.05)
