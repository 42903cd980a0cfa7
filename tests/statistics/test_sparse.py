"""The smallest experiment of FastSGD at fewer bits than `gqsgd systems check` takes."""

from __future__ import annotations

import pytest
import torch

from lightning_gqsgd.research.experiments.tables import SparseRows


@pytest.mark.slow
def test_powers_of_two_train_logistic_regression_as_exact_rows_do() -> None:
    problem = SparseRows()
    start, exact = problem.loss(torch.zeros(problem.features)), problem.trained(reducer="native")
    assert exact < 0.5 * start
    assert problem.trained(sparse="logarithmic", bits=4) < 1.2 * exact
