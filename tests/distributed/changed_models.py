"""Changes that training scripts make to a model after it was wrapped, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.distributed.models import mlp


def frozen_but_the_head() -> nn.Sequential:
    """Layers 0 and 2 are frozen, layer 4 is trained."""
    model = mlp()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    return model


def _layer(inputs: int, outputs: int) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(inputs, outputs)


class Adapter(nn.Module):
    """A layer with a trained low-rank correction beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = _layer(layer.in_features, 4)
        self.up = _layer(4, layer.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def _swap_frozen(model: nn.Sequential) -> None:
    model[0].requires_grad_(True)
    model[2].requires_grad_(True)
    model[4].requires_grad_(False)


def assign_copies(model: nn.Sequential) -> None:
    """Load a model's own state, with copies in place of its parameters."""
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def _by_hand(model: nn.Sequential) -> None:
    weight = model[2].weight
    weight.data = weight.data.double()
    weight.data = weight.data.float()


#: What something else of a training script holds: a state without copies, for example, of an average of weights.
_HELD: list[torch.Tensor] = []


def _cast_while_held(model: nn.Sequential) -> None:
    _HELD[:] = model.state_dict().values()
    model[2].double().float()


def _one_coordinate(model: nn.Sequential) -> None:
    model[5].scale = nn.Parameter(model[5].scale.detach().clone())


def _transpose_in_memory(model: nn.Sequential) -> None:
    """What ``model.to(memory_format=torch.channels_last)`` does to the weights of convolutions."""
    weight = model[2].weight
    weight.data = weight.data.t().contiguous().t()


#: What is done to `mlp` between two steps, after which DDP does not reduce all that is trained as it should.
UNREDUCED: dict[str, Callable[[nn.Sequential], object]] = {
    "a layer is replaced": lambda model: model.__setitem__(4, _layer(128, 10)),
    "a layer is added": lambda model: model.append(_layer(10, 10)),
    "a layer is put in between": lambda model: model.insert(3, _layer(128, 128)),
    "a state is assigned": assign_copies,
    "weights are normalised": lambda model: parametrizations.weight_norm(model[2]),
    "weights get a spectral norm": lambda model: parametrizations.spectral_norm(model[2]),
    "an adapter is put in": lambda model: model.__setitem__(2, Adapter(model[2])),
    "the model is cast and cast back": lambda model: model.double().float(),
    "a layer is cast and cast back": lambda model: model[2].bfloat16().float(),
    "a weight is cast by hand": _by_hand,
    "a layer is cast while its values are held": _cast_while_held,
    "a weight gets another memory format": _transpose_in_memory,
}

#: The same for `frozen_but_the_head`.
UNFROZEN: dict[str, Callable[[nn.Sequential], object]] = {
    "all is unfrozen": lambda model: model.requires_grad_(True),
    "what is reduced is frozen, the rest is unfrozen": _swap_frozen,
}


class Scaled(nn.Module):
    """Multiplies by a parameter with one coordinate."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def scaled_mlp() -> nn.Sequential:
    """`mlp` with a learnt factor behind it."""
    return mlp().append(Scaled())


#: The same for `scaled_mlp`.
SCALED: dict[str, Callable[[nn.Sequential], object]] = {"a parameter of one coordinate is replaced": _one_coordinate}

#: Every change, with what makes the model that it is for.
CHANGES: dict[str, tuple[Callable[[], nn.Sequential], Callable[[nn.Sequential], object]]] = {
    **{name: (mlp, change) for name, change in UNREDUCED.items()},
    **{name: (frozen_but_the_head, change) for name, change in UNFROZEN.items()},
    **{name: (scaled_mlp, change) for name, change in SCALED.items()},
}
