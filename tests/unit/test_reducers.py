from typing import Any

import pytest
import torch

from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.config.choosing import choose_reducer
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.reducers.base import ring_bytes, shared_scale_bytes
from lightning_gqsgd.reducers.gather import Gather
from lightning_gqsgd.research.simulation import VirtualRanks, average, relative_error
from lightning_gqsgd.wire.plan import Plan
from tests.unit.test_kernels import check_sums

QUANTISING = ["sum", "two_shot", "gather"]
#: These and the one of two levels: fields for 4 ranks.
ALL_QUANTISING = [*({"reducer": reducer} for reducer in QUANTISING), {"reducer": "hierarchical", "node_size": 2}]


def fits(reducer: str, ranks: int, bits: int, dither: str) -> bool:
    """Whether a configuration is possible; if not, it is refused with a remedy."""
    try:
        config = GQSGDConfig(reducer=reducer, bits=bits, dither=dither)
        return choose_reducer(config, ranks) == reducer
    except ConfigError as error:
        return "take" not in str(error)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("reducer", QUANTISING)
def test_identical_workers_at_the_maximum_decode_to_exactly_that(reducer: str, ranks: int, bits: int) -> None:
    """No sum of linear codes can overflow.

    With stochastic rounding, the largest coordinate is a level, and comes back to the bit.
    """
    x = torch.full((600,), 0.75)
    x[::2] = -0.75
    if fits(reducer, ranks, bits, "stochastic"):
        for step in range(5):
            for mean in average([x] * ranks, step=step, bits=bits, reducer=reducer, dither="stochastic"):
                assert torch.equal(mean, x)
    if fits(reducer, ranks, bits, "subtractive"):
        means = average([x] * ranks, bits=bits, codec="linear", reducer=reducer, dither="subtractive")
        assert all(torch.equal(means[0], mean) for mean in means)
        # Dither reaches half a step beyond the last level (which makes the mean's scale larger); a wrapped sum would be
        # off by the whole range.
        levels = (2**bits - 1) // (ranks if reducer == "sum" else 1) + 1
        worst = 0.75 / (levels - 1)
        if reducer == "two_shot":
            worst += (0.75 + worst) / (levels - 1)
        assert float((means[0] - x).abs().max()) <= worst * 1.01


def test_only_sums_are_ever_refused() -> None:
    for bits in range(1, 9):
        for ranks in range(1, 9):
            assert fits("two_shot", ranks, bits, "subtractive")
            assert fits("gather", ranks, bits, "subtractive")
            assert fits("sum", ranks, bits, "subtractive") == (bits > 1 and 2**bits > ranks)
            assert fits("sum", ranks, bits, "stochastic") == (bits > 1 and 2**bits > 2 * ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sum_of_any_scale_is_exact_at_the_maximum(ranks: int) -> None:
    for largest in (3.14159, 1e-30, 3.3e38, 0.1):
        x = torch.full((300,), largest)
        assert torch.equal(average([x] * ranks, reducer="sum", dither="stochastic")[0], x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 7, 255, 256, 257, 1_000_000])
@pytest.mark.parametrize("reducer", [*QUANTISING, "native"])
def test_all_sizes_and_dtypes(reducer: str, numel: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(numel)
    gradients = [torch.randn(numel, generator=generator).to(dtype) for _ in range(3)]
    means = average(gradients, reducer=reducer)
    assert all(torch.equal(means[0], mean) for mean in means)
    assert means[0].dtype == dtype
    if numel > 100:
        assert relative_error(means[0], gradients) < {"sum": 0.05, "native": 0.005}.get(reducer, 0.02)


@pytest.mark.parametrize("fields", ALL_QUANTISING)
def test_uncompressed_segments_are_averaged_exactly(fields: dict) -> None:
    gradients = [torch.randint(-64, 64, (3000,)).float() for _ in range(4)]  # their sums are exact in any order
    segments = [Segment(0, 10, True), Segment(1, 2000, False), Segment(2, 990, True)]
    mean = average(gradients, segments=segments, **fields)[0]
    exact = torch.stack(gradients).mean(0)
    assert torch.equal(mean[:10], exact[:10])
    assert torch.equal(mean[2010:], exact[2010:])
    assert 0 < relative_error(mean[10:2010], [one[10:2010] for one in gradients]) < 0.03


@pytest.mark.parametrize("fields", ALL_QUANTISING)
def test_result_of_a_parameter_does_not_depend_on_its_neighbours(fields: dict) -> None:
    gradients = [torch.randn(5000) for _ in range(4)]
    together = average(gradients, segments=[Segment(4, 2000, False), Segment(5, 3000, False)], **fields)[0]
    alone = average([one[2000:].clone() for one in gradients], segments=[Segment(5, 3000, False)], **fields)[0]
    assert torch.equal(together[2000:], alone)


def test_step_seed_and_rank_enter_the_dither() -> None:
    x = torch.randn(2000)
    base = average([x, x])[0]
    assert torch.equal(base, average([x, x])[0])
    assert not torch.equal(base, average([x, x], step=1)[0])
    assert not torch.equal(base, average([x, x], seed=1)[0])
    # Equal gradients with independent roundings: the error falls by sqrt(2) from one rank to two.
    one, two = relative_error(average([x], reducer="gather")[0], [x]), relative_error(base, [x])
    assert 1.2 < one / two < 1.7


@pytest.mark.parametrize("fields", [{"memory": "ef"}, {"reducer": "sum", "rotation": True}], ids=str)
def test_a_mean_that_was_computed_on_a_wider_copy_stays_finite(fields: dict) -> None:
    largest = torch.full((600,), torch.finfo(torch.float16).max, dtype=torch.float16)
    means = [average([largest] * 3, step=step, bits=4, **fields)[0] for step in range(3)]
    assert all(mean.isfinite().all() for mean in means)


@pytest.mark.parametrize(
    ("fields", "own", "sent"),
    [
        ({}, 10, 2 * 2 * 10 / 3),  # a ring of 3 ranks
        ({"scale_per": "bucket"}, 1, 2 * 2 * 1 / 3),
        ({"norm_over_ranks": "l2"}, 10, 2 * 10),
    ],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 4), (torch.float32, 4), (torch.float64, 8)])
def test_bytes_of_shared_scales(fields: dict, own: int, sent: float, dtype: torch.dtype, size: int) -> None:
    config = resolve(GQSGDConfig(reducer="sum", codec="linear", **fields), 3)
    setting = setting_of(config, 3, dtype)
    assert shared_scale_bytes(10, setting) == (own * size, int(sent * size))
    assert shared_scale_bytes(0, setting) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "fields",
    [
        {"reducer": "sum"},
        {"reducer": "gather", "scale": "global"},
        {"reducer": "two_shot", "codec": "linear", "norm": "l2"},
    ],
    ids=str,
)
def test_a_rotation_rounds_gradients_of_16_bits_no_further(fields: dict, dtype: torch.dtype) -> None:
    gradients = [torch.randn(1000).to(dtype) for _ in range(3)]
    mean = average(gradients, rotation=True, **fields)[0]
    assert torch.equal(mean, average([one.float() for one in gradients], rotation=True, **fields)[0].to(dtype))


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_no_dither_is_taken_off_sums_of_nearest_levels(bits: int) -> None:
    """None was added. Both kernels agree, and sums of the outermost levels come back to the bit."""
    rows = [(700, False), (40, True)]
    case = {
        "seed": bits,
        "dtype": torch.float32,
        "bits": bits,
        "dither": "nearest",
        "block": 64,
        "ranks": 3,
        "rows": rows,
    }
    check_sums(case)
    x = torch.full((600,), 0.75)
    x[::2] = -0.75
    for mean in average([x] * 3, bits=bits, reducer="sum", dither="nearest", memory="none"):
        assert mean == pytest.approx(x, abs=1e-6)


def test_a_gather_counts_shared_scales() -> None:
    plans = {
        scale: Plan(
            [Segment(0, 2560, False)],
            setting_of(resolve(GQSGDConfig(reducer="gather", codec="linear", scale=scale), 3), 3, torch.float32),
        )
        for scale in ("local", "global")
    }
    own = plans["local"].message_bytes
    assert plans["local"].sent_bytes == 2 * own
    assert plans["global"].message_bytes == own + 10 * 4
    assert plans["global"].sent_bytes == 2 * own + ring_bytes(10 * 4, 3)


def test_a_gather_counts_the_longest_elias_codes_and_refuses_them_on_a_gpu() -> None:
    fields: dict[str, Any] = {"reducer": "gather", "coder": "elias", "dither": "stochastic", "bits": 4}
    zeros = torch.zeros(2560)
    bits = []
    for first in (zeros, torch.randn(2560)):
        ranks = VirtualRanks(3, [Segment(0, 2560, False)], torch.float32, **fields)
        ranks.average([first.clone(), zeros.clone(), zeros.clone()], 0)
        assert ranks.bytes_sent == 2 * ranks.wire_bits / 8 * 2560
        bits.append(ranks.wire_bits)
    assert bits[0] < 0.2 < 1 < bits[1]
    setting = setting_of(resolve(GQSGDConfig(**fields), 3), 3, torch.float32)
    with pytest.raises(ConfigError, match="coder='elias' is for tensors on the CPU, not on cuda"):
        Gather.check_device(setting, torch.device("cuda"))


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("fields", [{"reducer": "sum"}, {"reducer": "tree", "codec": "exponential", "mantissa": 0}])
def test_bytes_of_codes_that_are_added_include_scales_and_uncompressed_parameters(fields: dict, ranks: int) -> None:
    setting = setting_of(resolve(GQSGDConfig(block_size=256, **fields), ranks), ranks, torch.float32)
    coded = Segment(0, 2560, False)
    raw = Segment(1, 300, True)
    both, first, second = (Plan(segments, setting) for segments in ([coded, raw], [coded], [raw]))
    assert both.message_bytes == first.message_bytes + second.message_bytes
    assert both.sent_bytes == first.sent_bytes + second.sent_bytes
    assert second.message_bytes >= raw.numel * 4
    assert second.sent_bytes == ring_bytes(second.message_bytes, ranks)
    scales = 10 * 4
    codes = first.message_bytes - scales
    # In a tree of 3 ranks, the third sends its whole message to a partner.
    sent = codes + ring_bytes(codes, 2) if fields["reducer"] == "tree" and ranks == 3 else ring_bytes(codes, ranks)
    assert first.sent_bytes == sent + ring_bytes(scales, ranks)
