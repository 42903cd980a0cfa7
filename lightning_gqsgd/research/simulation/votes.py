"""FedVote: workers train latent weights separately, and vote on the sign of every weight (arXiv 2110.02998).

A voted weight is W = tanh(k h) of a latent number h. In a round, each worker trains its h for some steps of Adam and
sends a vote b for each weight: +1 with probability (1 + W)/2, otherwise -1, so that E b = W. All workers continue with

    p = Σ λ_i b_i,   h <- atanh(p clipped to ±(1 - 10⁻⁴)) / k.

Equal λ_i = 1/n: the votes are summed as integers by the reducer ``sum``, exactly. With reputations, λ_i follows how
often worker i agrees with the majority, c_i (the share of weights), so that attackers have little weight:

    r_i <- ½ r_i + ½ c_i,   λ_i = r_i / Σ r_j over the workers whose r_j is at least the mean, otherwise 0.

These weights are known only after votes are decoded, so votes are sent as signs by the reducer ``gather``, and every
worker weighs them in the same way. The equations are those of the released code, KAI-YUE/fedvote.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_gqsgd.errors import ConfigError, check_integer, check_positive, check_whole
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.research.simulation.problems import Problem, generator_of
from lightning_gqsgd.research.simulation.record import Record, Rows
from lightning_gqsgd.research.simulation.virtual import VirtualRanks, relative_error
from lightning_gqsgd.research.systems import SYSTEMS

#: Smallest distance of a mean vote from ±1, where its latent number would be infinite.
MARGIN = 1e-4


@dataclass(frozen=True)
class FedVote:
    """A training with votes; see the module's docstring.

    Args:
        workers: number of workers n, at least 1.
        reputations: whether to weigh the votes by reputation.
        attackers: number of workers, counted from the first, that send the opposite of each of their votes; 0 to
            ``workers``.
        slope: k, above 0.
        local_steps: steps of Adam in a round, at least 1.
        lr: learning rate of Adam, above 0.
        seed: seed of the random votes.

    Raises:
        ConfigError: if a number is out of its range.
    """

    workers: int
    reputations: bool = False
    attackers: int = 0
    slope: float = 1.5
    local_steps: int = 15
    lr: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole(workers=self.workers, local_steps=self.local_steps)
        check_integer("attackers", self.attackers, 0, self.workers)
        check_positive(slope=self.slope, lr=self.lr)

    def run(self, problem: Problem, rounds: int, voted: Sequence[int] = (0,)) -> Record:
        """Train virtual workers, with the codec and reducer objects of a real training.

        Args:
            problem: the problem to train on; it needs the metric ``accuracy``.
            rounds: number of rounds, at least 1.
            voted: the numbers of the parameters that are voted on. All other parameters keep their initial values.

        Returns:
            A row for the start and for each round. The loss and ``accuracy`` are those of the weights p;
            ``binary_accuracy`` is the accuracy of their signs, which are the model to deploy. ``relative_error`` is the
            error of p against the mean of the workers' W. ``step`` is the number of local steps.

        Raises:
            ConfigError: if a number is out of its range, or if the problem does not have a parameter.
        """
        check_whole(rounds=rounds)
        x = problem.start().clone()
        places = _places(problem.segments, voted)
        ranks = (_Weighed if self.reputations else _summed)(self.workers, len(places))
        latent = x[places].atanh() / self.slope
        x[places] = torch.tanh(self.slope * latent)
        rows = Rows(problem, ranks)
        rows.add(x, 0, math.nan, _of_signs(problem, x, places))
        for number in range(rounds):
            weights = self._trained(problem, x, places, latent, number)
            x[places] = ranks.mean(list(self._votes(weights, number)), number)
            latent = x[places].clamp(MARGIN - 1, 1 - MARGIN).atanh() / self.slope
            error = relative_error(x[places], list(weights))
            rows.add(x, (number + 1) * self.local_steps, error, _of_signs(problem, x, places))
        return rows.record("fedvote", self.workers, x)

    def _trained(self, problem: Problem, x: Tensor, places: Tensor, latent: Tensor, number: int) -> Tensor:
        """Returns the workers' weights W after a round's local steps, [workers, voted]."""
        points = x.repeat(self.workers, 1)
        latents = latent.repeat(self.workers, 1).requires_grad_()
        optimizer = torch.optim.Adam([latents], lr=self.lr)
        for step in range(self.local_steps):
            weights = torch.tanh(self.slope * latents.detach())
            points[:, places] = weights
            gradients = problem.gradients(points, number * self.local_steps + step, self.workers)[:, places]
            latents.grad = gradients * self.slope * (1 - weights.square())
            optimizer.step()
        return torch.tanh(self.slope * latents.detach())

    def _votes(self, weights: Tensor, number: int) -> Tensor:
        """Returns the votes that the workers send, each 1 or -1: [workers, voted]."""
        generator = generator_of(self.seed, 5 if self.seed else 0, number)  # 5: a separate use, see there
        uniform = torch.rand(weights.shape, generator=generator, dtype=weights.dtype)
        votes = torch.where(2 * uniform < 1 + weights, 1.0, -1.0).to(weights)
        votes[: self.attackers] *= -1
        return votes


def _summed(workers: int, numel: int) -> VirtualRanks:
    """Returns ranks whose votes have equal weight: the reducer ``sum`` adds them as integers, in the fewest bits that
    hold n votes.

    The scale is 1 and a vote is one of the outermost levels, -1 and 1, so the sum is exact.
    """
    fields = {**SYSTEMS["fedvote"].fields, "bits": max(2, workers.bit_length())}
    return VirtualRanks(workers, [Segment(0, numel, raw=False)], **fields)


class _Weighed:
    """Ranks whose votes are weighted by reputation: signs are gathered, and all ranks decode and weight all messages in
    the same way. The attributes and the method are like those of `VirtualRanks`."""

    def __init__(self, workers: int, numel: int) -> None:
        fields: dict[str, Any] = {"codec": "sign", "memory": "none", "block_size": 65536}  # all have scale 1
        # A group of one rank: its mean is the decoded message, as every receiving worker decodes it.
        self._codes = VirtualRanks(1, [Segment(0, numel, raw=False)], reducer="gather", **fields)
        self.config = self._codes.config
        self.wire_bits = self._codes.wire_bits
        self._message_bytes = round(self.wire_bits * numel / 8)
        self._reputations = torch.full((workers,), 0.5, dtype=torch.float64)
        self.bytes_sent = 0

    def mean(self, votes: Sequence[Tensor], number: int) -> Tensor:
        """Returns the weighted mean vote on each weight, [voted]."""
        received = torch.stack([self._codes.mean([vote], number) for vote in votes])
        self.bytes_sent += (len(votes) - 1) * self._message_bytes
        agreement = (received == received.sum(0).sign()).double().mean(1)
        self._reputations = (self._reputations + agreement) / 2
        trusted = torch.where(self._reputations < self._reputations.mean(), 0.0, self._reputations)
        return (trusted / trusted.sum()).to(received) @ received


def _places(segments: Sequence[Segment], voted: Sequence[int]) -> Tensor:
    """Returns the places of the parameters that are voted on in the flat vector, int64 [voted]."""
    numbers = [segment.parameter for segment in segments]
    for number in voted:
        if number not in numbers:
            raise ConfigError(f"voted={tuple(voted)} names parameter {number}; the problem has {numbers}")
    if not voted:
        raise ConfigError("voted=() leaves nothing to vote on; name at least one parameter")
    parts = torch.arange(sum(segment.numel for segment in segments)).split([segment.numel for segment in segments])
    return torch.cat([part for number, part in zip(numbers, parts, strict=True) if number in voted])


def _of_signs(problem: Problem, x: Tensor, places: Tensor) -> dict[str, float]:
    """Returns the metrics of the signs of voted weights, which are named ``binary_...``."""
    binary = x.clone()
    binary[places] = torch.where(x[places] < 0, -1.0, 1.0).to(x)
    return {f"binary_{name}": value for name, value in problem.metrics(binary).items()}
