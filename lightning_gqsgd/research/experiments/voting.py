"""The smallest experiments of votes and of gossip."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from statistics import linear_regression
from typing import Any

import torch

from lightning_gqsgd.research.experiments.rows import Row
from lightning_gqsgd.research.optim import soft_threshold
from lightning_gqsgd.research.simulation.gossip import DPSVRG, DSPG, GossipRecord, Penalised
from lightning_gqsgd.research.simulation.graph import Graph
from lightning_gqsgd.research.simulation.problems import DigitsMLP, LogisticRegression
from lightning_gqsgd.research.simulation.votes import FedVote


def fedvote() -> Iterator[Row]:
    """FedVote on the digits, 8 workers, 15 local steps per round."""
    digits = DigitsMLP()
    run = FedVote(8).run(digits, 8)
    accuracy = run.last("accuracy")
    binary = run.last("binary_accuracy")
    yield Row("votes at log2(n + 1) bits train: accuracy above 0.92 after 8 rounds", f"{accuracy:.3f}", accuracy > 0.92)
    yield Row("the signs alone are a model", f"accuracy {binary:.3f}", binary > 0.9)
    weighed = FedVote(8, reputations=True, attackers=3).run(digits, 5).last("accuracy")
    plain = FedVote(8, attackers=3).run(digits, 5).last("accuracy")
    yield Row(
        "reputations outvote 3 attackers of 8", f"accuracy {weighed:.3f}, without {plain:.3f}", weighed > 0.85 > plain
    )


def lasso() -> tuple[Penalised, float, float]:
    """Returns logistic regression with an L1 penalty, d = 40, in which each of 8 workers has its own true weights; its
    smallest objective, and its smoothness."""
    fields: dict[str, Any] = {"dimension": 40, "rows": 1600, "parts": 8, "spread": 0.5, "regularisation": 0.0}
    fields |= {"dtype": torch.float64}
    penalty = 1e-2
    whole = LogisticRegression(**fields)
    problem = Penalised(LogisticRegression(batch=20, **fields), whole, l1=penalty, batch_share=0.1)
    smoothness = float(torch.linalg.eigvalsh(whole.features.T @ whole.features / 1600)[-1]) / 4
    x = whole.start()
    momentum = whole.start()
    for step in range(400):  # FISTA
        moved = soft_threshold(momentum - whole.gradients(momentum, 0, 1)[0] / smoothness, penalty / smoothness)
        momentum = moved + step / (step + 3) * (moved - x)
        x = moved
    return problem, problem.objective(x), smoothness


#: Budgets of gradients, in epochs, to which rates are fitted.
BUDGETS = (15, 30, 60, 120)


def spent(run: GossipRecord, least: float) -> list[float]:
    """Returns F - F* of a run at the last record within each of the budgets."""
    return [run.objective[bisect_right(run.epochs, budget) - 1] - least for budget in BUDGETS]


def exponent(errors: Sequence[float]) -> float:
    """Returns the p for which T^-p, with the budget T, fits the logarithms of errors best."""
    return -linear_regression([math.log(budget) for budget in BUDGETS], [math.log(error) for error in errors]).slope


def dpsvrg() -> Iterator[Row]:
    """DPSVRG against DSPG, whose step is tuned for each budget of gradients, over a ring of 8."""
    problem, least, smoothness = lasso()
    ring = Graph.ring(8)
    tried = [
        spent(DSPG(lr / smoothness, tau).run(problem, ring, BUDGETS[-1]), least)
        for lr in (0.03, 0.1, 0.3, 1.0)
        for tau in (5, 20, 100)
    ]
    stochastic = [min(errors) for errors in zip(*tried, strict=True)]
    # A stage that has begun is finished, so the budget is a little larger than the last one in `BUDGETS`.
    run = DPSVRG(0.1 / smoothness, first=10, growth=1.05, most_rounds=16).run(problem, ring, 1.02 * BUDGETS[-1])
    reduced = spent(run, least)
    yield Row(
        f"F - F* after {BUDGETS[-1]} epochs below that of DSPG at its best of {len(tried)} steps",
        f"{reduced[-1]:.2g}, {stochastic[-1]:.2g}",
        reduced[-1] < stochastic[-1] / 2,
    )
    power = exponent(reduced)
    yield Row("O(1/T): F - F* falls as T^-1 at least, with the gradients T", f"T^-{power:.2g}", power >= 1)
    others = exponent(stochastic)
    yield Row("that of DSPG, tuned for each T, falls more slowly", f"T^-{others:.2g}", others < power / 2)
    longest = exponent(tried[-1])
    yield Row("and at its longest step as O(1/√T)", f"T^-{longest:.2g}", 0.4 < longest < 0.7)
