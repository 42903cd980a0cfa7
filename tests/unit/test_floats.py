"""16 and 32 bits per coordinate: stochastic rounding to bf16 in all kernels, its mean, and what it is combined with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs.floats.codec import largest
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.config.choosing import codec_of
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels.layout import Segment, cut
from lightning_gqsgd.kernels.narrowing import rounded
from lightning_gqsgd.predict.costs import ESTIMATES, Link, collectives_between
from lightning_gqsgd.predict.model import NATIVE, predict
from lightning_gqsgd.predict.timeline import Bucket, Timeline
from lightning_gqsgd.reducers import StepKeys, new_store
from lightning_gqsgd.reducers.bf16 import Bf16
from lightning_gqsgd.research.simulation import average, relative_error
from tests.errors import check_refused_in_one_line
from tests.unit.test_kernels import BOTH

ROWS = [Segment(0, 5001, raw=False), Segment(3, 1, raw=True), Segment(7, 3 * 1024, raw=False), Segment(9, 1023, False)]
NUMEL = sum(segment.numel for segment in ROWS)
SPECIAL = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-40, 3.4e38, -3.4e38, 1.0, 1 + 2**-7]


def _gradient(seed: int = 0) -> Tensor:
    """Numbers of all magnitudes, and all kinds of special ones; also a NaN whose upper half looks like infinity."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(NUMEL, generator=generator) * torch.logspace(-40, 38, NUMEL)
    x[2000 : 2000 + len(SPECIAL)] = torch.tensor(SPECIAL)
    x[2100] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)
    return x


@pytest.mark.parametrize("ranks", [1, 2, 3, 1000])
def test_numba_gives_the_bits_of_the_reference(ranks: int) -> None:
    check_rounding(ranks, BOTH)


def check_rounding(ranks: int, both: list[Any], block_size: int = 1024) -> None:
    """Both kernels round to the same bits."""
    x, blocks = _gradient(), torch.from_numpy(cut(ROWS, block_size))
    results = []
    for kernels in both:
        out = torch.full((NUMEL,), torch.nan, dtype=torch.bfloat16)
        kernels.narrow(x, blocks, out, (3, 2**32 - 4), block_size, 1 / ranks, largest(ranks))
        results.append(out.view(torch.int16))
    assert torch.equal(*results)


@pytest.mark.parametrize("value", [1.0, 1.003, -1.9999, 3.0e-5, -7.7e20, 1.2e-40, 1.99999])
def test_the_mean_over_all_random_numbers_is_the_number(value: float) -> None:
    x = torch.full((2**16,), value)
    codes = rounded(x, torch.arange(2**16), largest(1)).double()
    assert float(codes.mean()) == pytest.approx(float(x[0].double()), rel=1e-12)
    assert len(codes.unique()) <= 2
    variance = float((codes - x.double()).square().mean() / x[0].double().square())
    assert abs(value) < 1e-37 or variance <= codec_of(GQSGDConfig(bits=16)).omega(1)


def test_the_error_is_a_few_thousandths_and_independent_among_ranks() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200_000, generator=generator)
    alone = relative_error(average([x.clone()] * 2, bits=16)[0], [x])
    assert 2**-9 / 2 < alone < 2**-8
    together = relative_error(average([x.clone() for _ in range(4)], bits=16)[0], [x])
    assert together < 1.05 * alone  # less from four independent roundings, and more from sums in bf16


def test_ranks_round_equal_gradients_differently() -> None:
    setting = setting_of(resolve(GQSGDConfig(bits=16), 2), 2, torch.float32)
    reducer = Bf16(cut([Segment(0, 1000, False)], setting.block_size), setting)
    x = torch.randn(1000)
    keys = StepKeys.of(0, 0, 2)
    store = new_store(setting, {}, x.device)
    first, second = (next(reducer.steps(x.clone(), rank, keys, store))[0].input for rank in range(2))
    assert 100 < int((first != second).sum()) < 900
    assert Bf16.mean_error(setting.codec, 8) == Bf16.mean_error(setting.codec, 1) / 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_what_is_finite_stays_finite_and_what_is_not_reaches_all(ranks: int, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max * (0.9 if dtype == torch.float16 else 1.0)  # as DDP's, sums in fp16 can overflow
    gradients = [torch.full((3000,), most, dtype=dtype) for _ in range(ranks)]
    gradients[0][100], gradients[1][200], gradients[1][300] = torch.nan, torch.inf, -torch.inf
    means = average(gradients, bits=16)
    assert all(torch.equal(mean.isnan(), means[0].isnan()) for mean in means)
    assert means[0][100].isnan()
    assert means[0][200] == torch.inf
    assert means[0][300] == -torch.inf
    rest = torch.ones(3000, dtype=torch.bool)
    rest[[100, 200, 300]] = False
    assert means[0][rest].isfinite().all()
    assert means[0].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_travel_as_they_are(dtype: torch.dtype) -> None:
    gradients = [torch.randn(5000).to(dtype) for _ in range(2)]
    for half, native in zip(average(gradients, bits=16), average(gradients, bits=32), strict=True):
        assert torch.equal(half, native)


def test_results_do_not_depend_on_neighbours_and_small_parameters_are_rounded_too() -> None:
    gradients = [torch.randn(5000) for _ in range(3)]
    together = average(gradients, bits=16, segments=[Segment(4, 2000, False), Segment(5, 3000, True)])[0]
    alone = average([x[2000:].clone() for x in gradients], bits=16, segments=[Segment(5, 3000, False)])[0]
    assert torch.equal(together[2000:], alone)


def test_names_of_16_and_32_bits() -> None:
    assert resolve(GQSGDConfig(bits=32), 4) == resolve(GQSGDConfig(reducer="native"), 4)
    assert resolve(GQSGDConfig(bits=16), 4) == resolve(GQSGDConfig(reducer="bf16"), 4)
    assert GQSGDConfig(bits=16).describe() == "16 bits (bf16, stochastic rounding)"
    assert GQSGDConfig(bits=32).describe() == "32 bits (as they are)"
    assert GQSGDConfig(codec="top_k", memory="ef").bits == 32


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"bits": 16, "memory": "ef"},
            "bits=16 is averaged by reducer='bf16', which has no memory; take at most 8 bits",
        ),
        ({"bits": 32, "rotation": True}, "rotation=True"),
        ({"bits": 16, "reducer": "two_shot"}, "reducer='two_shot'"),
        ({"bits": 32, "reducer": "bf16"}, "reducer='bf16'"),
        ({"bits": 8, "reducer": "bf16"}, "is for bits=16"),
        ({"bits": 16, "coder": "elias"}, "coder='elias'"),
        ({"bits": 16, "levels": 3}, "levels=3"),
        ({"bits": 32, "norm": "l2"}, "norm='l2'"),
        ({"bits": 16, "clip": 2.5}, "clip=2.5"),
        ({"bits": 16, "scale": "global"}, "no scale"),
        ({"bits": 16, "dither": "nearest"}, "dither='nearest'"),
        ({"bits": 16, "exclude": ("*.bias",)}, "exclude"),
        ({"bits": 24}, "bits=24"),
        ({"bits": 16, "codec": "linear"}, "bits=16"),
        ({"bits": 8, "codec": "float"}, "bits=16 or 32, not bits=8"),
    ],
)
def test_what_16_and_32_bits_do_not_go_with_is_refused_in_one_line(fields: dict, words: str) -> None:
    check_refused_in_one_line(ConfigError, words, GQSGDConfig, **fields)


def test_the_performance_model_knows_16_bits() -> None:
    segments = (Segment(0, 1 << 22, raw=False),)
    timeline = Timeline((Bucket(segments, 0.015),), backward_s=0.02)
    link = Link(1.25e7)
    costs = replace(ESTIMATES["cpu"], collectives=collectives_between(2, 1, link, link))
    native, half = predict(timeline, costs, 2, NATIVE), predict(timeline, costs, 2, GQSGDConfig(bits=16))
    assert half.sent_bytes * 2 == native.sent_bytes
    assert 0.4 < half.wire_s / native.wire_s < 0.6
