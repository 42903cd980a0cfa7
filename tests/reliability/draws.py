"""Errors of codecs over many draws, and what theory says of their variance, coordinate by coordinate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs import EdenCodec, ExponentialCodec, FloatCodec, LinearCodec
from lightning_gqsgd.codecs.companded.codec import SLOPE
from lightning_gqsgd.codecs.floats.codec import largest
from lightning_gqsgd.codecs.variance import variance_companded
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.choosing import codec_of
from lightning_gqsgd.kernels import cpu
from lightning_gqsgd.kernels.layout import Segment, cut, place
from lightning_gqsgd.kernels.protocol import Coding
from lightning_gqsgd.reducers.base import step_key
from tests.reliability.knobs import SEED, scaled

#: Draws of a long test, and of a test of the usual suite.
DRAWS, FEW_DRAWS = scaled(1_000_000), 131_072
#: Coordinates of an input. The blocks of all codecs divide it.
NUMEL = 1 << 14
BLOCK = 256

#: Every unbiased codec, with its dithers and widths.
CONFIGS: dict[str, dict[str, Any]] = {
    **{f"linear {dither} {bits}": {"codec": "linear", "dither": dither, "bits": bits, "block_size": BLOCK}
       for dither in ("subtractive", "stochastic", "adaptive") for bits in (2, 3, 4, 5, 6, 7, 8)},
    "linear subtractive 1": {"codec": "linear", "dither": "subtractive", "bits": 1, "block_size": BLOCK},
    "linear stochastic 4, 5 levels": {"codec": "linear", "dither": "stochastic", "bits": 4, "levels": 5,
                                      "block_size": BLOCK},
    **{f"companded {dither} {bits}": {"codec": "companded", "dither": dither, "bits": bits}
       for dither in ("subtractive", "adaptive") for bits in (2, 3, 4, 5, 6, 7, 8)},
    **{f"exponential {bits} {mantissa}": {"codec": "exponential", "bits": bits, "mantissa": mantissa}
       for bits, mantissa in ((2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (7, 0), (8, 0), (6, 1), (7, 2), (8, 3))},
    "exponential 5, 5 levels": {"codec": "exponential", "bits": 5, "levels": 5},
    **{f"{codec} {bits}": {"codec": codec, "bits": bits, "block_size": BLOCK}
       for codec in ("eden", "trellis") for bits in (1, 2, 3, 4)},
    "float 16": {"bits": 16},
}  # fmt: skip
#: One of each family and dither, for the usual suite.
FEW = ("linear subtractive 4", "linear stochastic 3", "linear adaptive 2", "companded subtractive 3", "exponential 5 0",
       "exponential 8 3", "eden 2", "trellis 2", "float 16")  # fmt: skip


def with_draws(names: Sequence[str]) -> pytest.MarkDecorator:
    """Runs a test for some of `CONFIGS`: those of `FEW` with few draws, and in the long tests all with many."""
    few = [pytest.param(name, FEW_DRAWS, id=f"some draws of {name}") for name in names if name in FEW]
    many = [pytest.param(name, DRAWS, id=name, marks=pytest.mark.reliability) for name in names]
    return pytest.mark.parametrize(("name", "draws"), few + many)


def structured() -> dict[str, Tensor]:
    """Inputs with structure; the first coordinate of every 128 pins the scale of each block to 1."""
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


def errors_of(
    config: GQSGDConfig, x: Tensor, steps: range, *, stream: int = 0, parameter: int = 0, ranks: int = 1
) -> Tensor:
    """The errors of a message in each step, fp64 [steps, numel].

    Args:
        config: names the codec.
        x: what is encoded, fp32 [numel].
        steps: numbers of the steps; each has a dither of its own.
        stream: the dither's stream of the first rank.
        parameter: number of the parameter that ``x`` belongs to.
        ranks: so many ranks encode ``x``, and the error is that of the mean of their messages.
    """
    errors = torch.empty(len(steps), len(x), dtype=torch.float64)
    for row, step in enumerate(steps):
        keys = [step_key(config.seed, step, stream + rank) for rank in range(ranks)]
        errors[row] = _mean_of_messages(config, x, keys, parameter).double() - x.double()
    return errors


def _mean_of_messages(config: GQSGDConfig, x: Tensor, keys: list[tuple[int, int]], parameter: int) -> Tensor:
    codec, table = codec_of(config), cut([Segment(parameter, len(x), False)], config.block_size)
    if isinstance(codec, FloatCodec):
        rows = torch.empty(len(keys), len(x), dtype=torch.bfloat16)
        for row, key in zip(rows, keys, strict=True):
            cpu.narrow(x, torch.from_numpy(table), row, key, config.block_size, 1.0, largest(len(keys)))
        return rows.double().mean(0)
    q = codec.quantiser(config.block_size)
    layout = place(table, q, shards=1, scale_bytes=2, raw_bytes=4)
    wires, mean = torch.zeros(len(keys), layout.message_bytes, dtype=torch.uint8), torch.empty_like(x)
    for wire, key in zip(wires, keys, strict=True):
        cpu.encode(x, Coding(layout.blocks, q), wire, key)
    cpu.decode(wires, Coding(layout.blocks, q), mean, keys)
    return mean


def steps_for(draws: int, first: int = 0, stride: int = 1) -> range:
    """As many steps as give so many draws, from a number on that depends on the seed."""
    start = SEED * 10_000_000 + first
    return range(start, start + stride * -(-draws // NUMEL), stride)


def expected_variance(config: GQSGDConfig, x: Tensor) -> Tensor:
    """The variance of each coordinate's error where the scale is 1, fp64 [numel].

    It is written down here from the definitions of the roundings. Companded dither has the formula of the package. The
    error of EDEN is spread over its blocks, and so is that of trellis codes.
    """
    codec, y = codec_of(config), x.double().abs()
    if isinstance(codec, EdenCodec):
        return y.view(-1, config.block_size).square().mean(1).repeat_interleave(config.block_size) * codec.omega(
            config.block_size
        )
    if isinstance(codec, FloatCodec):  # 8 bits of precision
        step = 2.0 ** (y.clamp(min=2.0**-126).log2().floor() - 7)
        return (y % step) * (step - y % step)
    if isinstance(codec, ExponentialCodec):
        return _between(y, _magnitudes(codec.magnitudes, codec.mantissa))
    if isinstance(codec, LinearCodec):
        if codec.dither != "stochastic":
            return torch.full_like(y, codec.step() ** 2 / 12)
        return _between(y, torch.arange(codec.levels() // 2 + 1, dtype=torch.float64) * codec.step())
    values, where = y.unique(return_inverse=True)
    variances = [variance_companded(min(value, 1.0), 2**codec.bits, SLOPE) for value in values.tolist()]
    return torch.tensor(variances, dtype=torch.float64)[where]


def _magnitudes(count: int, mantissa: int) -> Tensor:
    """Zero, and ``count`` magnitudes down from 1, ``2^mantissa`` of them to each power of two; fp64, ascending."""
    parts = [1 + part / 2**mantissa for part in range(2**mantissa)]
    values = {2.0**-power * part for power in range(count // len(parts) + 2) for part in parts}
    down_from_one = sorted(value for value in values if value <= 1)[-count:]
    return torch.tensor([0.0, *down_from_one], dtype=torch.float64)


def _between(y: Tensor, levels: Tensor) -> Tensor:
    """The variance of a rounding at random to either neighbour, without bias."""
    above = torch.searchsorted(levels, y).clamp(1, len(levels) - 1)
    return ((y - levels[above - 1]) * (levels[above] - y)).clamp(min=0)


def deviations(samples: Tensor) -> float:
    """How many standard deviations the mean of independent samples lies from zero."""
    return float(samples.mean() / (samples.std() / math.sqrt(samples.numel())).clamp(min=1e-30))


def by_blocks(products: Tensor) -> Tensor:
    """Means over blocks, which are independent of each other even where the coordinates of a block are not."""
    return products.reshape(len(products), -1, BLOCK).mean(2).flatten()
