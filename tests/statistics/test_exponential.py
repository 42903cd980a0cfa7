"""Exponential codes: bias and variance of the codec, of the sum of two codes, and of trees of such sums."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs import ExponentialCodec
from lightning_gqsgd.codecs.variance import relative_variance
from lightning_gqsgd.kernels import cpu
from lightning_gqsgd.kernels.layout import Segment, cut, place
from lightning_gqsgd.kernels.protocol import Coding
from lightning_gqsgd.reducers.tree import hops_of
from lightning_gqsgd.research.simulation import average
from tests.statistics.codecs import REPEATS, errors_of

DRAWS = 2_000_000 // 16 * 16
BLOCK = 1 << 16


def values_of(codes: Tensor, bits: int, magnitudes: int) -> Tensor:
    """What codes stand for, the last magnitude being 1."""
    magnitude, sign = codes & ((1 << (bits - 1)) - 1), codes >> (bits - 1)
    return torch.where(magnitude > 0, (1 - 2 * sign) * 2.0 ** (magnitude - magnitudes).double(), 0.0)


def combined(one: int, other: int, magnitudes: int) -> Tensor:
    """How often each code, 0 to 255, comes out of ``DRAWS`` sums of two codes of 8 bits."""
    q = ExponentialCodec(8, most=magnitudes).quantiser(BLOCK)
    layout = place(cut([Segment(0, DRAWS, False)], BLOCK), q, shards=1, scale_bytes=0, raw_bytes=0)
    mine, theirs = (torch.full((layout.message_bytes,), code, dtype=torch.uint8) for code in (one, other))
    cpu.combine(mine, theirs, Coding(layout.blocks, q), (one * 256 + other, 77))
    assert layout.message_bytes == DRAWS
    return torch.bincount(mine, minlength=256)


def check_pair(one: int, other: int, magnitudes: int) -> float:
    """z-score of the mean of the sums; 0 where nothing is random, and then it is checked exactly."""
    values = values_of(torch.arange(256), 8, magnitudes)
    exact = float(values[one] + values[other])
    exact = min(max(exact, -1.0), 1.0)  # what would pass the last magnitude saturates
    counts = combined(one, other, magnitudes)
    found = counts.nonzero()[:, 0]
    if len(found) == 1:
        assert float(values[found]) == pytest.approx(exact, rel=2.0**-18)  # 2e6 draws do not see what is rarer
        return 0.0
    assert len(found) == 2
    low, high = sorted(values[found].tolist())
    p = (exact - low) / (high - low)
    assert 0 < p < 1
    mean = float((counts * values).sum()) / DRAWS
    return (mean - exact) / ((high - low) * math.sqrt(p * (1 - p) / DRAWS))


@pytest.mark.slow
def test_every_pair_of_codes_is_added_without_bias() -> None:
    """All exponents with a distance up to 14, equal and opposite signs, both orders, zero, and saturation."""
    magnitudes, scores = 14, []
    for a in range(magnitudes + 1):
        for b in range(magnitudes + 1):
            negative = 128 * (a + b) % 256  # now the one, now the other sign comes first
            one, other = (code | (code and negative) for code in (a, b))
            scores += [check_pair(one, other, magnitudes), check_pair(one, other and other ^ 128, magnitudes)]
    random = torch.tensor([z for z in scores if z])
    assert len(random) > 200
    assert float(random.abs().max()) < 4.8
    assert 0.85 < float(random.std()) < 1.15
    assert abs(float(random.mean())) < 4 / math.sqrt(len(random))


@pytest.mark.parametrize(
    ("one", "other"), [(9, 8), (9, 7), (9, 135), (9, 134), (137, 6), (14, 13), (14, 14), (14, 12 | 128)]
)
def test_some_pairs_of_codes_are_added_without_bias(one: int, other: int) -> None:
    assert abs(check_pair(one, other, magnitudes=14)) < 4.5


@pytest.mark.parametrize("mantissa", [0, 1, 2, 3])
def test_codec_is_unbiased_with_the_variance_of_theory(mantissa: int) -> None:
    codec = ExponentialCodec(8 if mantissa else 5, mantissa)
    generator = torch.Generator().manual_seed(mantissa)
    x = 2.0 ** (-12 * torch.rand(2560, generator=generator)) * (1 - 2 * torch.rand(2560, generator=generator).round())
    x[::256] = 1.0
    errors = errors_of(codec, x) / x.double().abs()
    random = errors.std(0) > 0.02 * 2.0**-mantissa
    z = (errors.mean(0) / (errors.std(0) / math.sqrt(REPEATS)))[random]
    assert z.numel() > 2200
    assert abs(float(z.mean())) < 4 / math.sqrt(z.numel())
    assert 0.9 < float(z.std()) < 1.1
    # Log-uniform coordinates, far above the smallest level. m = 0: 3/4 - ln 2 over ln 2.
    assert float(errors.square().mean()) < relative_variance(mantissa)
    if not mantissa:
        assert float(errors[:, x.abs() > 0.01].square().mean()) == pytest.approx(
            (0.75 - math.log(2)) / math.log(2), rel=0.05
        )


@pytest.mark.parametrize(
    "ranks", [2, 5, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (3, 4, 6, 7, 8, 9))]
)
def test_a_tree_of_any_size_is_unbiased_and_the_same_everywhere(ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    common = torch.randn(4000, generator=generator)
    for aligned in (False, True):
        xs = [common if aligned else torch.randn(4000, generator=generator) for _ in range(ranks)]
        mean, total, squares = torch.stack(xs).double().mean(0), torch.zeros(4000, dtype=torch.float64), 0.0
        for step in range(100):
            results = average(xs, step=step, preset="gqsgd_exponential_tree")
            assert all(torch.equal(results[0], one) for one in results)
            total += results[0]
            squares += float((results[0].double() - mean).square().sum())
        left = float((total / 100 - mean).square().sum())
        assert left == pytest.approx(squares / 100 / 100, rel=0.25)  # independent errors of mean zero


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 64, 100])
def test_identical_ranks_at_the_maximum_decode_to_exactly_that(ranks: int) -> None:
    """No sum overflows into the code of zero, and none saturates: equal powers of two are added exactly, by twos."""
    x = torch.full((600,), 0.75)
    x[::2] = -0.75
    for step in range(5):
        result = average([x] * ranks, step=step, preset="gqsgd_exponential_tree")[0]
        if ranks & (ranks - 1) == 0:
            assert torch.equal(result, x)
        else:
            assert float((result / x).min()) > 0.4
            assert float((result / x).max()) < 2


@pytest.mark.parametrize("ranks", range(1, 40))
def test_hops_match(ranks: int) -> None:
    """What one rank gives its partner takes, at the same hop; all shards of all ranks end up in every rank."""
    plans = [hops_of(rank, ranks) for rank in range(ranks)]
    assert len({len(plan) for plan in plans}) == 1
    inner = 1 << (ranks.bit_length() - 1)
    held = [[{rank} for _ in range(inner)] for rank in range(ranks)]
    for hops in zip(*plans, strict=True):
        before = [[set(shard) for shard in shards] for shards in held]
        for rank, hop in enumerate(hops):
            if hop.partner is None:
                assert hop.gives[0] == hop.gives[1] and hop.takes[0] == hop.takes[1]  # noqa: PT018
                continue
            partner = hops[hop.partner]
            assert (partner.partner, partner.gives, partner.takes) == (rank, hop.takes, hop.gives)
            for shard in range(*hop.takes):
                theirs = before[hop.partner][shard]
                if hop.adds:
                    assert not held[rank][shard] & theirs
                    held[rank][shard] |= theirs
                else:
                    held[rank][shard] = theirs
    assert all(shard == set(range(ranks)) for shards in held for shard in shards)
