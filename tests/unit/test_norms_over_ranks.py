"""Scales that all ranks share: their norm over ranks, and the scale of a whole bucket."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs.scales import NORMS_OVER_RANKS, over_ranks
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import PieceSize, Segment
from lightning_gqsgd.reducers.base import ring_bytes
from lightning_gqsgd.research.simulation import VirtualRanks, average
from lightning_gqsgd.wire.plan import Plan

P = {"l1": 1, "l2": 2}


def bits(values: Tensor) -> Tensor:
    """The bits of numbers, as integers."""
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int64)


def numbers(values: Tensor) -> Tensor:
    """The numbers of bits."""
    return values.view(torch.float32 if values.dtype == torch.int32 else torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", P)
def test_a_norm_over_ranks_is_rounded_up_whatever_its_size(norm: str, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    tiny, large = info.smallest_normal * info.eps, info.max / 8
    generator = torch.Generator().manual_seed(0)
    for unit in (1.0, tiny * 1000, info.smallest_normal, large):
        scales = torch.rand(5, 100, generator=generator, dtype=torch.float64).mul(unit).to(dtype)
        found = numbers(over_ranks(bits(scales), norm)).double()
        exact = (scales.double() / unit).norm(p=P[norm], dim=0)
        below = 1e-15 * exact + (0 if dtype == torch.float32 else tiny / unit)  # it is computed in fp64
        assert (found / unit >= exact - below).all()
        assert (found / unit <= exact * (1 + 4 * info.eps) + tiny / unit).all()
        assert (found >= scales.double().amax(0)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", P)
def test_zeros_and_what_is_not_finite(norm: str, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    scales = torch.tensor(
        [[0.0, 0.0, most, 1.0, torch.inf, torch.nan], [0.0, 2.0, most, torch.nan, 1.0, torch.inf]], dtype=dtype
    )
    found = numbers(over_ranks(bits(scales), norm))
    assert found[:3].tolist() == [0.0, 2.0, most]  # what is finite stays finite
    assert not found[3:].isfinite().any()


def test_a_scale_of_the_ranks_together_is_the_mixed_norm() -> None:
    """One coordinate per rank is at the largest level exactly where its scale is the norm, so it decodes to itself."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(64, generator=generator) for _ in range(3)]
    for norm, q in (("max", math.inf), ("l2", 2)):
        for over, p in (("max", math.inf), ("l2", 2), ("l1", 1)):
            fields = {"dither": "stochastic", "levels": 1, "bits": 4, "norm": norm, "norm_over_ranks": over}
            mean = average(gradients, **fields, reducer="sum")[0]
            mixed = float(torch.stack([one.norm(p=q) for one in gradients]).norm(p=p))
            steps = mean.double() * 3 / mixed  # of one level, s = 1
            assert (steps - steps.round()).abs().max() < 1e-5


@pytest.mark.parametrize("reducer", ["sum", "gather"])
@pytest.mark.parametrize("over", NORMS_OVER_RANKS)
def test_results_do_not_depend_on_neighbours_and_pieces(over: str, reducer: str) -> None:
    """A float sum of the backend's would depend on them. Ranks add the scales of all in rank order."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(5000, generator=generator) for _ in range(3)]
    fields: dict[str, Any] = {"scale": "global", "norm_over_ranks": over, "reducer": reducer}
    together = average(gradients, segments=[Segment(4, 2000, False), Segment(5, 3000, False)], **fields)[0]
    alone = average([one[2000:].clone() for one in gradients], segments=[Segment(5, 3000, False)], **fields)[0]
    assert torch.equal(together[2000:], alone)


@pytest.mark.parametrize("reducer", ["sum", "gather", "two_shot", "tree"])
def test_a_scale_per_bucket_is_one_across_parameters_and_leaves_out_uncompressed_ones(reducer: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1_200_000, generator=generator) * torch.logspace(-2, 0, 1_200_000)
    segments = [Segment(0, 1000, False), Segment(1, 500, True), Segment(2, 1_198_500, False)]
    codec = {"codec": "exponential"} if reducer == "tree" else {"dither": "stochastic"}
    fields: dict[str, Any] = {"bits": 2, "levels": 1, "scale_per": "bucket", "reducer": reducer, **codec}
    x[1000:1500] = 1e6
    mean = average([x], segments=segments, **fields)[0]
    assert torch.equal(mean[1000:1500], x[1000:1500])
    coded = torch.cat([mean[:1000], mean[1500:]])
    assert coded.abs().unique().tolist() == pytest.approx([0.0, float(x[1500:].abs().max())], rel=0.01)
    x[1200] = torch.nan
    mean = average([x], segments=segments, **fields)[0]
    assert mean.isnan().sum() == 1 or reducer == "tree"  # whose uncompressed coordinates take two shots
    assert torch.cat([mean[:1000], mean[1500:]]).isfinite().all()


def sent_bytes(numel: int, **fields: Any) -> int:
    """Bytes that one of four ranks sends of a parameter."""
    config = resolve(GQSGDConfig(sample_every=0, **fields), 4)
    return Plan([Segment(0, numel, False)], setting_of(config, 4, torch.float32, PieceSize(1 << 24))).sent_bytes


def test_a_bucket_sends_one_scale_and_norms_of_all_ranks_those_of_all() -> None:
    numel, blocks = 1 << 14, 64
    codes = ring_bytes(numel, 4)
    assert sent_bytes(numel, reducer="sum") == codes + ring_bytes(4 * blocks, 4)
    assert sent_bytes(numel, reducer="sum", norm_over_ranks="l2") == codes + 3 * 4 * blocks
    assert sent_bytes(numel, reducer="sum", scale_per="bucket") == codes + ring_bytes(4, 4)
    assert sent_bytes(numel, reducer="sum", scale_per="bucket", norm_over_ranks="l1") == codes + 3 * 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_over_ranks": "l3"}, "norm_over_ranks='l3'"),
        ({"norm_over_ranks": "l2"}, "scale='auto' does not ask for; give scale='global' or reducer='sum'"),
        ({"norm_over_ranks": "l2", "reducer": "two_shot"}, "for scales that all ranks share"),
        ({"norm_over_ranks": "l1", "scale": "global", "norm": "power_of_two"}, "take norm='max' or 'l2'"),
        ({"norm_over_ranks": "l1", "scale": "global", "clip": 2.5}, "leave one of the two out"),
        ({"norm_over_ranks": "l1", "codec": "eden"}, "for scales that all ranks share"),
        ({"scale_per": "bucket", "codec": "eden"}, "scale_per='bucket' is not for codec='eden'"),
        ({"scale_per": "bucket", "reducer": "hierarchical", "node_size": 2}, "divides buckets among the ranks"),
        ({"scale_per": "bucket", "sparse": "gather"}, "so scale_per='bucket' does not work; leave scale_per out"),
        ({"norm_over_ranks": "l2", "reducer": "sum", "sparse": "gather"}, "leave norm_over_ranks out"),
        ({"preset": "global_qsgd_linear", "scale_per": "block"}, "stands for scale_per='bucket'"),
        ({"preset": "global_qsgd_exponential", "mantissa": 2}, "needs codec='exponential' with mantissa=0"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        VirtualRanks(4, [Segment(0, 300, False)], **fields)


def test_a_memory_whose_numbers_follow_from_a_bound_needs_a_block() -> None:
    with pytest.raises(ConfigError, match="with scale_per='bucket' it depends on the bucket"):
        resolve(GQSGDConfig(dither="stochastic", scale_per="bucket", memory="ecq", reducer="gather"), 4)


@pytest.mark.parametrize(("size", "reducer", "over"), [(4, "native", "max"), (2, "hierarchical", "l2")])
def test_nodes_share_scales_where_there_are_several(size: int, reducer: str, over: str) -> None:
    config = GQSGDConfig(reducer="hierarchical", node_size=size, scale="global", norm_over_ranks="l2", codec="linear")
    resolved = resolve(config, 4)
    assert (resolved.reducer, resolved.norm_over_ranks) == (reducer, over)


def test_the_configuration_says_its_norms() -> None:
    config = GQSGDConfig(reducer="sum", scale_per="bucket", norm_over_ranks="l2")
    assert config.describe() == "8 bits (linear, adaptive dither, one scale per bucket, l2 norm over ranks)"
    assert config.to_dict()["norm_over_ranks"] == "l2"


@pytest.mark.parametrize("fields", [{"norm": "l2"}, {"clip": 2.5}, {"norm": "l2", "clip": 2.5}], ids=str)
def test_blocks_whose_squares_are_too_small_for_fp64_are_not_lost(fields: dict[str, Any]) -> None:
    x = torch.randn(256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (mean, _) = average([1e-170 * x] * 2, codec="linear", bits=8, **fields)
    assert float((1e170 * mean - x).norm() / x.norm()) < 0.1
