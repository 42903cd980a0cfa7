"""Adagrad with an L1 penalty: the closed forms, and what torch's own optimizers can do."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_gqsgd
from lightning_gqsgd.research.optim import CMDAdagrad, ProximalSGD, RDAAdagrad, soft_threshold, sparsity

BOTH = pytest.mark.parametrize("kind", [CMDAdagrad, RDAAdagrad])


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained(kind: Any, steps: int = 5, sizes: Sequence[int] = (7, 3), **options: Any) -> list[nn.Parameter]:
    parameters = [nn.Parameter(normal(number, size)) for number, size in enumerate(sizes)]
    optimizer = kind(parameters, **options)
    for step in range(steps):
        for number, parameter in enumerate(parameters):
            parameter.grad = normal(100 * step + number, parameter.numel())
        optimizer.step()
    return parameters


def test_without_a_penalty_mirror_descent_has_the_bits_of_torchs_adagrad() -> None:
    ours = trained(CMDAdagrad, lr=0.1, l1=0.0, eps=1e-10)
    theirs = trained(torch.optim.Adagrad, lr=0.1, eps=1e-10)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


@BOTH
def test_a_step_minimises_what_it_is_defined_by(kind: Any) -> None:
    """The argmin of the module's docstring, coordinate by coordinate, on a fine grid."""
    lr, l1, eps, steps = 0.3, 0.4, 0.05, 3
    start = normal(0, 6).double()
    x = nn.Parameter(start.clone())
    optimizer = kind([x], lr=lr, l1=l1, eps=eps)
    gradients = [normal(1 + step, 6).double() for step in range(steps)]
    for gradient in gradients:
        before, x.grad = x.detach().clone(), gradient
        optimizer.step()
    scale = eps + torch.stack(gradients).square().sum(0).sqrt()
    grid = torch.linspace(-3, 3, 60_001, dtype=torch.float64)[:, None]
    if kind is CMDAdagrad:
        values = lr * gradients[-1] * grid + lr * l1 * grid.abs() + scale / 2 * (grid - before).square()
    else:
        mean = torch.stack(gradients).mean(0)
        values = lr * mean * grid + lr * l1 * grid.abs() + scale / (2 * steps) * grid.square()
    assert x.detach() == pytest.approx(grid[values.argmin(0), 0], abs=1e-4)


@BOTH
def test_one_call_for_all_parameters_has_the_bits_of_one_call_each(kind: Any) -> None:
    each, together = (trained(kind, l1=0.1, foreach=foreach) for foreach in (False, True))
    assert all(torch.equal(*pair) for pair in zip(each, together, strict=True))


@BOTH
def test_a_loaded_state_continues_with_the_same_bits(kind: Any) -> None:
    x = nn.Parameter(normal(0, 9))
    optimizer = kind([x], l1=0.02)

    def step(parameter: nn.Parameter, of: torch.optim.Optimizer, number: int) -> None:
        parameter.grad = normal(number, 9)
        of.step()

    for number in range(3):
        step(x, optimizer, number)
    other = nn.Parameter(x.detach().clone())
    resumed = kind([other], lr=9.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(3, 6):
        step(x, optimizer, number)
        step(other, resumed, number)
    assert torch.equal(x, other)
    assert resumed.state[other]["step"] == 6


@BOTH
def test_groups_have_numbers_of_their_own_and_parameters_without_a_gradient_stay(kind: Any) -> None:
    free, bound, unused = (nn.Parameter(torch.ones(4)) for _ in range(3))
    optimizer = kind([{"params": [free], "l1": 0.0}, {"params": [bound, unused]}], lr=0.1, l1=100.0)
    free.grad = bound.grad = torch.full((4,), 0.5)
    optimizer.step()
    assert sparsity([free]) == 0
    assert sparsity([bound]) == 1
    assert torch.equal(unused, torch.ones(4))
    assert sparsity([free, bound]) == 0.5


def test_a_coordinate_without_a_gradient_shrinks_under_mirror_descent_only() -> None:
    x = nn.Parameter(torch.tensor([1.0]))
    x.grad = torch.zeros(1)
    CMDAdagrad([x], lr=0.1, l1=0.01, eps=0.01).step()
    assert x.item() == pytest.approx(0.9)


@BOTH
def test_a_closure_is_called_with_gradients_enabled_and_its_loss_is_returned(kind: Any) -> None:
    x = nn.Parameter(torch.tensor([3.0]))
    optimizer = kind([x], lr=0.1, l1=0.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (x - 1).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4
    assert x.item() != 3


@BOTH
def test_maximising_is_minimising_the_negative(kind: Any) -> None:
    x, y = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    x.grad, y.grad = normal(0, 3), -normal(0, 3)
    kind([x], maximize=True).step()
    kind([y]).step()
    assert torch.equal(x, y)


@BOTH
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"l1": -0.5}, "Invalid l1 value: -0.5"),
        ({"eps": 0.0}, "Invalid epsilon value: 0.0"),
        ({"lr": math.nan}, "Invalid learning rate: nan"),
    ],
)
def test_numbers_out_of_range_are_refused_in_torchs_words(kind: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind([nn.Parameter(torch.ones(1))], **options)


@BOTH
def test_sparse_gradients_and_complex_parameters_are_refused(kind: Any) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        kind(table.parameters()).step()
    z = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    z.grad = torch.ones_like(z)
    with pytest.raises(RuntimeError, match="does not support complex parameters"):
        kind([z]).step()


def test_soft_threshold_and_sparsity() -> None:
    x = torch.tensor([-2.0, -0.5, 0.0, 0.25, 3.0])
    shrunk = soft_threshold(x, 0.5)
    assert shrunk.tolist() == [-1.5, 0.0, 0.0, 0.0, 2.5]
    assert sparsity([shrunk, torch.ones(3)]) == 3 / 8
    with pytest.raises(ValueError, match="at least one parameter"):
        sparsity([])


def test_the_package_has_them_under_its_own_name() -> None:
    assert lightning_gqsgd.CMDAdagrad is CMDAdagrad
    assert lightning_gqsgd.RDAAdagrad is RDAAdagrad


def test_a_proximal_step_minimises_the_penalty_beside_the_distance_to_a_step_of_sgd() -> None:
    lr, l1 = 0.3, 0.4
    start, gradient = normal(0, 6).double(), normal(1, 6).double()
    x, untouched = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = ProximalSGD([x, untouched], lr=lr, l1=l1)
    x.grad = gradient
    assert optimizer.step(lambda: 3.0) == 3.0
    grid = torch.linspace(-3, 3, 60_001, dtype=torch.float64)[:, None]
    values = lr * l1 * grid.abs() + (grid - (start - lr * gradient)).square() / 2
    assert x.detach() == pytest.approx(grid[values.argmin(0), 0], abs=1e-4)
    assert torch.equal(untouched, start)
    plain = trained(ProximalSGD, lr=0.1, l1=0.0)
    assert all(torch.allclose(*pair) for pair in zip(plain, trained(torch.optim.SGD, lr=0.1), strict=True))
    for numbers in ({"lr": -1.0, "l1": 0.1}, {"lr": 0.1, "l1": -1.0}):
        with pytest.raises(ValueError, match="Invalid"):
            ProximalSGD([x], **numbers)
