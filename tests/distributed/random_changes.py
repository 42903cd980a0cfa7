"""Random changes to a model between its steps, under each framework: what every rank sees of them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from lightning_gqsgd import GQSGDKwargs, register_gqsgd
from lightning_gqsgd.errors import CollectiveError, ConfigError
from tests.distributed.changed_models import Adapter, assign_copies
from tests.distributed.models import fingerprint, loss_of, mlp
from tests.distributed.ranks import logged

#: Steps of a sequence, each after a change or without one.
STEPS = 6

#: Configurations, one of which a sequence has.
HOOKS: list[dict[str, Any]] = [
    {"bits": 8},
    {"bits": 4},
    {"preset": "dore"},
    {"auto": True},
    {"reducer": "native"},
]


def _linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Every linear layer with the module that holds it and its name there."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and child.in_features > 4 and child.out_features > 4
    ]


def _replace(model: nn.Sequential, chance: random.Random) -> None:
    parent, name, layer = chance.choice(_linears(model))
    torch.manual_seed(chance.randrange(1000))
    setattr(parent, name, nn.Linear(layer.in_features, layer.out_features))


def _adapt(model: nn.Sequential, chance: random.Random) -> None:
    parent, name, layer = chance.choice(_linears(model))
    setattr(parent, name, Adapter(layer))


def _cast(model: nn.Sequential, chance: random.Random) -> None:
    _, _, layer = chance.choice(_linears(model))
    layer.double().float()


def _parametrise(model: nn.Sequential, chance: random.Random) -> None:
    layer = chance.choice(_linears(model))[2]
    if parametrize.is_parametrized(layer):
        parametrize.remove_parametrizations(layer, "weight")
    else:
        weight_norm(layer)


def _interrupt(model: nn.Sequential, chance: random.Random) -> None:
    """Let the next backward pass end with an exception, in one of the layers."""

    def fail(*_: Any) -> None:
        handle.remove()
        raise ZeroDivisionError

    handle = chance.choice(_linears(model))[2].register_full_backward_pre_hook(fail)


#: Changes by name.
CHANGES: dict[str, Callable[[nn.Sequential, random.Random], object]] = {
    "nothing": lambda model, chance: None,
    "freeze": lambda model, chance: chance.choice(_linears(model))[2].requires_grad_(False),
    "unfreeze": lambda model, chance: chance.choice(_linears(model))[2].requires_grad_(True),
    "replace": _replace,
    "adapt": _adapt,
    "add": lambda model, chance: model.append(nn.Linear(10, 10)),
    "cast a layer": _cast,
    "cast all": lambda model, chance: model.double().float(),
    "assign": lambda model, chance: assign_copies(model),
    "parametrise": _parametrise,
    "interrupt": _interrupt,
}


class Bare:
    """A DDP model with the hook on it, and what a training script does with it.

    Attributes:
        model: what is called.
        module: the model inside.
        state: that of the hook.
    """

    def __init__(self, hook: dict[str, Any], module: nn.Sequential, *, unused: bool) -> None:
        self.module = module
        self._options = {"find_unused_parameters": unused, "bucket_cap_mb": 0.03}
        self._make(hook)

    def _make(self, hook: dict[str, Any]) -> None:
        self.model: Any = DistributedDataParallel(self.module, **self._options)
        self.state = register_gqsgd(self.model, **hook)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def rewrap(self) -> bool:
        """Wrap the module anew; returns whether the framework offers that."""
        self.model = self.state.rewrap(lambda module: DistributedDataParallel(module, **self._options))
        return True


class WithAccelerate(Bare):
    """The same with an Accelerator."""

    def _make(self, hook: dict[str, Any]) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state()
        GradientState._reset_state()
        handler = GQSGDKwargs(**hook, **self._options)
        self._accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        self.model = self._accelerator.prepare(self.module)
        (self.state,) = handler.states

    def backward(self, loss: torch.Tensor) -> None:
        self._accelerator.backward(loss)


class WithFabric(Bare):
    """The same with Fabric."""

    def _make(self, hook: dict[str, Any]) -> None:
        from lightning.fabric import Fabric

        from lightning_gqsgd.frameworks.fabric_lightning import GQSGDFabricStrategy

        strategy = GQSGDFabricStrategy(**hook, **self._options)
        self._fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy=strategy)
        self._fabric.launch()
        self.model = self._fabric.setup(self.module)
        (self.state,) = strategy.gqsgd_states

    def backward(self, loss: torch.Tensor) -> None:
        self._fabric.backward(loss)

    def rewrap(self) -> bool:
        return False


FRAMEWORKS: dict[str, type[Bare]] = {"ddp": Bare, "accelerate": WithAccelerate, "fabric": WithFabric}


def sequence(rank: int, framework: str, seed: int) -> list[str]:
    """What a rank sees of one sequence: after each step its change, its error, and the bits of the model.

    Every rank makes the same changes. A sequence ends with an error, unless the model is wrapped anew.
    """
    chance = random.Random(seed)  # noqa: S311 - no secrets
    module = mlp()
    for _, _, layer in _linears(module)[:-1]:
        layer.requires_grad_(chance.random() < 0.7)
    one = FRAMEWORKS[framework](chance.choice(HOOKS), module, unused=chance.random() < 0.5)
    seen = []
    try:
        for step in range(STEPS):
            name = chance.choice(list(CHANGES))
            CHANGES[name](module, chance)
            error = _train(one, rank, step)
            seen.append(f"{name}: {error or 'fine'}: {fingerprint(module)}")
            goes_on = error.startswith(("ConfigError: parameter", "ZeroDivisionError"))
            if error and not (goes_on and one.rewrap()):
                return seen
        seen.append(_goes_around(one, rank))
    finally:
        one.state.close()
    return seen


def sequences(rank: int, framework: str, seeds: range) -> list[list[str]]:
    """`sequence` for each of some seeds."""
    return [sequence(rank, framework, seed) for seed in seeds]


def _train(one: Bare, rank: int, step: int) -> str:
    """Make a step; returns the error, if there is one."""
    optimizer = torch.optim.SGD(one.module.parameters(), lr=0.1)
    optimizer.zero_grad()
    try:
        one.backward(loss_of(one.model, rank, step))
        optimizer.step()
    except (ConfigError, CollectiveError, RuntimeError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {str(error)[:60]}"
    finally:
        for layer in one.module.modules():
            layer._backward_pre_hooks.clear()  # of `_interrupt`, whose layer had no gradient
    return ""


def _goes_around(one: Bare, rank: int) -> str:
    """Make a step without DDP; returns whether that was said."""
    optimizer = torch.optim.SGD(one.module.parameters(), lr=0.1)
    optimizer.zero_grad()
    said = logged()
    loss_of(one.module, rank, STEPS).backward()
    optimizer.step()
    return "went around: " + ("said" if any("does not average" in text for text in said) else "silent")
