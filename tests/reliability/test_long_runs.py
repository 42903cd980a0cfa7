"""Thousands of steps of a small problem: the loss does not drift away from that of uncompressed training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.research.simulation.virtual import VirtualRanks
from tests.reliability.knobs import SEED, scaled

RANKS, STEPS = 3, scaled(4000)
CONFIGS: dict[str, dict[str, Any]] = {
    "8 bits": {"bits": 8},
    "4 bits": {"bits": 4},
    "4 bits, sums": {"bits": 6, "reducer": "sum"},
    "2 bits, EDEN": {"codec": "eden", "bits": 2},
    "8 bits, reference": {"codec": "linear", "bits": 8, "memory": "diana", "reducer": "two_shot"},
}


class Regression:
    """A small network that learns another one's outputs, from noisy batches of each rank."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        self.teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        self.numel = sum(p.numel() for p in self.model.parameters())
        self.x = torch.randn(512, 16)
        self.y = self.teacher(self.x).detach()

    def parameters(self, flat: Tensor) -> dict[str, Tensor]:
        named = dict(self.model.named_parameters())
        parts = flat.split([p.numel() for p in named.values()])
        return {name: part.view_as(p) for (name, p), part in zip(named.items(), parts, strict=True)}

    def loss(self, flat: Tensor, rows: Tensor) -> Tensor:
        outputs = functional_call(self.model, self.parameters(flat), (self.x[rows],))
        return nn.functional.mse_loss(outputs, self.y[rows])

    def gradients(self, flat: Tensor, step: int) -> list[Tensor]:
        made = []
        for rank in range(RANKS):
            generator = torch.Generator().manual_seed(step * RANKS + rank)
            rows = torch.randint(512, (32,), generator=generator)
            copy = flat.detach().requires_grad_()
            made.append(torch.autograd.grad(self.loss(copy, rows), copy)[0])
        return made


def trained(fields: dict[str, Any] | None, steps: int) -> np.ndarray:
    """The losses over all data, every 50 steps; None: uncompressed."""
    problem = Regression()
    flat = torch.cat([p.detach().flatten() for p in problem.model.parameters()])
    virtual = None
    if fields is not None:
        virtual = VirtualRanks(RANKS, [Segment(0, problem.numel, False)], **{"seed": SEED, **fields})
    losses = []
    for step in range(steps):
        gradients = problem.gradients(flat, step)
        mean = torch.stack(gradients).mean(0) if virtual is None else virtual.mean(gradients, step)
        flat = flat - 0.1 * mean
        if step % 50 == 49:
            losses.append(float(problem.loss(flat, torch.arange(512)).detach()))
    return np.array(losses)


@pytest.mark.reliability
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_does_not_drift_away_from_that_of_uncompressed_training(name: str) -> None:
    exact, compressed = trained(None, STEPS), trained(CONFIGS[name], STEPS)
    gap = (compressed - exact) / exact[0]
    half = gap[len(gap) // 2 :]
    x = np.arange(len(half)) - (len(half) - 1) / 2
    slope = float((x * half).sum() / (x * x).sum())
    error = float(np.std(half - slope * x) / np.sqrt((x * x).sum()))
    print(f"{name}: gap {gap[-1]:+.2e} of the first loss, slope {slope:+.1e} ± {error:.1e} per 50 steps")
    assert abs(gap[-10:].mean()) < 0.02
    assert slope < 4 * error + 1e-5


@pytest.mark.reliability
@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_at_a_minimum_does_not_drift(name: str) -> None:
    """Gradients of x²/2 vanish at 0: errors are relative to the largest coordinate, so they vanish, too."""
    virtual = VirtualRanks(RANKS, [Segment(0, 600, False)], **{"seed": SEED, **CONFIGS[name]})
    x = torch.randn(600, generator=torch.Generator().manual_seed(SEED))
    for step in range(600):
        x = x - 0.2 * virtual.mean([x] * RANKS, step)
    assert x.abs().max() < 1e-6
    at_rest = torch.zeros(600)
    for step in range(100):
        at_rest = at_rest - 0.2 * virtual.mean([at_rest] * RANKS, 10_000 + step)
    bound = 1e-6 if VirtualRanks(2, [Segment(0, 600, False)], **CONFIGS[name]).config.remembers else 0.0
    assert at_rest.abs().max() <= bound


@pytest.mark.reliability
@pytest.mark.parametrize(
    "fields",
    [{"bits": 8}, {"codec": "linear", "memory": "diana", "reducer": "two_shot"}, {"reducer": "sum"}],
    ids=str,
)
def test_fp16_training_learns_through_fifty_overflows(fields: dict[str, Any]) -> None:
    """A loss scale that doubles in every step until gradients overflow: every overflow is seen on all ranks."""
    torch.manual_seed(SEED)
    virtual = VirtualRanks(RANKS, [Segment(0, 600, False)], torch.float16, None, **fields)
    x, overflows, step = nn.Parameter(torch.randn(600)), 0, 0
    start, optimizer = float(x.detach().abs().max()), torch.optim.SGD([x], lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1, backoff_factor=0.25)
    while overflows < 50:
        noise = 0.1 * torch.randn(RANKS, 600)
        gradients = [scaler.scale(x.detach() + of_rank).half() for of_rank in noise]
        means, before = virtual.average(gradients, step), scaler.get_scale()
        step += 1
        assert all(torch.equal(mean.view(torch.int16), means[0].view(torch.int16)) for mean in means)
        finite = bool(means[0].isfinite().all())
        assert finite == all(bool(gradient.isfinite().all()) for gradient in gradients)
        x.grad = means[0].float()
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale() > before) == finite
        overflows += not finite
    assert x.isfinite().all()
    assert start > 2
    assert x.abs().max() < 0.2
