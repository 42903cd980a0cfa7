"""A million draws per codec, dither and width: bias, variance, and independence of what dither depends on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs import codec_of
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.kernels import cpu
from lightning_gqsgd.kernels.dither import uniform
from lightning_gqsgd.layout import Segment, cut, place
from tests.reliability.knobs import SEED, scaled

DRAWS = scaled(1_000_000)
NUMEL = 1 << 14
CONFIGS: dict[str, dict[str, Any]] = {
    **{f"linear {dither} {bits}": {"codec": "linear", "dither": dither, "bits": bits, "block_size": 256}
       for dither in ("subtractive", "stochastic", "adaptive") for bits in (2, 3, 4, 5, 6, 7, 8)},
    "linear subtractive 1": {"codec": "linear", "dither": "subtractive", "bits": 1, "block_size": 256},
    **{f"companded {bits}": {"codec": "companded", "bits": bits} for bits in (2, 3, 4, 6, 8)},
    **{f"exponential {bits} {mantissa}": {"codec": "exponential", "bits": bits, "mantissa": mantissa}
       for bits, mantissa in ((3, 0), (5, 0), (8, 0), (8, 3))},
    **{f"eden {bits}": {"codec": "eden", "bits": bits, "block_size": 256} for bits in (1, 2, 3, 4)},
}  # fmt: skip


def structured() -> dict[str, Tensor]:
    """Inputs with structure; the first coordinate of each block pins its scale to 1."""
    j = torch.arange(NUMEL)
    inputs = {
        "constant": torch.full((NUMEL,), 0.37),
        "ramp": (j % 256) / 256.0 * 2 - 1,
        "small offsets": 0.01 + 1e-4 * ((j * 7) % 13),
        "uniform": torch.rand(NUMEL, generator=torch.Generator().manual_seed(0)) * 2 - 1,
    }
    for x in inputs.values():
        x[::128] = 1.0
    return inputs


def errors_of(config: GQSGDConfig, x: Tensor, draws: int) -> Tensor:
    """The errors of repeated encoding and decoding under new keys, fp64 [repeats, numel]."""
    q = codec_of(config).quantiser(config.block_size)
    layout = place(cut([Segment(0, NUMEL, False)], config.block_size), q, shards=1, scale_bytes=2, raw_bytes=4)
    repeats = -(-draws // NUMEL)
    errors, y = torch.empty(repeats, NUMEL, dtype=torch.float64), torch.empty_like(x)
    for repeat in range(repeats):
        wire = torch.zeros(layout.message_bytes, dtype=torch.uint8)
        key = config.dither_key(repeat, SEED)
        cpu.encode(x, layout.blocks, wire, q, key)
        cpu.decode(wire[None], layout.blocks, y, q, [key])
        errors[repeat] = y.double() - x.double()
    return errors


@pytest.mark.reliability
@pytest.mark.parametrize("name", CONFIGS)
def test_a_million_draws_have_no_bias_and_the_variance_of_theory(name: str) -> None:
    config = GQSGDConfig(**CONFIGS[name])
    for kind, x in structured().items():
        errors = errors_of(config, x, DRAWS)
        free = torch.arange(NUMEL) % 128 != 0
        errors = errors[:, free]
        if config.codec == "eden":  # coordinates of a block depend on each other: a block's mean error counts
            errors = errors_of(config, x, DRAWS).view(len(errors), -1, config.block_size).mean(2)
        z = float(errors.mean() / (errors.std() / math.sqrt(errors.numel())).clamp(min=1e-30))
        print(f"{name} on {kind}: z = {z:+.2f}, {errors.numel():,} draws")
        assert abs(z) < 5, (name, kind)
        if config.codec == "linear" and config.dither == "subtractive":
            assert float(errors.square().mean()) == pytest.approx(codec_of(config).error_variance(), rel=0.05)
        if config.codec == "linear" and config.dither == "stochastic" and kind == "uniform":
            assert float(errors.square().mean()) == pytest.approx(codec_of(config).error_variance(), rel=0.05)


def _dither(config: GQSGDConfig, step: int, stream: int, parameter: int, numel: int) -> Tensor:
    blocks = torch.from_numpy(cut([Segment(parameter, numel, False)], 256))
    return uniform(blocks, config.dither_key(step, stream), 256).flatten()[:numel].double()


@pytest.mark.reliability
def test_the_dither_is_uniform_and_independent_of_its_neighbours() -> None:
    config, numel = GQSGDConfig(seed=SEED), DRAWS // 256 * 256
    first = _dither(config, 0, 0, 0, numel)
    counts = torch.histc(first, bins=256, min=0, max=1)
    chi_square = float(((counts - numel / 256).square() / (numel / 256)).sum())
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)
    others = {
        "rank": _dither(config, 0, 1, 0, numel),
        "step": _dither(config, 1, 0, 0, numel),
        "parameter": _dither(config, 0, 0, 1, numel),
        "seed": _dither(GQSGDConfig(seed=SEED + 1), 0, 0, 0, numel),
        "neighbour": first.roll(1),
        "half a block away": first.roll(128),
        "next block": first.roll(256),
    }
    for name, other in others.items():
        z = float(((first - 0.5) * (other - 0.5)).mean() * 12 * math.sqrt(numel))
        cells = torch.histc(torch.floor(first * 16) * 16 + torch.floor(other * 16), bins=256, min=0, max=256)
        joint = float(((cells - numel / 256).square() / (numel / 256)).sum())
        print(f"{name}: z = {z:+.2f}, chi-square of 16 x 16 cells {joint:.0f}")
        assert abs(z) < 5, name
        assert abs(joint - 255) < 5 * math.sqrt(2 * 255), name


@pytest.mark.reliability
def test_the_error_of_a_mean_falls_as_one_over_the_root_of_its_draws() -> None:
    config = GQSGDConfig(codec="linear", dither="subtractive", bits=3, block_size=256)
    errors = errors_of(config, structured()["uniform"], DRAWS)
    sizes = [4, 16, len(errors)]
    deviations = [float(errors[:size].mean(0).square().mean().sqrt()) * math.sqrt(size) for size in sizes]
    for deviation in deviations:
        assert deviation == pytest.approx(math.sqrt(codec_of(config).error_variance()), rel=0.05)
