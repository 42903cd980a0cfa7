"""The smallest experiments of FastSGD and of S2 Reducer, on virtual ranks and with the product's own parts."""

from __future__ import annotations

import pytest
import torch

from lightning_gqsgd.research.experiments.tables import SparseRows, dense, exact_mean, some_rows
from tests.unit.test_sparse import _sketched


@pytest.mark.slow
def test_powers_of_two_train_logistic_regression_as_exact_rows_do() -> None:
    problem = SparseRows()
    start, exact = problem.loss(torch.zeros(problem.features)), problem.trained(reducer="native")
    assert exact < 0.5 * start
    assert problem.trained(sparse="logarithmic", bits=5) < 1.1 * exact
    assert problem.trained(sparse="logarithmic", bits=4) < 1.2 * exact


@pytest.mark.slow
def test_a_sketch_of_the_union_is_exact_and_smaller_than_a_dense_gradient() -> None:
    """Of 100,000 coordinates, 8 workers have 1 % each: the union is 7.7 %."""
    touched = [some_rows(rank, count=1000, height=100_000, width=1) for rank in range(8)]
    exact, mean = exact_mean(touched, 100_000), _sketched(touched, 100_000)
    assert 0.07 < len(mean.rows) / 100_000 < 0.08
    assert (dense(mean, 100_000) - exact).norm() <= 1e-5 * exact.norm()
