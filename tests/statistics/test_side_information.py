"""Wyner-Ziv coding (arXiv 2111.08277) by a shared reference: its smallest experiment, bias, and modulo codes.

The experiment was measured before with a modulo quantiser (d = 4096, 3 bits): for |g_t - g_(t-1)|/|g| of .1, .3 and 1,
relative squared errors of .0031, .026 and .16, where plain codes have .22 to .27. Difference coding had .0026, .024 and
.127.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.research.experiments.convex import LATEST, squared_error, walk
from lightning_gqsgd.research.simulation import VirtualRanks


@pytest.mark.filterwarnings("ignore::lightning_gqsgd.reducers.memory.StabilityWarning")  # of the worst gradient
def test_the_error_follows_the_distance_to_the_reference_and_not_the_size() -> None:
    """Squared errors of differences fall with the square of the distance; those of plain codes do not."""
    errors = {}
    for distance in (0.1, 0.3, 1.0):
        vectors = walk(distance)
        errors[distance] = squared_error(vectors, memory=LATEST), squared_error(vectors)
    assert errors[0.1][1] == pytest.approx(errors[1.0][1], rel=0.2)
    assert errors[0.1][0] < 0.02 * errors[0.1][1]
    assert errors[0.3][0] / errors[0.1][0] == pytest.approx(9, rel=0.25)
    assert errors[0.3][0] < 0.15 * errors[0.3][1]


@pytest.mark.parametrize(
    "fields",
    [{"reducer": "two_shot"}, pytest.param({"reducer": "gather", "codec": "linear"}, marks=pytest.mark.slow)],
)
def test_differences_to_a_shared_reference_are_unbiased(fields: dict[str, Any]) -> None:
    """z-scores of the mean error of each coordinate over independent dither, in a step that has a reference."""
    vectors, repeats = walk(0.3, 3 * 512, 2), 80
    given = [list(vector.view(3, 512)) for vector in vectors]
    errors = torch.empty(repeats, 512, dtype=torch.float64)
    for seed in range(repeats):
        ranks = VirtualRanks(3, [Segment(0, 512, raw=False)], preset="wyner_ziv", seed=seed, **fields)
        for step, each in enumerate(given):
            mean = ranks.mean(each, step)
        errors[seed] = mean.double() - torch.stack(given[-1]).double().mean(0)
    z = errors.mean(0) / (errors.std(0) / math.sqrt(repeats))
    assert float(z.abs().max()) < 5
    assert 0.85 < float(z.std()) < 1.15
    assert abs(float(errors.mean() / errors.std())) * math.sqrt(errors.numel()) < 4


def modulo_coded(x: Tensor, reference: Tensor, step: float, codes: int, dither: Tensor) -> Tensor:
    """What a modulo quantiser with subtractive dither decodes next to a reference that its sender does not use."""
    residue = torch.round(x / step + dither).remainder(codes)
    near = reference / step + dither
    k = residue + codes * torch.round((near - residue) / codes)
    return step * (k - dither)


def test_modulo_codes_next_to_a_reference_are_codes_of_the_difference() -> None:
    """As `docs/theory.md` has it: the same numbers while nothing wraps, and errors of whole turns where codes wrap."""
    generator = torch.Generator().manual_seed(0)
    reference, uniform = (torch.randn(5000, generator=generator, dtype=torch.float64) for _ in range(2))
    x = reference + 0.2 * torch.randn(5000, generator=generator, dtype=torch.float64)
    dither = uniform.frac() - 0.5 * uniform.sign()
    codes = 16
    step = float(2 * (x - reference).abs().max() / (codes - 2))
    decoded = modulo_coded(x, reference, step, codes, dither)
    shifted = dither + reference / step
    shifted -= shifted.round()
    difference = reference + step * (torch.round((x - reference) / step + shifted) - shifted)
    assert torch.allclose(decoded, difference, atol=1e-12)
    assert float((decoded - x).abs().max()) <= step / 2 + 1e-12
    narrow = step / 4
    turns = (modulo_coded(x, reference, narrow, codes, dither) - x) / (narrow * codes)
    wrapped = turns.abs() > 0.5
    assert 0.001 < float(wrapped.double().mean()) < 0.5
    assert float((turns - turns.round()).abs().max()) <= 0.5 / codes + 1e-9
