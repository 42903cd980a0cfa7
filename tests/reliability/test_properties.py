"""Random configurations and random tensors: refused when they are built, or reduced right.

Virtual ranks run the reducers of training in one process. `tests/unit` compares kernels; here the whole way counts.
"""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.choosing import codec_of
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.reducers import REDUCERS as REDUCERS_BY_NAME
from lightning_gqsgd.reducers.memory import StabilityWarning
from lightning_gqsgd.research.simulation.virtual import VirtualRanks
from tests.reliability.knobs import chance, scaled

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
#: Values of the fields of `GQSGDConfig`, usual ones more than once.
FIELDS: dict[str, list[Any]] = {
    "codec": ["auto", "linear", "companded", "eden", "trellis", "exponential", "sign", "top_k"],
    "bits": [None, 1, 2, 3, 4, 5, 6, 7, 8, 32],
    "levels": [None, None, None, 1, 2, 3, 7, 100, 2**40],
    "mantissa": [0, 0, 0, 1, 2, 3],
    "density": [0.01, 0.01, 1e-9, 0.5, 1.0, 1],
    "block_size": [0, 0, 16, 24, 128, 256, 512, 1000, 65536],
    "norm": ["max", "max", "l2", "power_of_two"],
    "clip": [0.0, 0.0, 0.0, 1e-6, 1.0, 2.5, 1e6],
    "scale": ["auto", "auto", "global", "local"],
    "scale_per": ["block", "block", "parameter", "bucket"],
    "dither": ["adaptive", "adaptive", "subtractive", "stochastic", "nearest"],
    "rotation": [False, False, True],
    "coder": ["fixed", "fixed", "elias"],
    "reducer": ["auto", "auto", "sum", "two_shot", "gather", "tree", "native", "hierarchical"],
    "node_size": [0, 1, 2, 3],
    "memory": ["auto", "none", "ef", "ecq", "diana", "ef21", "shared", {"alpha": 0.2, "beta": 0.9, "rho": 0.0}],
    "memory_down": ["auto", "auto", "none", "ef", "ecq", "diana", "ef21"],
    "seed": [0, 1, 2**63 - 1],
    "norm_over_ranks": ["max", "l2", "l1"],
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
#: Errors of a block at most, in units of the root mean square error that theory expects; a block may have 1 coordinate.
MOST_DEVIATIONS = 5.0


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
    if dtype == torch.float16:
        return is_raw  # the others compute in fp32, and results are put into the range of fp16
    adds = is_raw or config.reducer == "hierarchical"  # ranks of a node add fp32 numbers
    return bool(config.remembers or dtype == torch.float64 or config.rotation or adds)


def predicted_error(config: GQSGDConfig, ranks: int, d: int, size: Tensor) -> float | None:
    """L2 error of a block's mean that theory expects at most of gradients with these sizes; None: it says nothing.

    Args:
        config: the configuration.
        ranks: number of ranks.
        d: coordinates of the block.
        size: what has one scale: the coordinates of all ranks, [ranks, numel].
    """
    if config.biased or config.clip or config.remembers:
        return None
    codec = codec_of(config)
    is_float = config.codec == "float" and config.num_bits < 32
    variance = codec.error_variance() if is_float else REDUCERS_BY_NAME[config.reducer].mean_error(codec, ranks)
    largest = float(size.abs().max())
    if largest == 0:
        return 0.0
    if config.norm == "l2" or config.rotation or config.codec in ROTATING:
        norms = (size / largest).norm(dim=1)
        norms /= math.sqrt(d) if config.codec in ROTATING else 1.0  # in units of the root mean square
    else:
        norms = (size / largest).abs().amax(dim=1) * (2 if config.norm == "power_of_two" else 1)
    scale = largest * float(norms.norm(p=P_OVER_RANKS[config.norm_over_ranks]))
    return math.sqrt(d * variance) * scale


#: Codecs whose scale is about a root mean square.
ROTATING = ("eden", "trellis")
#: p of each norm over ranks.
P_OVER_RANKS = {"max": math.inf, "l2": 2, "l1": 1}


def check_distance(
    mean: Tensor, exact: Tensor, predicted: float | None, size: Tensor, dtype: torch.dtype, p: float
) -> None:
    """A block's mean is about as near to the exact one as theory says, or else within the block's size; ``p``: of the
    norm over ranks."""
    least = 2.0**-1010 if dtype == torch.float64 else 2.0**-115
    largest = max(float(size.abs().max()), least)
    away = largest * float(((mean - exact) / largest).norm())
    info = torch.finfo(dtype)  # plain DDP rounds each rank's part, and each sum
    rounding = math.sqrt(len(mean)) * (4 * info.eps * largest + len(size) * info.smallest_normal * info.eps + least)
    if predicted is not None:
        assert away <= MOST_DEVIATIONS * predicted + rounding, "farther from the mean than theory says"
    bound = 4 * largest * float((size / largest).norm(dim=1).norm(p=p)) + least
    assert (mean - exact).abs().max() <= 1.01 * bound, "far from the mean"


def check_means(
    means: list[Tensor], gradients: list[Tensor], segments: list[Segment], config: GQSGDConfig, kind: str
) -> None:
    """Equal bits on all ranks; what is not finite stays so, and nothing else; errors within what a block can have."""
    first, ranks = means[0], len(gradients)
    for other in means[1:]:
        assert torch.equal(first.view(torch.uint8), other.view(torch.uint8)), "ranks differ"
    exact = torch.stack([gradient.double() / ranks for gradient in gradients]).sum(0)
    start = 0
    numels = [segment.numel for segment in segments]
    of_segments = zip(segments, torch.stack([one.double() for one in gradients]).split(numels, dim=1), strict=True)
    together = torch.cat([part for segment, part in of_segments if not segment.raw] or [torch.empty(ranks, 0)], dim=1)
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
            shares_scale = not is_raw and config.scale_per != "block"
            sharing = together if config.scale_per == "bucket" else every
            if shares_scale and not sharing.isfinite().all():
                continue
            assert mean.isfinite().all(), "what is finite became NaN or infinite"
            if not config.remembers and here.numel():
                size = sharing if shares_scale else here
                is_exact = segment.raw and config.codec != "float"
                predicted = 0.0 if is_exact else predicted_error(config, ranks, here.shape[1], size)
                p = P_OVER_RANKS[config.norm_over_ranks]
                check_distance(mean, exact[start : start + segment.numel][part], predicted, size, first.dtype, p)
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
