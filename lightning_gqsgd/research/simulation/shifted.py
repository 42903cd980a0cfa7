"""DGD-DEF: error feedback whose gradients are computed at the point that the model would have without errors (arXiv
2103.07578).

With the error memory e_i of worker i (see `spec.memories.Memory`, ``"ef"``) and the learning rate η, a step is

    z_i = x - η e_i,   u_i = ∇f_i(z_i) + e_i,   e_i <- u_i - Q(u_i),   x <- x - η mean of Q(u_i).

For any Q, the mean of all z_i moves by -η times the mean of ∇f_i(z_i). So with one worker, z follows gradient descent
without compression, and the distance from x to z is η times the error. The codec is nearly democratic: a block is
rotated by a random Hadamard matrix, so that no coordinate is much larger than the others, and each coordinate is
rounded to the nearest of 2^R levels. On a smooth, strongly convex problem the distance to the optimum shrinks by max(ν,
C) per step, where ν is the factor of gradient descent, (L-μ)/(L+μ) with η = 2/(L+μ), and C is |Q(u) - u| / |u|. For
less than one bit per coordinate, only a share of the rotated coordinates is sent in each step; see `subspaces`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_gqsgd.errors import check_positive, check_whole
from lightning_gqsgd.research.simulation.problems import Problem
from lightning_gqsgd.research.simulation.record import Record, Rows
from lightning_gqsgd.research.simulation.subspaces import SubspaceRanks
from lightning_gqsgd.research.simulation.virtual import VirtualRanks, relative_error


@dataclass(frozen=True)
class DGDDEF:
    """Gradient descent with differential error feedback; see the module's docstring.

    Args:
        workers: number of workers, at least 1.
        lr: learning rate η, above 0.
        shifted: whether to compute gradients at z_i. False computes them at x, which is classic error feedback.
        share: share of the rotated coordinates that is sent, above 0 and at most 1.

    Raises:
        ConfigError: if a number is out of its range.
    """

    workers: int
    lr: float
    shifted: bool = True
    share: float = 1.0

    def __post_init__(self) -> None:
        check_whole(workers=self.workers)
        check_positive(lr=self.lr)

    def run(self, problem: Problem, steps: int, **fields: Any) -> Record:
        """Train virtual workers, with the codec, memory and reducer objects of a real training.

        Args:
            problem: the problem to train on.
            steps: number of steps, at least 1; each has a row.
            **fields: fields of `GQSGDConfig`, with an error memory, e.g. those of ``SYSTEMS["dgd_def"]``.

        Returns:
            The record. If parameters or loss stop being finite, the run ends there; see `Record.diverged_at`.

        Raises:
            ConfigError: if the configuration has no error memory, or cannot work.
        """
        check_whole(steps=steps)
        x = problem.start().clone()
        ranks = self._ranks(problem, x, fields)
        rows = Rows(problem, ranks)
        diverged_at = None
        rows.add(x, 0, math.nan)
        for step in range(steps):
            points = x - self.lr * ranks.errors() if self.shifted else x
            gradients = problem.gradients(points, step, self.workers)
            mean = ranks.mean(list(gradients), step)
            x = x - self.lr * mean
            error = relative_error(mean, list(gradients))
            if not (x.isfinite().all() and rows.add(x, step + 1, error)):
                diverged_at = step + 1
                break
        return rows.record("dgd_def", self.workers, x, diverged_at)

    def _ranks(self, problem: Problem, x: Tensor, fields: dict[str, Any]) -> VirtualRanks | SubspaceRanks:
        """Returns the virtual ranks that average messages and remember their errors."""
        if self.share == 1:
            return VirtualRanks(self.workers, problem.segments, x.dtype, None, **fields)
        return SubspaceRanks(self.workers, x.numel(), self.share, x.dtype, remembers=True, **fields)
