"""Every reducer with every kind of codec and memory: what is not finite, what is near the largest number, and means.

`test_properties` draws configurations at random; here are those that each way through the package needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.research.simulation.virtual import VirtualRanks, average
from tests.reliability.knobs import chance
from tests.reliability.test_properties import DTYPES, NOT_FINITE, check_means, drawn_gradients

REDUCERS: dict[str, dict[str, Any]] = {
    "two_shot": {"reducer": "two_shot"},
    "gather": {"reducer": "gather"},
    "sum": {"reducer": "sum", "bits": 8},
    "tree": {"reducer": "tree", "codec": "exponential"},
    "native": {"reducer": "native"},
    "hierarchical": {"reducer": "hierarchical", "node_size": 2},
    "elias": {"reducer": "gather", "coder": "elias", "dither": "stochastic"},
    "eden": {"codec": "eden", "reducer": "two_shot"},
    "sign": {"codec": "sign", "memory": "none", "reducer": "gather"},
    "top_k": {"codec": "top_k", "memory": "none", "reducer": "gather"},
    "rotation": {"rotation": True, "reducer": "two_shot"},
    "l2": {"norm": "l2", "reducer": "two_shot"},
    "power_of_two": {"norm": "power_of_two", "reducer": "two_shot"},
    "clip": {"clip": 2.5, "reducer": "two_shot"},
    "per parameter": {"scale_per": "parameter", "reducer": "two_shot"},
    "global": {"scale": "global", "codec": "linear", "reducer": "gather"},
    "per bucket": {"scale_per": "bucket", "reducer": "two_shot"},
    "l2 over ranks": {"norm_over_ranks": "l2", "reducer": "sum", "bits": 8},
    "l1 over ranks": {"norm_over_ranks": "l1", "norm": "l2", "scale": "global", "codec": "linear", "reducer": "gather"},
    "one scale": {"scale_per": "bucket", "norm_over_ranks": "l2", "reducer": "tree", "codec": "exponential"},
    "nearest": {"dither": "nearest", "memory": "none", "reducer": "gather"},
    "memory": {"codec": "linear", "memory": "diana", "memory_down": "ef21", "reducer": "two_shot"},
    "float": {"codec": "float"},
    "ef": {"codec": "linear", "memory": "ef", "reducer": "gather"},
    "shared": {"codec": "linear", "memory": "shared", "reducer": "two_shot"},
}


RANKS = 4
SEGMENTS = [Segment(0, 300, False), Segment(1, 40, True), Segment(2, 130, False)]
#: First and last of blocks, of raw coordinates and of the tensor.
PLACES = (0, 127, 128, 299, 300, 339, 340, 469)


def check_not_finite(name: str, dtype: torch.dtype, number: int, place: int, values: dict[int, float]) -> None:
    """Average gradients of which some ranks' are not finite at a place, and check what became of it."""
    virtual = VirtualRanks(RANKS, SEGMENTS, dtype, None, **{"block_size": 128, **REDUCERS[name]})
    gradients = drawn_gradients(chance("finite", number), RANKS, 470, dtype, "normal")
    for rank, value in values.items():
        gradients[rank][place] = value
    check_means(virtual.average(gradients, 0), gradients, SEGMENTS, virtual.config, "normal")


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(dtype, marks=[pytest.mark.slow] * (dtype != torch.float32)) for dtype in DTYPES],
    ids=str,
)
@pytest.mark.parametrize("name", REDUCERS)
def test_what_is_not_finite_on_any_rank_is_a_block_of_nan_on_all(name: str, dtype: torch.dtype) -> None:
    """Every place, and every rank twice; the test below has each place on each rank."""
    for number, (place, rank) in enumerate(zip(PLACES, itertools.cycle(range(RANKS)), strict=False)):
        check_not_finite(name, dtype, number, place, {rank: NOT_FINITE[number % len(NOT_FINITE)]})


@pytest.mark.reliability
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", REDUCERS)
def test_every_value_that_is_not_finite_on_every_rank_and_infinities_of_both_signs(
    name: str, dtype: torch.dtype
) -> None:
    infinity = float("inf")
    for number, (place, rank) in enumerate(itertools.product(PLACES, range(RANKS))):
        for value in NOT_FINITE:
            check_not_finite(name, dtype, number, place, {rank: value})
        for other in range(RANKS):
            if other != rank:
                check_not_finite(name, dtype, number, place, {rank: infinity, other: -infinity})


#: Configurations whose results in fp32 are beyond the range of fp16, where gradients are at its ends.
NEAR_THE_END: dict[str, dict[str, Any]] = {
    "diana two_shot": {"codec": "linear", "memory": "diana", "reducer": "two_shot"},
    "ef gather": {"codec": "linear", "memory": "ef", "reducer": "gather"},
    "ecq sum": {"codec": "linear", "memory": "ecq", "reducer": "sum", "bits": 8},
    "rotation sum": {"codec": "linear", "rotation": True, "reducer": "sum", "bits": 8},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 9])
def test_small_coordinates_beside_one_near_the_largest_number_stay_small(ranks: int, dtype: torch.dtype) -> None:
    largest = 0.9 * torch.finfo(dtype).max
    x = torch.tensor([largest, 1e-8 * largest, 1e-18 * largest, 0, *[0] * 60], dtype=dtype)
    (mean, *_) = average([x] * ranks, reducer="tree", codec="exponential", block_size=64)
    assert (mean[1:3] / x[1:3] < 4).all()
    assert mean[0] > x[0] / 4


@pytest.mark.parametrize("name", NEAR_THE_END)
def test_the_largest_fp16_numbers_stay_finite_with_memories_and_rotations(name: str) -> None:
    segments = [Segment(0, 300, False)]
    for number in range(4):
        virtual = VirtualRanks(RANKS, segments, torch.float16, None, **{"block_size": 128, **NEAR_THE_END[name]})
        one = drawn_gradients(chance("largest", number), 1, 300, torch.float16, "largest")[0]
        for step in range(4):
            for mean in virtual.average([one] * RANKS, step):
                assert mean.isfinite().all(), step


#: Steps that are averaged, and the relative L2 error of their average at most. Without its memory, a biased codec has
#: an error that no number of steps takes away; results of zeros have 1.0.
AVERAGED, MOST_ERROR, MOST_BIASED_ERROR = 64, 0.2, 0.9
AVERAGES: dict[str, dict[str, Any]] = {
    **REDUCERS,
    "top_k": {"codec": "top_k", "memory": "none", "reducer": "gather", "density": 0.5},
    "sums of few bits": {"reducer": "sum", "bits": 5},
    "2 bits": {"bits": 2},
    "EDEN, 1 bit": {"codec": "eden", "bits": 1},
    "sign, ef": {"codec": "sign", "memory": "ef", "reducer": "gather"},
    "top_k, ef": {"codec": "top_k", "memory": "ef", "density": 0.2},
    "top_k, ef21": {"codec": "top_k", "memory": "ef21", "density": 0.2},
    "ecq": {"codec": "linear", "memory": "ecq", "reducer": "sum", "bits": 8},
    "diana": {"codec": "linear", "memory": "diana", "reducer": "two_shot", "bits": 4},
}
#: What a reducer could do wrong with the mean in every step.
MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "the other sign": torch.neg,
    "a sum": lambda mean: mean * RANKS,
}


def averaged(virtual: VirtualRanks, gradients: list[Tensor]) -> Tensor:
    """The average of the results of several steps with the same gradients."""
    return torch.stack([virtual.mean(gradients, step).double() for step in range(AVERAGED)]).mean(0)


def check_average(average: Tensor, gradients: list[Tensor], is_biased: bool) -> None:
    """The average of several steps is near the mean of the gradients."""
    exact = torch.stack([gradient.double() for gradient in gradients]).mean(0)
    error = float((average - exact).norm() / exact.norm())
    assert error <= (MOST_BIASED_ERROR if is_biased else MOST_ERROR), f"relative error {error:.2f}"


@pytest.mark.parametrize("name", AVERAGES)
def test_the_average_of_steps_is_near_the_mean_and_those_of_mistakes_are_not(name: str) -> None:
    virtual = VirtualRanks(RANKS, [Segment(0, 300, False)], torch.float32, None, block_size=128, **AVERAGES[name])
    gradients = drawn_gradients(chance("average", name), RANKS, 300, torch.float32, "normal")
    config = virtual.config
    average, is_biased = averaged(virtual, gradients), bool((config.biased or config.clip) and not config.remembers)
    check_average(average, gradients, is_biased)
    for mistake in MISTAKES.values():
        with pytest.raises(AssertionError, match="relative error"):
            check_average(mistake(average), gradients, is_biased)


#: Configurations whose error in one step theory predicts, and is smaller than the mean itself.
PREDICTED = [
    name
    for name in REDUCERS
    if name not in ("sign", "top_k", "clip", "nearest", "memory", "ef", "shared", "tree", "eden", "one scale")
]


@pytest.mark.parametrize("name", PREDICTED)
def test_a_mistake_in_the_mean_of_one_step_is_seen_where_theory_predicts_the_error(name: str) -> None:
    segments = [Segment(0, 300, False)]
    virtual = VirtualRanks(RANKS, segments, torch.float32, None, block_size=128, **REDUCERS[name])
    gradients = drawn_gradients(chance("mistakes", name), RANKS, 300, torch.float32, "normal")
    means = virtual.average(gradients, 0)
    check_means(means, gradients, segments, virtual.config, "normal")
    for mistake in MISTAKES.values():
        with pytest.raises(AssertionError, match="from the mean"):
            check_means([mistake(mean) for mean in means], gradients, segments, virtual.config, "normal")
