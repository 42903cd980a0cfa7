"""The all-gather of shards on virtual ranks."""

import math

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs import LinearCodec
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import setting_of
from lightning_gqsgd.kernels.layout import PIECE_NUMEL, Segment
from lightning_gqsgd.wire.plan import GatherPlan
from tests.unit.test_scatter import gaussian, rows

REPEATS = 400


def gathered(whole: Tensor, ranks: int, segments: list[Segment], step: int = 0, **fields) -> list[Tensor]:
    """What each rank holds afterwards, if before it has only its own part, and NaN elsewhere."""
    parts = whole.view(ranks, -1)
    held = [torch.full_like(parts, torch.nan) for _ in range(ranks)]
    for rank, own in enumerate(held):
        own[rank] = parts[rank]
    flat = [own.view(-1) for own in held]
    config = GQSGDConfig(**{"reducer": "two_shot", **fields})
    GatherPlan(segments, setting_of(config, ranks, whole.dtype)).average(flat, step, [None] * ranks)
    return flat


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_ranks_have_the_same_bits_close_to_the_parts(ranks: int, dtype: torch.dtype) -> None:
    for sizes in ([1], [7, 0, 256], [300, 257, 1000, 2]):
        segments = rows(sizes, ranks, raw=(1,))
        (whole,) = gaussian(1, ranks * sum(sizes), dtype)
        for fields in ({}, {"bits": 4}, {"rotation": True}, {"codec": "eden", "bits": 3}):
            first, *others = gathered(whole, ranks, segments, **fields)
            assert all(torch.equal(first, other) for other in others)
            error = float((first.double() - whole.double()).norm() / whole.double().norm())
            assert error < {8: 0.02, 4: 0.15, 3: 0.35}[fields.get("bits", 8)]
            if len(sizes) > 1:  # the second parameter travels uncompressed
                raw = slice(sizes[0], sizes[0] + sizes[1])
                assert torch.equal(first.view(ranks, -1)[:, raw], whole.view(ranks, -1)[:, raw])


def test_several_pieces_are_the_pieces_of_one() -> None:
    sizes = [PIECE_NUMEL // 2 + 5, 3, PIECE_NUMEL]
    (whole,) = gaussian(1, 2 * sum(sizes))
    first, second = gathered(whole, 2, rows(sizes, 2))
    assert torch.equal(first, second)
    setting = setting_of(GQSGDConfig(reducer="two_shot"), 2, torch.float32)
    assert len(GatherPlan(rows(sizes, 2), setting)._pieces) == 4
    alone, _ = gathered(whole.view(2, -1)[:, : sizes[0]].reshape(-1), 2, rows(sizes[:1], 2))
    assert torch.equal(first.view(2, -1)[:, : sizes[0]].reshape(-1)[: PIECE_NUMEL // 4], alone[: PIECE_NUMEL // 4])


def test_bytes() -> None:
    """A rank sends its part to the other three: half a piece of codes, 2 bytes of scale for each block of 128."""
    setting = setting_of(GQSGDConfig(bits=4, reducer="two_shot"), 4, torch.float32)
    plan = GatherPlan(rows([PIECE_NUMEL // 4, PIECE_NUMEL // 4], 4), setting)
    assert plan.sent_bytes == 3 * PIECE_NUMEL // 2 * (4 / 8 + 2 / 128)
    assert not plan.is_native


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_values_reach_all_ranks_and_no_other_block(bad: float) -> None:
    (whole,) = gaussian(1, 3000)
    whole[1300] = bad
    for one in gathered(whole, 3, rows([1000], 3)):
        assert not one[1300].isfinite()
        assert one[:1256].isfinite().all()
        assert one[2000:].isfinite().all()


@pytest.mark.parametrize("dither", ["subtractive", "stochastic"])
def test_error_is_that_of_one_rounding(dither: str) -> None:
    whole = torch.rand(1 << 17, generator=torch.Generator().manual_seed(1)) * 2 - 1
    whole[::256] = 1.0  # the scale of each block
    errors = [
        gathered(whole, 4, rows([1 << 15], 4), step, codec="linear", dither=dither)[0] - whole for step in range(4)
    ]
    found = float(torch.stack(errors).double().square().mean())
    assert found == pytest.approx(LinearCodec(8, dither).error_variance(), rel=0.05)


def test_unbiased_and_repeatable() -> None:
    (whole,) = gaussian(1, 3072)
    total = torch.zeros(3072, dtype=torch.float64)
    squares = torch.zeros_like(total)
    for step in range(REPEATS):
        error = gathered(whole, 3, rows([700, 324], 3), step, bits=4)[0].double() - whole
        total += error
        squares += error.square()
    of_one = math.sqrt(float(squares.sum()) / REPEATS)
    assert float((total / REPEATS).norm()) < 1.3 * of_one / math.sqrt(REPEATS)
    again = [gathered(whole, 3, rows([700, 324], 3), 5, bits=4)[0] for _ in range(2)]
    assert torch.equal(*again)  # the forward and the backward pass of a step have the same weights
