"""Which states of optimizers are taken for weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.local_steps.choosing import make_local
from lightning_gqsgd.local_steps.options import LocalOptions
from lightning_gqsgd.local_steps.weights_in_state import WeightsInState


class ScheduleFreeLike(torch.optim.Optimizer):
    """Keeps a second sequence of weights, which the parameters follow."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move z by the gradient, and the parameter towards z."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                state["z"].sub_(p.grad, alpha=group["lr"])
                p.lerp_(state["z"], 0.3)


class LookaheadLike(torch.optim.SGD):
    """Goes back to slow weights every third step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Make a step; every third one moves the slow weights, and the parameters to them."""
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("slow", p.clone())
        super().step()
        self.count = getattr(self, "count", 0) + 1
        if self.count % 3 == 0:
            for p in self.param_groups[0]["params"]:
                p.copy_(self.state[p]["slow"].lerp_(p, 0.5))


class KeepsMasterWeights(torch.optim.Optimizer):
    """Trains fp32 copies of 16-bit parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move the copy, and round it."""
        for p in self.param_groups[0]["params"]:
            master = self.state[p].setdefault("master", p.float())
            p.copy_(master.sub_(p.grad.float(), alpha=self.param_groups[0]["lr"]))


class KeepsTheStart(torch.optim.SGD):
    """Remembers where it began, as Prodigy does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Make a step."""
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("p0", p.clone())
        super().step()


class SharpnessAware(torch.optim.SGD):
    """Moves the weights, and gets them back from a copy in its state; the second pass is left out here."""

    def __init__(self, parameters: Any, deletes: bool) -> None:
        super().__init__(parameters, lr=0.1)
        self.deletes = deletes

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move, move back, and make a step."""
        for p in self.param_groups[0]["params"]:
            self.state[p]["old_p"] = p.clone()
            p.add_(p.grad, alpha=0.05)
            p.copy_(self.state[p]["old_p"])
            if self.deletes:
                del self.state[p]["old_p"]
        super().step()


def _network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    return nn.Sequential(*layers).to(dtype)


def _steps(
    make: Callable[[Any], torch.optim.Optimizer],
    model: nn.Module,
    steps: int = 60,
    penalty_only: bool = False,
    options: LocalOptions | None = None,
) -> None:
    """Train, and look at the state after the first step and after every fourth."""
    optimizer = make(model.parameters())
    watch = WeightsInState([optimizer], options or LocalOptions())
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad()
        if penalty_only:
            sum(0.5 * p.square().sum() for p in model.parameters()).backward()
        else:
            x = torch.randn(8, 16, generator=generator).to(dtype)
            model(x).sub(1.0).square().mean().backward()
        optimizer.step()
        if step % 4 == 3 or not step:
            watch.check()


@pytest.mark.parametrize(
    ("make", "name", "dtype"),
    [
        (ScheduleFreeLike, "z", torch.float32),
        (partial(LookaheadLike, lr=0.1), "slow", torch.float32),
        (partial(LookaheadLike, lr=0.1, momentum=0.9), "slow", torch.float32),
        (KeepsMasterWeights, "master", torch.bfloat16),
    ],
)
def test_weights_in_a_state_are_found(make: Any, name: str, dtype: torch.dtype) -> None:
    with pytest.raises(
        ConfigError, match=f"keeps weights in its state: '{name}' of 8 parameters.*inner_state='average'"
    ):
        _steps(make, _network(dtype))


@pytest.mark.parametrize("fields", [{"every": "20s"}, {"every": 8, "elastic": True, "delay": 1}], ids=str)
def test_what_refuses_an_average_of_the_state_is_not_asked_for_one(fields: dict[str, Any]) -> None:
    options = make_local(None, fields, {})[0]
    words = "take another optimizer, or inner_state='average' with a number of steps for every, without elastic"
    with pytest.raises(ConfigError, match=f"keeps weights in its state: 'z'.*{words}"):
        _steps(ScheduleFreeLike, _network(), options=options)


def test_a_copy_that_only_a_step_needs_is_to_be_deleted() -> None:
    with pytest.raises(ConfigError, match="'old_p' of 8 parameters.*as in SAM, let the step delete it from the state"):
        _steps(partial(SharpnessAware, deletes=False), _network())
    _steps(partial(SharpnessAware, deletes=True), _network())


#: Each of torch's optimizers that keeps something, at usual and at large numbers.
OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "SGD, large": partial(torch.optim.SGD, lr=1.0, momentum=0.5, nesterov=True, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=1e-3, weight_decay=0.1),
    "AdamW": partial(torch.optim.AdamW, lr=0.05, amsgrad=True),
    "NAdam": partial(torch.optim.NAdam, lr=1e-3),
    "RAdam": partial(torch.optim.RAdam, lr=1e-3),
    "Adamax": partial(torch.optim.Adamax, lr=1e-3),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=1.0),
    "Adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "Rprop": partial(torch.optim.Rprop, lr=1.0),
    "the start": partial(KeepsTheStart, lr=0.1),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("penalty_only", [False, True])
def test_other_states_are_not_taken_for_weights(make: Any, penalty_only: bool) -> None:
    _steps(make, _network(), penalty_only=penalty_only)
    norms = nn.Sequential(nn.LayerNorm(16), nn.LayerNorm(16))
    _steps(make, norms, penalty_only=penalty_only)


def test_the_mean_of_weights_that_asgd_keeps_is_found() -> None:
    """It does not change what is trained, but is what a user takes at the end, and every rank would have its own."""
    with pytest.raises(ConfigError, match="'ax' of 8 parameters"):
        _steps(partial(torch.optim.ASGD, lr=0.05, t0=2), _network())
