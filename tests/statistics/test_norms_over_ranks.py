"""Global-QSGD's operators under every norm ‖·‖_{q,p}: no bias, and errors within θ, which flat gradients attain."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs.scales import NORMS_OVER_RANKS
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.research import theory
from lightning_gqsgd.research.simulation import VirtualRanks

RANKS, D = 4, 2048
NORMS = list(itertools.product(("max", "l2"), NORMS_OVER_RANKS))


def _one_coordinate(rank: int, generator: torch.Generator) -> Tensor:
    """All but one coordinate are zero, another one on each rank: the sum of norms is sqrt(n) times the l2 norm."""
    return (torch.arange(D) == 7 * rank).float()


GRADIENTS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "normal": lambda rank, generator: torch.randn(D, generator=generator),
    "flat": lambda rank, generator: torch.ones(D),
    "one rank is large": lambda rank, generator: torch.randn(D, generator=generator) * 10.0 ** (rank - 1),
    "heavy": lambda rank, generator: torch.randn(D, generator=generator) ** 5,
    "one coordinate": _one_coordinate,
}


def gradients_of(kind: str) -> list[Tensor]:
    """A gradient of each rank."""
    generator = torch.Generator().manual_seed(0)
    return [GRADIENTS[kind](rank, generator) for rank in range(RANKS)]


def measured(gradients: Sequence[Tensor], repeats: int, **fields: Any) -> tuple[float, float]:
    """θ of the estimate, and z of its bias: that of the mean error along a fixed random direction."""
    virtual = VirtualRanks(RANKS, [Segment(0, D, raw=False)], **fields)
    exact = torch.stack([one.double() for one in gradients]).mean(0)
    squares = sum(float(one.double().square().sum()) for one in gradients) / RANKS
    direction = torch.randn(D, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + exact.sign()
    errors = [virtual.mean(gradients, step).double() - exact for step in range(repeats)]
    along = torch.stack([error @ direction for error in errors])
    spread = max(float(along.std()), 1e-6 * math.sqrt(squares))
    z = float(along.mean()) / spread * math.sqrt(repeats)
    return sum(float(error.square().sum()) for error in errors) / repeats / squares, z


def cases(kinds: Sequence[str]) -> list[Any]:
    """Every norm with gradients of unequal size, and one norm with normal ones; the rest are slow tests."""
    return [
        pytest.param(norm, over, kind, marks=[] if kind == "one rank is large" or is_first else pytest.mark.slow)
        for norm, over in NORMS
        for kind in kinds
        for is_first in [(norm, over, kind) == ("l2", "l2", "normal")]
    ]


@pytest.mark.parametrize(("norm", "over", "kind"), cases([*GRADIENTS]))
def test_linear_dithering_has_no_bias_and_an_error_within_theta(norm: str, over: str, kind: str) -> None:
    for levels, bits in ((1, 4), (15, 7)):
        fields = {"norm": norm, "norm_over_ranks": over, "levels": levels, "bits": bits}
        theta, z = measured(gradients_of(kind), 60, preset="global_qsgd_linear", **fields)
        # θ holds on average; with one coordinate that is not zero, 60 steps have few draws.
        assert theta < 1.2 * theory.theta_linear(D, RANKS, levels, over)
        assert abs(z) < 4.5


@pytest.mark.parametrize(("over", "p"), [("max", math.inf), ("l2", 2), ("l1", 1)])
@pytest.mark.parametrize("levels", [1, 4])
def test_flat_gradients_have_all_of_theta_but_for_the_square_of_the_mean(over: str, p: float, levels: int) -> None:
    """n equal gradients of d ones under the l2 norm: N = n^(1/p) sqrt(d), and the error is (N/s - 1)/n A exactly, where
    no coordinate reaches the first level. θ is attained for p = 1 and 2, where sqrt(d)/(n s) of print is not."""
    fields = {"norm": "l2", "norm_over_ranks": over, "levels": levels, "bits": 6}
    theta, _ = measured(gradients_of("flat"), 60, preset="global_qsgd_linear", **fields)
    scale = (1 if p == math.inf else RANKS ** (1 / p)) * math.sqrt(D)
    assert theta == pytest.approx((scale / levels - 1) / RANKS, rel=0.05)
    bound = theory.theta_linear(D, RANKS, levels, over)
    if p < math.inf:
        assert theta > 0.9 * bound
        assert theta > 1.5 * math.sqrt(D) / (RANKS * levels)
    assert theta < 1.03 * bound


@pytest.mark.parametrize(("norm", "over", "kind"), cases(["normal", "flat", "one rank is large", "heavy"]))
def test_exponential_dithering_has_no_bias_and_an_error_within_theta(norm: str, over: str, kind: str) -> None:
    """Gathered codes are added exactly, those of the preset along a tree."""
    fields = {"norm": norm, "norm_over_ranks": over, "scale_per": "bucket", "scale": "global", "min_numel": 0}
    for levels, bits in ((4, 4), (100, 8)):
        exact, z = measured(
            gradients_of(kind), 60, codec="exponential", levels=levels, bits=bits, reducer="gather", **fields
        )
        assert exact < 1.05 * theory.theta_exponential(D, RANKS, levels, 0, over)
        assert abs(z) < 4.5


@pytest.mark.parametrize(
    ("over", "kind"),
    [
        pytest.param(over, kind, marks=[] if over == "max" or kind == "one rank is large" else pytest.mark.slow)
        for over in NORMS_OVER_RANKS
        for kind in ("normal", "flat", "one rank is large", "heavy")
    ],
)
def test_the_preset_of_exponential_dithering_has_the_noise_of_a_tree(over: str, kind: str) -> None:
    added, z = measured(gradients_of(kind), 60, preset="global_qsgd_exponential", norm_over_ranks=over)
    assert added < 1.05 * theory.tree_second_moment(RANKS, aligned=True)
    assert abs(z) < 4.5


def test_under_the_papers_scale_a_small_gradient_is_lost_in_a_bucket_with_a_large_one() -> None:
    """Why scales of blocks are the default: each layer here has a tenth of the size of the one before it."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(4096, generator=generator) * torch.logspace(0, -3, 4096) for _ in range(RANKS)]
    exact = torch.stack(gradients).double().mean(0)[-256:]

    def error(preset: str) -> float:
        virtual = VirtualRanks(RANKS, [Segment(0, 4096, raw=False)], preset=preset)
        return float((virtual.mean(gradients, 0).double()[-256:] - exact).norm() / exact.norm())

    assert error("global_qsgd_linear") > 3
    assert error("gqsgd_sum") < 0.2
    assert error("gqsgd") < 0.02
