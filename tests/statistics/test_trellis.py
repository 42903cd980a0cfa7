"""Bias of trellis codes beside a coordinate that dominates its block, and their error; `test_eden` has all else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs import TrellisCodec
from lightning_gqsgd.codecs.trellis import codec
from lightning_gqsgd.kernels import reference
from tests.statistics.test_eden import decoded, worst_z


def beside(length: int, apart: int) -> Tensor:
    """A block of two coordinates, whose numbers differ by ``apart`` and of which one is twice the other."""
    x = torch.zeros(length)
    x[5], x[5 ^ apart] = 1.0, 0.5
    return x


@pytest.mark.parametrize("length", [128, *(pytest.param(n, marks=pytest.mark.slow) for n in (256, 1024))])
@pytest.mark.parametrize("bits", [2, *(pytest.param(bits, marks=pytest.mark.slow) for bits in (1, 3, 4))])
def test_there_is_no_bias_beside_a_coordinate_that_dominates_its_block(bits: int, length: int) -> None:
    """Their rotated coordinates are correlated in pairs, each of which may lie side by side in a sequence."""
    repeats = (1 << 23) // length
    for apart in (1, 2, 16, 17, 32, 48, 64, 80):
        x = beside(length, apart)
        y = decoded(x, TrellisCodec(bits), repeats)[:, x != 0]
        bias = (y.mean(0) - x[x != 0]).abs()
        # As where few coordinates are not zero, but a third of it.
        assert ((bias - x[x != 0] / length / 3) / y.std(0)).max() * math.sqrt(repeats) <= 4.5, apart


@pytest.mark.parametrize("apart", [16, 48])
def test_in_an_order_that_is_always_the_same_there_is_a_bias(apart: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(codec, "orders", lambda whole, key, width: torch.arange(width).expand(len(whole), width))
    x = beside(128, apart)
    y = decoded(x, TrellisCodec(2), 4000, reference)
    assert worst_z(y, x) > 10
    assert abs(float(y[:, x == 0.5].mean()) / 0.5 - 1) > 0.01


@pytest.mark.parametrize("size", [128, *(pytest.param(n, marks=pytest.mark.slow) for n in (256, 1024)), 4096])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_error_is_as_predicted(bits: int, size: int) -> None:
    x, trellis = torch.randn(size, generator=torch.Generator().manual_seed(size)), TrellisCodec(bits)
    relative = float((decoded(x, trellis, (1 << 20) // size) - x.double()).square().sum(1).mean())
    relative /= float(x.double().square().sum())
    # D + a/T is too large by up to 4 % for sequences of 8 steps, and blocks so short are not quite Gaussian.
    assert relative == pytest.approx(trellis.omega(size), rel=0.08 if size == 128 else 0.05)
    assert trellis.delta(size) == pytest.approx(1 / (1 + relative), rel=0.05)
