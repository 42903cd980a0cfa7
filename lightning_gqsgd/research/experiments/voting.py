"""The smallest experiments of votes and of gossip."""

from __future__ import annotations

from typing import Any

import torch

from lightning_gqsgd.research.experiments.rows import Row, Rows
from lightning_gqsgd.research.optim import soft_threshold
from lightning_gqsgd.research.simulation.gossip import DPSVRG, DSPG, Penalised
from lightning_gqsgd.research.simulation.graph import Graph
from lightning_gqsgd.research.simulation.problems import DigitsMLP, LogisticRegression
from lightning_gqsgd.research.simulation.votes import FedVote


def fedvote() -> Rows:
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


def lasso(penalty: float = 1e-2) -> tuple[Penalised, float, float]:
    """Returns logistic regression with an L1 penalty, d = 40, 8 workers with a truth of their own each; its least
    objective and its smoothness."""
    fields: dict[str, Any] = {"dimension": 40, "rows": 1600, "parts": 8, "spread": 0.5, "regularisation": 0.0}
    fields |= {"dtype": torch.float64}
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


def dpsvrg() -> Rows:
    """DPSVRG against DSPG, whose steps are tuned, at an equal budget of gradients over a ring of 8."""
    problem, least, smoothness = lasso()
    ring = Graph.ring(8)
    epochs = 60
    tuned = [
        DSPG(lr / smoothness, tau).run(problem, ring, epochs).objective[-1] - least
        for lr in (0.1, 0.3, 1.0)
        for tau in (20, 100)
    ]
    reduced = {}
    for budget in (epochs // 2, epochs):
        run = DPSVRG(0.1 / smoothness, first=10, growth=1.05).run(problem, ring, budget)
        reduced[budget] = run.objective[-1] - least
    found = reduced[epochs]
    stochastic = min(tuned)
    yield Row(
        "F - F* below that of DSPG at its best of 6 steps", f"{found:.2g}, {stochastic:.2g}", found < stochastic / 2
    )
    ratio = reduced[epochs // 2] / found
    yield Row("O(1/T): twice the gradients at least halve F - F*", f"1/{ratio:.2g}", ratio > 2)
