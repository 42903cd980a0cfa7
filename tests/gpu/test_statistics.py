"""Bias and variance of the codecs on a GPU, as `tests.statistics` has them on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs import Codec, ExponentialCodec, LinearCodec
from lightning_gqsgd.kernels import kernels_for
from lightning_gqsgd.kernels.layout import Segment, cut, place
from lightning_gqsgd.kernels.protocol import Coding
from tests.gpu.card import DEVICE, marks

pytestmark = marks

REPEATS = 400
NUMEL = 4096
BLOCK = 256


def _gradient() -> Tensor:
    """The first coordinate of a block is its scale; the others are uniform within a step."""
    x = torch.rand(NUMEL, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x[::BLOCK] = 1.0
    return x.to(DEVICE)


def _errors(codec: Codec, x: Tensor) -> Tensor:
    """Of all repeats, fp64 [REPEATS, coordinates that are not the scale]."""
    q, kernels = codec.quantiser(BLOCK), kernels_for(DEVICE)
    layout = place(cut([Segment(0, NUMEL, False)], BLOCK), q, shards=1, scale_bytes=2, raw_bytes=4)
    blocks, y = layout.blocks, torch.empty_like(x)
    wire = torch.zeros(layout.message_bytes, dtype=torch.uint8, device=DEVICE)
    errors = torch.empty(REPEATS, NUMEL, dtype=torch.float64, device=DEVICE)
    for repeat in range(REPEATS):
        key = (repeat * 7919, repeat + 1)
        kernels.encode(x, Coding(blocks, q), wire, key)
        kernels.decode(wire[None], Coding(blocks, q), y, [key])
        errors[repeat] = y.double() - x.double()
    return errors.view(REPEATS, -1, BLOCK)[:, :, 1:].flatten(1)


def _check_unbiased(errors: Tensor, spread: float) -> None:
    """z-scores of all errors together and of each coordinate's; ``spread``: the standard deviation of one error."""
    z_all = float(errors.mean()) / (spread / math.sqrt(errors.numel()))
    assert abs(z_all) < 4, f"the mean of all errors is {z_all:.1f} standard deviations off"
    # There is no variance at the levels; near them, 400 draws are not normal yet.
    random = errors.std(0) > 0.1 * spread
    z_each = (errors.mean(0) / (errors.std(0) / math.sqrt(REPEATS)))[random]
    assert z_each.numel() > 0.8 * errors.shape[1], f"only {z_each.numel()} of {errors.shape[1]} coordinates vary"
    mean, std = float(z_each.mean()), float(z_each.std())
    assert abs(mean) < 4 / math.sqrt(z_each.numel()), f"z-scores of the coordinates have the mean {mean:.4f}"
    assert 0.9 < std < 1.1, f"z-scores of the coordinates have the standard deviation {std:.3f}, not 1"


@pytest.mark.parametrize("dither", ["subtractive", "stochastic"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_linear_codes_are_unbiased_with_the_variance_of_theory(bits: int, dither: str) -> None:
    codec = LinearCodec(bits, dither)
    errors, variance = _errors(codec, _gradient()), codec.error_variance()
    _check_unbiased(errors, math.sqrt(variance))
    assert float(errors.square().mean()) == pytest.approx(variance, rel=0.05)
    if dither == "subtractive":  # whatever the coordinate
        each = errors.square().mean(0) / variance
        assert 0.7 < float(each.min()) <= float(each.max()) < 1.35


@pytest.mark.parametrize(("bits", "mantissa"), [(4, 0), (8, 0), (8, 3)])
def test_exponential_codes_are_unbiased_and_within_their_bound(bits: int, mantissa: int) -> None:
    codec, x = ExponentialCodec(bits, mantissa), _gradient()
    errors = _errors(codec, x)
    _check_unbiased(errors, float(errors.square().mean().sqrt()))
    error = float(errors.square().sum()) / REPEATS / float(x.double().square().sum())
    bound = codec.omega(BLOCK)
    assert error < bound, f"E|Q(x) - x|^2 is {error:.3g} |x|^2, more than omega = {bound:.3g}"
