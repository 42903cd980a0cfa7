"""DeMo's code: the cosine transform of the literature, its largest coordinates, and the momentum that is left."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.fft import dct, idct
from torch import Tensor

from lightning_gqsgd.codecs.dct_top_k.codec import RUN, inverse_transformed, transformed
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.research.simulation import VirtualRanks, average
from lightning_gqsgd.research.systems import SYSTEMS


def normal(seed: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def by_runs(transform: Any, x: np.ndarray) -> np.ndarray:
    """scipy's transform of each run of a block."""
    return np.concatenate([transform(x[start : start + RUN], norm="ortho") for start in range(0, len(x), RUN)])


@pytest.mark.parametrize("length", [1, 7, 64, 65, 256, 300])
def test_the_transform_is_that_of_the_literature_and_turns_back(length: int) -> None:
    x = normal(length, length)
    there = transformed(torch.stack([x, 2 * x]))
    assert there[0].numpy() == pytest.approx(by_runs(dct, x.double().numpy()), abs=1e-6)
    places = torch.arange(length).expand(2, -1)
    assert inverse_transformed(there, places, length)[1].numpy() == pytest.approx(2 * x.double().numpy(), abs=1e-6)


@pytest.mark.parametrize("length", [65, 256])
def test_an_inverse_transform_does_not_depend_on_other_blocks(length: int) -> None:
    values = normal(1, 3 * 10).double().view(3, 10)
    places = torch.stack([torch.randperm(length, generator=torch.Generator().manual_seed(k))[:10] for k in range(3)])
    places = places.sort().values
    together = inverse_transformed(values, places, length)
    for block in range(3):
        alone = inverse_transformed(values[block : block + 1], places[block : block + 1], length)[0]
        assert torch.equal(alone, together[block])
        dense = torch.zeros(length, dtype=torch.float64)
        dense[places[block]] = values[block]
        assert alone.numpy() == pytest.approx(by_runs(idct, dense.numpy()), abs=1e-6)


def demo(gradients: list[list[np.ndarray]], decay: float, kept: int) -> list[np.ndarray]:
    """The means of DeMo with one block: momentum, its largest coordinates in the transform, what is left."""
    momenta = [np.zeros_like(gradient) for gradient in gradients[0]]
    means = []
    for of_step in gradients:
        sent = []
        for rank, gradient in enumerate(of_step):
            momentum = decay * momenta[rank] + gradient
            spectrum = by_runs(dct, momentum)
            spectrum[np.argsort(-np.abs(spectrum))[kept:]] = 0
            sent.append(by_runs(idct, spectrum))
            momenta[rank] = momentum - sent[-1]
        means.append(np.mean(sent, axis=0))
    return means


def test_with_a_fading_memory_it_is_demo() -> None:
    """Six steps of three ranks, 1,000 coordinates in one block, of which 1/128 is kept."""
    gradients = [[normal(10 * step + rank, 1000) for rank in range(3)] for step in range(6)]
    ranks = VirtualRanks(3, [Segment(0, 1000, raw=False)], torch.float32, **SYSTEMS["demo"].fields)
    expected = demo([[x.double().numpy() for x in row] for row in gradients], 0.999, math.ceil(1000 / 128))
    for step, (row, mean) in enumerate(zip(gradients, expected, strict=True)):
        for result in ranks.average(row, step):
            assert result.numpy() == pytest.approx(mean, abs=1e-5), step


@pytest.mark.parametrize("numel", [30, 4096, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_error_is_at_most_what_top_k_guarantees(numel: int, dtype: torch.dtype) -> None:
    x = normal(numel, numel).to(dtype)
    (result,) = average([x], codec="dct_top_k", density=0.1, memory="none")
    error = (result.double() - x.double()).square().sum() / x.double().square().sum()
    assert 0.1 < error <= 0.9


def test_a_wave_takes_one_coordinate() -> None:
    x = torch.cos(math.pi / 128 * 5 * (2 * torch.arange(64) + 1))
    (result,) = average([x], codec="dct_top_k", density=1 / 64, memory="none")
    assert result.numpy() == pytest.approx(x.numpy(), abs=1e-6)
    (other,) = average([x], codec="top_k", density=1 / 64, memory="none")
    assert float((other - x).norm() / x.norm()) > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_largest_numbers_stay_finite_and_others_reach_all(dtype: torch.dtype) -> None:
    x = torch.full((256,), torch.finfo(dtype).max, dtype=dtype)
    for result in average([x, x], codec="dct_top_k", density=0.1, memory="none"):
        assert result.isfinite().all()
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = x.clone()
        broken[3] = bad
        for result in average([x, broken], codec="dct_top_k", density=0.1, memory="none"):
            assert result.isnan().all()


@pytest.mark.parametrize("memory", ["ef", "ef21", {"alpha": 0.9, "beta": 0.9, "rho": 0}])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_step_with_an_infinity_leaves_memories_as_they_were(memory: Any, bad: float) -> None:
    config = GQSGDConfig(codec="dct_top_k", density=0.1, memory=memory, reducer="gather")
    ranks = VirtualRanks(2, [Segment(0, 256, raw=False)], torch.float32, **config.to_dict())
    good = torch.randn(2, 256, generator=torch.Generator().manual_seed(0))
    ranks.mean(list(good), 0)
    broken = good.clone()
    broken[1, 3] = bad
    assert ranks.mean(list(broken), 1).isnan().all()
    assert ranks.mean(list(good), 2).isfinite().all()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "codec='dct_top_k' is biased, so training needs a memory"),
        ({"memory": "ef", "bits": 2}, "codec='dct_top_k' has bits=32, not bits=2"),
        ({"memory": "ef", "density": 0.0}, "density=0 keeps nothing"),
        ({"auto": True}, "does not work with a memory, and codec='dct_top_k' needs one"),
        ({"memory": "ef", "rotation": True}, "leaves no large coordinates"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GQSGDConfig(codec="dct_top_k", **fields)
