"""A row of an experiment: the claim, the measurement, and whether they agree; and measurements that several experiments
share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.research.simulation import VirtualRanks, relative_error


@dataclass(frozen=True)
class Row:
    """A claim about a system, and its measurement.

    Attributes:
        claim: the claim, with its numbers.
        measured: the measurement, with its numbers.
        holds: whether the measurement agrees with the claim.
    """

    claim: str
    measured: str
    holds: bool


def normal(seed: int, numel: int) -> Tensor:
    """Returns independent normal numbers from a seed, [numel]."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def virtual(ranks: int, numel: int, preset: str | None = None, **fields: Any) -> VirtualRanks:
    """Returns virtual ranks that average one compressed parameter of ``numel`` coordinates."""
    return VirtualRanks(ranks, [Segment(0, numel, raw=False)], torch.float32, preset, **fields)


def message(x: Tensor, preset: str, repeats: int = 40, **fields: Any) -> tuple[float, float, float]:
    """Returns E|Q(x) - x|²/|x|², the number of non-zero coordinates, and the bits of the message of one rank, on
    average over the dither."""
    rank = virtual(1, x.numel(), preset, **fields)
    error = 0.0
    nonzeros = 0.0
    bits = 0.0
    for step in range(repeats):
        found = rank.mean([x], step)
        error += relative_error(found, [x]) ** 2 / repeats
        nonzeros += int(found.count_nonzero()) / repeats
        bits += rank.wire_bits * x.numel() / repeats
    return error, nonzeros, bits


def bias(preset: str, ranks: int = 3, **fields: Any) -> Row:
    """Returns the row for an unbiased preset: the errors of different steps on the same normal gradients average out.

    If errors are independent with mean zero, the squared error of the mean over N steps is 1/N of the squared error of
    one step.
    """
    numel = 4096
    steps = 100
    ranks_of = virtual(ranks, numel, preset, **fields)
    gradients = [normal(rank, numel) for rank in range(ranks)]
    exact = torch.stack(gradients).double().mean(0)
    total = torch.zeros(numel, dtype=torch.float64)
    squares = 0.0
    for step in range(steps):
        mean = ranks_of.mean(gradients, step).double()
        total += mean
        squares += float((mean - exact).square().sum()) / steps
    left = float((total / steps - exact).square().sum()) / (squares / steps)
    # A mean of numel squares has a standard deviation of sqrt(2 / numel), and a little more if blocks are rotated.
    return Row(
        f"unbiased: the mean of {steps} steps has 1/{steps} of the squared error of one",
        f"{left:.2f}/{steps}",
        abs(left - 1) < 8 * math.sqrt(2 / numel) + 0.05,
    )
