"""The smallest experiments of optimizers that make models sparse, and of gradients at shifted points."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_gqsgd.research.experiments.rows import Row
from lightning_gqsgd.research.optim import CMDAdagrad, RDAAdagrad, sparsity
from lightning_gqsgd.research.simulation import simulate
from lightning_gqsgd.research.simulation.problems import LeastSquares, LogisticRegression
from lightning_gqsgd.research.simulation.shifted import DGDDEF
from lightning_gqsgd.research.systems import SYSTEMS

#: Weight of the L1 norm.
PENALTY = 1e-2
#: Codes of one bit, for DGD-DEF.
SIGN: dict[str, Any] = {"codec": "sign", "bits": 1, "dither": "adaptive"}


class SparseLogistic(LogisticRegression):
    """Logistic regression in which 5 % of the true weights are not zero."""

    def _targets(self, scores: Tensor, noise: Tensor) -> Tensor:
        self.truth = 2 * torch.where(torch.arange(self.dimension) % 20 == 0, self.truth, 0.0)
        return super()._targets((self.features * self.truth).sum(1), noise)


def sparse_problem() -> SparseLogistic:
    """Returns the problem of these experiments, d = 500."""
    return SparseLogistic(dimension=500, rows=2000, batch=32, noise=0.5, regularisation=0.0)


def sparse_run(
    problem: SparseLogistic, optimizer: Any, preset: str, steps: int, **fields: Any
) -> tuple[float, float, float]:
    """Returns the share of zeros, the loss with penalty and the accuracy after some steps of 4 workers with batches of
    32.

    Args:
        problem: the result of `sparse_problem`.
        optimizer: function that creates the optimizer of a list of parameters.
        preset: name of the preset of the gradients.
        steps: number of steps.
        **fields: fields of `GQSGDConfig`.
    """
    record = simulate(
        preset, problem, workers=4, steps=steps, optimizer=optimizer, record_every=steps, progress=False, **fields
    )
    x = torch.from_numpy(record.parameters)
    return sparsity([x]), record.last() + PENALTY * float(x.abs().sum()), record.last("accuracy")


def adagrad() -> Iterator[Row]:
    """Plain Adagrad, which sets nothing to zero."""
    zeros, _, accuracy = sparse_run(
        sparse_problem(), lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, eps=1e-2), "gqsgd_4bit", 200
    )
    yield Row("trains at 4 bits", f"accuracy {accuracy:.3f}", accuracy > 0.93)
    yield Row("no weight is zero", f"{zeros:.2f} zeros", zeros == 0)


def penalised(name: str) -> Iterator[Row]:
    """Adagrad with an L1 penalty on ternary gradients, clipped and not, against fp32; ``name`` is the name of the
    system."""
    kind = CMDAdagrad if name == "qcmd_adagrad" else RDAAdagrad
    problem = sparse_problem()
    clipped = SYSTEMS[name].fields

    def run(preset: str, **fields: Any) -> tuple[float, float, float]:
        made = lambda parameters: kind(parameters, lr=0.05, l1=PENALTY, eps=1e-2)  # noqa: E731
        return sparse_run(problem, made, preset, 200, **fields)

    fp32, kept, ternary = run("ddp"), run("gqsgd", **clipped), run("gqsgd", **{**clipped, "clip": 0.0})
    zeros = f"{kept[0]:.2f}, fp32 {fp32[0]:.2f}, ternary without a threshold {ternary[0]:.2f}"
    if name == "qcmd_adagrad":
        yield Row("a threshold keeps zeros that ternary codes fill", zeros, ternary[0] + 0.02 < kept[0])
    else:
        yield Row("dual averaging keeps zeros under any code", zeros, min(fp32[0], kept[0], ternary[0]) > 0.7)
    losses = f"{kept[1]:.3g}, fp32 {fp32[1]:.3g}, ternary {ternary[1]:.3g}"
    yield Row("its loss is between those of fp32 and of ternary codes", losses, fp32[1] < kept[1] < ternary[1])


class Rates:
    """Computes the factor per step by which the distance to the optimum shrinks, over 50 steps; d = 116, one worker."""

    def __init__(self) -> None:
        self._problem = LeastSquares(dimension=116, rows=400, noise=0.0, dtype=torch.float64)
        hessian = self._problem.features.T @ self._problem.features / self._problem.rows
        smallest, largest = torch.linalg.eigvalsh(hessian)[[0, -1]].tolist()
        self._lr = 2 / (largest + smallest)

    def exact(self) -> float:
        """Returns the factor of gradient descent."""
        x = self._problem.start()
        for step in range(50):
            x = x - self._lr * self._problem.gradients(x, step, 1)[0]
        return float(((x - self._problem.truth).norm() / self._problem.truth.norm()) ** (1 / 50))

    def of(self, shifted: bool = True, share: float = 1.0, **fields: Any) -> float:
        """Returns the factor of DGD-DEF; see `DGDDEF` for the arguments."""
        record = DGDDEF(1, self._lr, shifted, share).run(self._problem, 50, **{**SYSTEMS["dgd_def"].fields, **fields})
        return float((record.metrics["distance"][-1] / record.metrics["distance"][0]) ** (1 / 50))


def dgd_def() -> Iterator[Row]:
    """DGD-DEF's linear rate, which equals the rate of gradient descent."""
    rates = Rates()
    exact = rates.exact()
    cases: list[tuple[int, dict[str, Any]]] = [(1, SIGN), (2, {"bits": 2}), (4, {"bits": 4})]
    for bits, fields in cases:
        found = rates.of(**fields)
        yield Row(
            f"{bits} bit: the factor per step of gradient descent, {exact:.3f}", f"{found:.3f}", found < exact + 0.01
        )
    for share in (1 / 2, 1 / 4):
        # A sign at the mean magnitude of normal numbers has δ = 2/π, here of `share` of 116 among 128 coordinates.
        bound = max(exact, math.sqrt(1 - 2 / math.pi * share * 116 / 128))
        found = rates.of(share=share, **SIGN)
        yield Row(
            f"{share} bits, in random subspaces: at most the larger of that and √(1 - δ), {bound:.3f}",
            f"{found:.3f}",
            found < bound + 0.01,
        )
    classic = rates.of(shifted=False, bits=2)
    yield Row("2 bits: classic error feedback diverges at this step", f"{classic:.3f}", classic > 1)
