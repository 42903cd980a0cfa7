"""Models by name: of torchvision, of transformers, or made by a function of the user's own."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gqsgd.errors import ConfigError, did_you_mean

#: What a model's name may look like, for messages.
FORMS = "torchvision:NAME, transformers:TYPE or transformers:FOLDER, or module:factory"
#: Size of the images, and tokens of the texts, that models are tried on.
IMAGE_SIZE, TOKENS = 224, 128


@dataclass(frozen=True)
class Built:
    """A model, and what it can be called with.

    Attributes:
        name: as it was asked for.
        model: the model.
        inputs: arguments of its forward pass; None: nobody knows them.
    """

    name: str
    model: nn.Module
    inputs: tuple[Any, ...] | None


def build(name: str, batch: int, device: torch.device) -> Built:
    """Build a model with random weights; on the device "meta" without weights. Nothing is downloaded.

    A function of the user's returns the model, or the model and a tuple of the inputs of its forward pass.

    Args:
        name: see `FORMS`.
        batch: number of samples of its inputs.
        device: where the model and its inputs are.

    Raises:
        ConfigError: there is no such model.
    """
    kind, _, rest = name.partition(":")
    if not rest:
        raise ConfigError(f"model {name!r} is none of {FORMS}; write e.g. torchvision:resnet50")
    with torch.device(device):
        if kind == "torchvision":
            return Built(name, _torchvision(rest), (torch.zeros(batch, 3, IMAGE_SIZE, IMAGE_SIZE),))
        if kind == "transformers":
            return Built(name, _transformers(rest), (torch.zeros(batch, TOKENS, dtype=torch.int64),))
        made = _factory(kind, rest)()
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{name} returned {type(model).__name__}; return a torch.nn.Module, or a module and its inputs"
        )
    return Built(name, model, inputs)


def loss_of(output: Any) -> Tensor:
    """A number whose gradient reaches every output of a model."""
    if isinstance(output, Tensor):
        return output.float().sum()
    values = output.values() if hasattr(output, "values") else output
    tensors = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


def operations(built: Built) -> list[float] | None:
    """Multiplications of the forward pass for each parameter that is trained, in order; None: inputs are not known.

    A weight of a layer is used once for each position of the layer's output. Other operations do not count.
    """
    if built.inputs is None:
        return None
    counts: dict[int, float] = {}

    def count(module: nn.Module, _: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        for p in module.parameters(recurse=False):
            if isinstance(first, Tensor) and p.ndim > 1 and not isinstance(module, nn.Embedding):
                channels = first.shape[-1] if p.ndim == 2 else p.shape[0]
                counts[id(p)] = counts.get(id(p), 0.0) + p.numel() * first.numel() / max(1, channels)

    hooks = [module.register_forward_hook(count) for module in built.model.modules()]
    try:
        with torch.no_grad():
            built.model(*built.inputs)
    except Exception as error:
        raise ConfigError(
            f"model {built.name} cannot be called with {[_shape(value) for value in built.inputs]}: {error}; give a "
            "factory that returns the model and its inputs"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return [max(counts.get(id(p), 0.0), float(p.numel())) for p in built.model.parameters() if p.requires_grad]


def _shape(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _torchvision(name: str) -> nn.Module:
    models = _imported("torchvision.models", "torchvision")
    if name not in models.list_models():
        raise ConfigError(
            f"torchvision has no model {name!r}{did_you_mean(name, models.list_models())} "
            "(names: torchvision.models.list_models())"
        )
    model: nn.Module = models.get_model(name, weights=None)
    return model


def _transformers(name: str) -> nn.Module:
    package = _imported("transformers", "transformers")
    types = list(package.CONFIG_MAPPING)
    try:
        if os.path.exists(name):
            config = package.AutoConfig.from_pretrained(name, local_files_only=True)
        elif name in types:
            config = package.AutoConfig.for_model(name)
        else:
            raise ConfigError(
                f"transformers:{name} is neither a type of model{did_you_mean(name, types)} nor a folder or file with "
                "a configuration; nothing is downloaded: give e.g. transformers:gpt2 or transformers:./config.json"
            )
        model: nn.Module = package.AutoModel.from_config(config)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"transformers:{name} cannot be built: {error}; give another configuration") from error
    return model


def _factory(module: str, name: str) -> Callable[[], Any]:
    """A function of the user's, from the current folder or any that Python looks in."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ConfigError(f"model {module}:{name}: {error}; a model is {FORMS}") from error
    if not callable(function):
        raise ConfigError(f"module {module!r} has no function {name!r}; name one that returns a model")
    result: Callable[[], Any] = function
    return result


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{package} is not installed ({error}); pip install {package}, or name your own factory"
        ) from error
