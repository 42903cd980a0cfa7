"""Muon beside AdamW, Dion, and optimizers of matrices on flat vectors."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.research.optim import Dion, MuonAdamW, matrices_of
from lightning_gqsgd.research.simulation.shapes import Shaped

if not hasattr(torch.optim, "Muon"):
    pytest.skip("this torch has no Muon", allow_module_level=True)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_gradients(optimizer: Any, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for number, parameter in enumerate(parameters):
            parameter.grad = normal(100 * step + number, *parameter.shape)
        optimizer.step()


def three() -> list[nn.Parameter]:
    return [nn.Parameter(normal(number, *shape)) for number, shape in enumerate([(6, 4), (4, 8), (5,)])]


class Network(nn.Module):
    """An embedding whose weight also makes the logits, two layers, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def test_matrices_are_those_of_hidden_layers() -> None:
    model = Network()
    matrices, others = matrices_of(model)
    assert [id(matrix) for matrix in matrices] == [id(model.layers[0].weight), id(model.layers[1].weight)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {id(one) for one in (*matrices, *others)} == {id(one) for one in trained}
    assert len(matrices) + len(others) == len(trained)


def test_muon_and_adamw_have_the_bits_of_torchs_own() -> None:
    ours, theirs = three(), three()
    numbers: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    both = MuonAdamW(ours[:2], ours[2:], betas=(0.9, 0.95), **numbers)
    muon = torch.optim.Muon(theirs[:2], momentum=0.95, adjust_lr_fn="match_rms_adamw", **numbers)
    adamw = torch.optim.AdamW(theirs[2:], betas=(0.9, 0.95), **numbers)
    with_gradients(both, ours, range(4))
    for step in range(4):
        with_gradients(muon, theirs, range(step, step + 1))
        adamw.step()
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_a_step_of_muon_has_the_size_of_one_of_adamw() -> None:
    """Root mean squares of steps, with a learning rate of 1: 0.2 to Newton-Schulz's accuracy."""
    for shape in ((64, 64), (32, 128), (128, 32)):
        x = nn.Parameter(torch.zeros(shape))
        x.grad = normal(0, *shape)
        MuonAdamW([x], [], lr=1.0).step()
        assert float(x.detach().square().mean().sqrt()) == pytest.approx(0.2, rel=0.25), shape


@pytest.mark.parametrize("kind", [MuonAdamW, Dion])
def test_a_loaded_state_continues_with_the_same_bits(kind: Any) -> None:
    whole = three()
    optimizer = kind(whole[:2], whole[2:], lr=0.05)
    with_gradients(optimizer, whole, range(3))
    resumed = [nn.Parameter(parameter.detach().clone()) for parameter in whole]
    other = kind(resumed[:2], resumed[2:], lr=9.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with_gradients(optimizer, whole, range(3, 6))
    with_gradients(other, resumed, range(3, 6))
    assert all(torch.equal(*pair) for pair in zip(whole, resumed, strict=True))


@pytest.mark.parametrize("kind", [MuonAdamW, Dion])
def test_schedules_reach_all_parameters_and_those_without_a_gradient_stay(kind: Any) -> None:
    parameters = three()
    optimizer = kind(parameters[:2], parameters[2:], lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    before = [parameter.detach().clone() for parameter in parameters]
    parameters[0].grad, parameters[2].grad = torch.ones(6, 4), torch.ones(5)
    optimizer.step()
    assert [torch.equal(*pair) for pair in zip(parameters, before, strict=True)] == [False, True, False]
    scheduler.step()
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(parameters, before, strict=True))


def test_dion_has_the_formulas_of_its_paper() -> None:
    """Four steps of one rank, in NumPy; r = 2 of 4, and 3 of 5."""
    for shape, fraction in (((7, 4), 0.5), ((5, 9), 0.6)):
        x = nn.Parameter(normal(0, *shape))
        optimizer = Dion([x], lr=0.1, rank_fraction=fraction, momentum=0.9, weight_decay=0.01)
        expected, m = x.detach().double().numpy().copy(), np.zeros(shape)
        q: Any = None
        for step in range(4):
            x.grad = normal(1 + step, *shape)
            optimizer.step()
            if q is None:  # the start is the optimizer's own: recover it from its generator
                generator = torch.Generator().manual_seed(shape[0] * 65537 + shape[1])
                rank = optimizer.state[x]["basis"].shape[1]
                assert rank == np.ceil(fraction * min(shape))
                q = torch.randn(shape[1], rank, generator=generator).double().numpy()
            m += x.grad.double().numpy()
            p, _ = np.linalg.qr(m @ q)
            r = m.T @ p
            m -= (1 - 0.9) * p @ r.T
            q = r / np.linalg.norm(r, axis=0)
            expected = (1 - 0.1 * 0.01) * expected - 0.1 * np.sqrt(shape[0] / shape[1]) * p @ q.T
        assert x.detach().numpy() == pytest.approx(expected, abs=1e-4)
        assert optimizer.averaged_numel == sum(shape) * q.shape[1]


@pytest.mark.parametrize(("kind", "lr"), [(MuonAdamW, 0.3), (partial(Dion, rank_fraction=0.5), 1.0)])
def test_a_small_problem_is_solved(kind: Any, lr: float) -> None:
    """X A = B for a matrix X of full rank, by steps that shrink."""
    a, truth = normal(0, 16, 64), normal(1, 8, 16)
    x = nn.Parameter(torch.zeros(8, 16))
    optimizer = kind([x], [], lr=lr, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
    for _ in range(200):
        optimizer.zero_grad()
        (x @ a - truth @ a).square().mean().backward()
        optimizer.step()
        scheduler.step()
    assert float((x - truth).detach().norm() / truth.norm()) < 0.05


def test_numbers_and_shapes_out_of_range_are_refused() -> None:
    x = nn.Parameter(torch.zeros(4, 4))
    for numbers, words in (
        ({"lr": -1.0}, "lr=-1.0 is out of range"),
        ({"momentum": 1.5}, "momentum=1.5 is 0 to 1"),
        ({"rank_fraction": 0.0}, "rank_fraction=0.0 is above 0"),
    ):
        with pytest.raises(ValueError, match=words):
            Dion([x], **numbers)
    with pytest.raises(ValueError, match="not for a parameter of shape .*; give this one in others"):
        Dion([nn.Parameter(torch.zeros(4))])
    with pytest.raises(ValueError, match="not torch.bfloat16"):
        Dion([nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))])
    with pytest.raises(ValueError, match="2D"):
        MuonAdamW([nn.Parameter(torch.zeros(4))], [])


def test_flat_vectors_take_the_steps_of_their_parameters() -> None:
    parameters = three()
    flat = [nn.Parameter(torch.cat([p.detach().flatten() for p in parameters])) for _ in range(2)]
    shapes = [parameter.shape for parameter in parameters]
    shaped = Shaped(flat, shapes, lambda parts: MuonAdamW(parts[:2], parts[2:], lr=0.1))
    own = MuonAdamW(parameters[:2], parameters[2:], lr=0.1)
    for step in range(3):
        gradients = [normal(10 * step + number, *parameter.shape) for number, parameter in enumerate(parameters)]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        flat[0].grad = torch.cat([gradient.flatten() for gradient in gradients])
        own.step()
        shaped.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in parameters])
    assert torch.equal(flat[0], expected)
    assert not torch.equal(flat[1], expected)  # it had no gradient
    with pytest.raises(ConfigError, match="and the flat parameter has 61; give the shape of each"):
        Shaped(flat, shapes[:2], lambda parts: MuonAdamW(parts, []))
