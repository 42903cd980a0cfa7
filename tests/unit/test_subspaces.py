"""Random subspaces: messages of a part of the rotated coordinates, with an error memory and without."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.reducers.base import StepKeys
from lightning_gqsgd.research.simulation import subspaces
from lightning_gqsgd.research.simulation.subspaces import SubspaceRanks

SIGNS = {"codec": "sign", "bits": 1}
#: One rank's gradient, whose coordinates differ in size.
GRADIENT = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_message_takes_its_share_of_the_error_off(share: float) -> None:
    losses = []
    for seed in range(60):
        ranks = SubspaceRanks(1, 1000, share, torch.float64, True, **SIGNS, seed=seed)
        found = ranks.mean([GRADIENT], 0)
        assert GRADIENT - found == pytest.approx(ranks.errors()[0])
        losses.append(float(ranks.errors().square().sum() / GRADIENT.square().sum()))
    assert sum(losses) / len(losses) == pytest.approx(1 - 2 / math.pi * share * 1000 / 1024, abs=0.01)


def test_the_memory_sends_everything_in_the_long_run() -> None:
    ranks = SubspaceRanks(2, 1000, 0.5, torch.float64, True, **SIGNS)
    total = sum(ranks.mean([GRADIENT, -3 * GRADIENT], step) for step in range(60)) / 60
    assert float((total + GRADIENT).norm()) < 0.15 * float(GRADIENT.norm())


@pytest.mark.slow
def test_without_a_memory_the_mean_is_right_and_the_error_is_that_of_the_formula() -> None:
    ranks = SubspaceRanks(2, 1000, 0.5, torch.float64, False, codec="eden", bits=1, block_size=512)
    errors = torch.stack([ranks.mean([GRADIENT, GRADIENT], step) - GRADIENT for step in range(300)])
    squares = float(errors.square().sum(1).mean())
    assert 300 * float(errors.mean(0).square().sum()) == pytest.approx(squares, rel=0.25)
    # Both ranks send the same places, with signs of their own.
    places = 1024 / 500
    expected = places - 1 + places * (math.pi / 2 - 1) / 2
    assert squares / float(GRADIENT.square().sum()) == pytest.approx(expected, rel=0.07)


def test_bits_are_those_of_the_coordinates_that_travel() -> None:
    numel = 1 << 16
    ranks = SubspaceRanks(3, numel, 0.25, torch.float32, True, **SIGNS)
    assert ranks.wire_bits == pytest.approx((1 + 16 / 256) / 4, rel=0.01)
    ranks.mean([torch.ones(numel)] * 3, 0)
    assert ranks.bytes_sent == 2 * round(ranks.wire_bits * numel / 8)


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_share_out_of_its_range_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=rf"share={share} is out of range: above 0, and at most 1"):
        SubspaceRanks(1, 16, share, torch.float32, True, **SIGNS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_signs_of_the_rotation_have_a_stream_of_their_own(ranks: int) -> None:
    """Otherwise, roundings depend on the signs, and the decoded vector is biased."""
    seed = 3
    given = {"codec": "linear", "bits": 2, "dither": "stochastic", "seed": seed}
    group = SubspaceRanks(ranks, 64, 1.0, torch.float32, False, **given)
    signs: list[Any] = []
    codes: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        rotate = subspaces.rotated
        patch.setattr(subspaces, "rotated", lambda x, b, key, **more: signs.append(key) or rotate(x, b, key, **more))
        mean = group._codes.mean
        patch.setattr(group._codes, "mean", lambda one, step: codes.append(step) or mean(one, step))
        for step in range(3):
            group.mean([torch.ones(64)] * ranks, step)
    used = {key for step in codes for key in (*StepKeys.of(seed, step, 1).up, StepKeys.of(seed, step, 1).down)}
    assert used.isdisjoint(signs)
