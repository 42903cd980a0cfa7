"""Random configurations and random tensors: refused when they are built, or reduced right.

Virtual ranks run the reducers of training in one process. `tests/unit` compares kernels; here the whole way counts.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.layout import Segment
from lightning_gqsgd.memory import StabilityWarning
from lightning_gqsgd.simulation.virtual import VirtualRanks
from tests.reliability.knobs import chance, scaled

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
#: Values of the fields of `GQSGDConfig`, usual ones more than once.
FIELDS: dict[str, list[Any]] = {
    "codec": ["auto", "linear", "companded", "eden", "exponential", "sign", "top_k"],
    "bits": [None, 1, 2, 3, 4, 5, 6, 7, 8, 32],
    "levels": [None, None, None, 1, 2, 3, 7, 100, 2**40],
    "mantissa": [0, 0, 0, 1, 2, 3],
    "density": [0.01, 0.01, 1e-9, 0.5, 1.0, 1],
    "block_size": [0, 0, 16, 24, 128, 256, 512, 1000, 65536],
    "norm": ["max", "max", "l2", "power_of_two"],
    "clip": [0.0, 0.0, 0.0, 1e-6, 1.0, 2.5, 1e6],
    "scale": ["auto", "auto", "global", "local"],
    "scale_per": ["block", "block", "parameter"],
    "dither": ["adaptive", "adaptive", "subtractive", "stochastic", "nearest"],
    "rotation": [False, False, True],
    "coder": ["fixed", "fixed", "elias"],
    "reducer": ["auto", "auto", "sum", "two_shot", "gather", "tree", "native", "hierarchical"],
    "node_size": [0, 1, 2, 3],
    "memory": ["auto", "none", "ef", "ecq", "diana", "ef21", {"alpha": 0.2, "beta": 0.9, "rho": 0.0}],
    "memory_down": ["auto", "auto", "none", "ef", "ecq", "diana", "ef21"],
    "seed": [0, 1, 2**63 - 1],
}
KINDS = [
    "normal",
    "normal",
    "zero",
    "negative zero",
    "denormal",
    "tiny",
    "largest",
    "huge",
    "mixed",
    "sparse",
    "constant",
]
#: Kinds whose coordinates plus a memory, or whose sums of squares, need not be finite.
NEAR_OVERFLOW = ("largest", "huge")
NOT_FINITE = (float("nan"), float("inf"), -float("inf"))


def drawn_gradients(numbers: random.Random, ranks: int, numel: int, dtype: torch.dtype, kind: str) -> list[Tensor]:
    """A gradient of each rank."""
    generator = torch.Generator().manual_seed(numbers.randrange(2**31))
    info = torch.finfo(dtype)
    made = []
    for _ in range(ranks):
        x = torch.randn(numel, generator=generator, dtype=torch.float64)
        exponents = torch.randint(-5, 4, (numel,), generator=generator, dtype=torch.float64)
        x = {
            "normal": x,
            "zero": x * 0,
            "negative zero": -0.0 * x.abs(),
            "denormal": x * info.smallest_normal / 8,
            "tiny": x * info.smallest_normal * 4,
            "largest": x.sign() * info.max,
            "huge": (x / 4).clamp(-1, 1) * info.max,
            "mixed": x * 10**exponents,
            "sparse": x * (torch.rand(numel, generator=generator) < 0.03),
            "constant": torch.full_like(x, numbers.choice([1e-3, 3.0, -7.0])),
        }[kind]
        made.append(x.to(dtype))
    return made


def may_overflow(config: GQSGDConfig, dtype: torch.dtype, is_raw: bool) -> bool:
    """Whether gradients near the largest number may have a mean that is not finite, as the documentation says."""
    # Plain DDP divides before it adds, and rounds up or down where the number of ranks is no power of two.
    adds = is_raw or config.reducer == "hierarchical"  # ranks of a node add fp32 numbers
    return bool(config.remembers or dtype == torch.float64 or config.rotation or adds)


def check_means(
    means: list[Tensor], gradients: list[Tensor], segments: list[Segment], config: GQSGDConfig, kind: str
) -> None:
    """Equal bits on all ranks; what is not finite stays so, and nothing else; errors within what a block can have."""
    first, ranks = means[0], len(gradients)
    for other in means[1:]:
        assert torch.equal(first.view(torch.uint8), other.view(torch.uint8)), "ranks differ"
    exact = torch.stack([gradient.double() / ranks for gradient in gradients]).sum(0)
    least = 2.0**-1010 if first.dtype == torch.float64 else 2.0**-115
    start = 0
    for segment in segments:
        is_raw = segment.raw or config.reducer == "native"
        every = torch.stack([gradient[start : start + segment.numel].double() for gradient in gradients])
        for low in range(0, segment.numel, 1 if is_raw else config.block_size):
            part = slice(low, min(low + (1 if is_raw else config.block_size), segment.numel))
            mean, here = first[start : start + segment.numel][part].double(), every[:, part]
            if not here.isfinite().all():
                assert not mean.isfinite().any(), "what is not finite was lost"
                continue
            if kind in NEAR_OVERFLOW and may_overflow(config, first.dtype, is_raw):
                continue
            shares_scale = not is_raw and config.scale_per == "parameter"
            if shares_scale and not every.isfinite().all():
                continue
            assert mean.isfinite().all(), "what is finite became NaN or infinite"
            if not config.remembers:
                bound = 4 * (every if shares_scale else here).norm(dim=1).max() + least
                assert (mean - exact[start : start + segment.numel][part]).abs().max() <= 1.01 * bound, (
                    "far from the mean"
                )
        start += segment.numel


def check_case(numbers: random.Random) -> str:
    """Draw a configuration and gradients; returns what became of them."""
    fields = {name: numbers.choice(values) for name, values in FIELDS.items() if numbers.random() < 0.3}
    ranks, dtype = numbers.choice([1, 2, 2, 3, 4, 6, 8]), numbers.choice(DTYPES)
    segments = [
        Segment(number, numbers.choice([0, 1, 7, 128, 129, 300, 1000]), numbers.random() < 0.15)
        for number in range(numbers.randrange(1, 4))
    ]
    numel = sum(segment.numel for segment in segments)
    kind = numbers.choice(KINDS)
    try:
        virtual = VirtualRanks(ranks, segments, dtype, None, **fields)
    except ConfigError:
        return "refused"
    gradients = drawn_gradients(numbers, ranks, numel, dtype, kind)
    if numel and numbers.random() < 0.3:
        rank, at = numbers.randrange(ranks), numbers.choice([0, numel - 1, numbers.randrange(numel)])
        gradients[rank][at] = value = numbers.choice(NOT_FINITE)
        if numbers.random() < 0.2:
            gradients[(rank + 1) % ranks][at] = -value  # infinities of both signs
    for step in range(2):
        try:
            check_means(virtual.average(gradients, step), gradients, segments, virtual.config, kind)
        except Exception as error:
            raise AssertionError(
                f"{error}: {fields}, {ranks} ranks, {dtype}, {segments}, {kind}, step {step}"
            ) from error
    return "reduced"


def check_cases(name: str, count: int) -> None:
    """Draw cases."""
    numbers, counts = chance("properties", name), Counter[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StabilityWarning)
        for _ in range(count):
            counts[check_case(numbers)] += 1
    print(dict(counts))
    assert counts["reduced"] > count / 20


def test_an_accepted_configuration_reduces_right() -> None:
    check_cases("few", scaled(80))


@pytest.mark.reliability
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(4))
def test_every_accepted_configuration_reduces_right(number: int) -> None:
    check_cases(f"many {number}", scaled(1500))


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
    "nearest": {"dither": "nearest", "memory": "none", "reducer": "gather"},
    "memory": {"codec": "linear", "memory": "diana", "memory_down": "ef21", "reducer": "two_shot"},
}


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(d, marks=[pytest.mark.slow] * (d not in (torch.float32, torch.bfloat16))) for d in DTYPES],
    ids=str,
)
@pytest.mark.parametrize("name", REDUCERS)
def test_what_is_not_finite_on_one_rank_is_a_block_of_nan_on_all(name: str, dtype: torch.dtype) -> None:
    ranks, segments = 4, [Segment(0, 300, False), Segment(1, 40, True), Segment(2, 130, False)]
    places = [0, 127, 128, 299, 300, 339, 340, 469]  # first and last of blocks, of raw coordinates and of the tensor
    for number, (value, place) in enumerate((value, place) for value in NOT_FINITE for place in places):
        virtual = VirtualRanks(ranks, segments, dtype, None, **{"block_size": 128, **REDUCERS[name]})
        gradients = drawn_gradients(chance("finite", number), ranks, 470, dtype, "normal")
        gradients[number % ranks][place] = value
        check_means(virtual.average(gradients, 0), gradients, segments, virtual.config, "normal")
