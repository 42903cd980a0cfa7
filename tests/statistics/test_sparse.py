"""The smallest experiments of FastSGD and of S2 Reducer, on virtual ranks and with the product's own parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.sparse.tables import Touched
from tests.unit.test_sparse import _dense, _exact, _mean, _sketched, _touched

WORKERS, FEATURES, PER_SAMPLE = 4, 20_000, 60


class _Logistic:
    """Sparse logistic regression with labels of a hidden vector."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.features = torch.randint(0, FEATURES, (4000, PER_SAMPLE), generator=generator)
        hidden = torch.randn(FEATURES, generator=generator)
        self.labels = (hidden[self.features].sum(1) > 0).float() * 2 - 1

    def gradient(self, x: Tensor, samples: Tensor) -> Touched:
        features, labels = self.features[samples], self.labels[samples]
        slopes = -labels * torch.sigmoid(-labels * x[features].sum(1)) / len(samples)
        indices = features.flatten()
        values = slopes.repeat_interleave(PER_SAMPLE)[:, None]
        made = torch.sparse_coo_tensor(indices[None], values, (FEATURES, 1), check_invariants=False).coalesce()
        return Touched(made.indices()[0], made.values())

    def loss(self, x: Tensor) -> float:
        return torch.nn.functional.softplus(-self.labels * x[self.features].sum(1)).mean().item()


def _trained(problem: _Logistic, **fields: Any) -> float:
    """The loss after 150 steps of Adagrad, batches of 32 on each worker."""
    x, squares = torch.zeros(FEATURES), torch.full((FEATURES,), 1e-10)
    generator = torch.Generator().manual_seed(1)
    for step in range(150):
        batches = torch.randint(0, 4000, (WORKERS, 32), generator=generator)
        mean = _mean([problem.gradient(x, batch) for batch in batches], FEATURES, step, **fields)
        gradient = mean.values[:, 0]
        squares[mean.rows] += gradient.square()
        x[mean.rows] -= 0.1 * gradient / squares[mean.rows].sqrt()
    return problem.loss(x)


@pytest.mark.slow
def test_powers_of_two_train_logistic_regression_as_exact_rows_do() -> None:
    problem = _Logistic()
    start, exact = problem.loss(torch.zeros(FEATURES)), _trained(problem, reducer="native")
    assert exact < 0.5 * start
    assert _trained(problem, sparse="logarithmic", bits=5) < 1.1 * exact
    assert _trained(problem, sparse="logarithmic", bits=4) < 1.2 * exact


@pytest.mark.slow
def test_a_sketch_of_the_union_is_exact_and_smaller_than_a_dense_gradient() -> None:
    """Of 100,000 coordinates, 8 workers have 1 % each: the union is 7.7 %."""
    touched = [_touched(rank, count=1000, height=100_000, width=1) for rank in range(8)]
    exact, mean = _exact(touched, 100_000), _sketched(touched, 100_000)
    assert 0.07 < len(mean.rows) / 100_000 < 0.08
    assert (_dense(mean, 100_000) - exact).norm() <= 1e-5 * exact.norm()
