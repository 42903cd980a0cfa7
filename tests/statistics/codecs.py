"""Errors of what codecs encode and decode, and what tests on the CPU and on a GPU ask of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs import Codec, LinearCodec
from lightning_gqsgd.kernels import kernels_for
from lightning_gqsgd.kernels.layout import Segment, cut, place
from lightning_gqsgd.kernels.protocol import Coding

REPEATS, NUMEL, BLOCK = 400, 4096, 256


def errors_of(codec: Codec, x: Tensor, block_size: int = BLOCK, repeats: int = REPEATS) -> Tensor:
    """The errors of encoding and decoding ``x`` under independent dither, fp64 [repeats, numel]."""
    q, kernels = codec.quantiser(block_size), kernels_for(x.device)
    layout = place(cut([Segment(0, x.numel(), False)], block_size), q, shards=1, scale_bytes=2, raw_bytes=4)
    wire, y = torch.zeros(layout.message_bytes, dtype=torch.uint8, device=x.device), torch.empty_like(x)
    errors = torch.empty(repeats, x.numel(), dtype=torch.float64, device=x.device)
    for repeat in range(repeats):
        key = (repeat * 7919, repeat + 1)
        kernels.encode(x, Coding(layout.blocks, q), wire, key)
        kernels.decode(wire[None], Coding(layout.blocks, q), y, [key])
        errors[repeat] = y.double() - x.double()
    return errors


def uniform_blocks(device: torch.device) -> Tensor:
    """The first coordinate of a block is its scale; the others are uniform within a step."""
    x = torch.rand(NUMEL, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x[::BLOCK] = 1.0
    return x.to(device)


def without_scales(errors: Tensor) -> Tensor:
    """The errors of all coordinates of `uniform_blocks` that are not a scale."""
    return errors.view(len(errors), -1, BLOCK)[:, :, 1:].flatten(1)


def check_unbiased(errors: Tensor, spread: float) -> None:
    """z-scores of all errors together and of each coordinate's; ``spread``: the standard deviation of one error."""
    z_all = float(errors.mean()) / (spread / math.sqrt(errors.numel()))
    assert abs(z_all) < 4, f"the mean of all errors is {z_all:.1f} standard deviations off"
    # There is no variance at the levels; near them, 400 draws are not normal yet.
    random = errors.std(0) > 0.1 * spread
    z_each = (errors.mean(0) / (errors.std(0) / math.sqrt(len(errors))))[random]
    assert z_each.numel() > 0.9 * errors.shape[1], f"only {z_each.numel()} of {errors.shape[1]} coordinates vary"
    mean, std = float(z_each.mean()), float(z_each.std())
    assert abs(mean) < 4 / math.sqrt(z_each.numel()), f"z-scores of the coordinates have the mean {mean:.4f}"
    assert 0.9 < std < 1.1, f"z-scores of the coordinates have the standard deviation {std:.3f}, not 1"


def check_linear(bits: int, dither: str, device: torch.device) -> None:
    """Linear codes are unbiased, with the variance of theory; that of stochastic rounding is Δ²/6 here."""
    codec = LinearCodec(bits, dither)
    errors, variance = without_scales(errors_of(codec, uniform_blocks(device))), codec.error_variance()
    check_unbiased(errors, math.sqrt(variance))
    assert float(errors.square().mean()) == pytest.approx(variance, rel=0.05)
    if dither == "subtractive":  # whatever the coordinate
        each = errors.square().mean(0) / variance
        assert 0.7 < float(each.min()) <= float(each.max()) < 1.35
