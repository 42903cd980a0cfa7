"""Builds models by name: of torchvision, of transformers, or by a function of the user."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_gqsgd.errors import ConfigError, did_you_mean, import_optional
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES

#: The forms of a model's name, for errors.
FORMS = "torchvision:NAME, transformers:TYPE or transformers:FOLDER, or module:factory"
#: Size of the images, and number of tokens of the texts, on which models are tried.
IMAGE_SIZE = 224
TOKENS = 128
#: Default number of samples of each rank in a step.
USUAL_BATCH = 32
#: Characters of another package's error that a message shows at most.
_SHOWN = 300

#: Returns a model, on PyTorch's default device, and its inputs for a number of samples; None if they are unknown.
Make = Callable[[int], tuple[nn.Module, tuple[Any, ...] | None]]


@dataclass(frozen=True)
class Built:
    """A model and its inputs.

    Attributes:
        name: the requested name.
        model: the model.
        inputs: arguments of its forward pass; None if unknown.
    """

    name: str
    model: nn.Module
    inputs: tuple[Any, ...] | None

    @property
    def samples(self) -> int | None:
        """Number of samples of the inputs, which is the length of the first tensor; None if unknown."""
        first = next((value for value in self.inputs or () if isinstance(value, Tensor) and value.ndim), None)
        return None if first is None else first.shape[0] or None


def build(name: str, batch: int, device: torch.device) -> Built:
    """Build a model with random weights, or without weights on the device "meta". Nothing is downloaded.

    A user's function returns the model, or the model and the inputs of its forward pass, as a tuple or one tensor.

    Args:
        name: see `FORMS`.
        batch: number of samples of its inputs.
        device: device of the model and its inputs.

    Raises:
        ConfigError: if there is no such model, if building it fails, or if its parameters cannot be reduced.
    """
    kind, _, rest = name.partition(":")
    if not kind or not rest or kind.startswith("."):
        raise ConfigError(f"model {name!r} is none of {FORMS}; write e.g. torchvision:resnet50")
    try:
        # Modules are imported before: the device is not for what they compute then, and torch 2.7 cannot load its
        # compiler, which transformers imports, on the device "meta".
        make = {"torchvision": _torchvision, "transformers": _transformers}.get(kind, partial(_factory, kind))(rest)
        with torch.device(device):
            built = Built(name, *make(batch))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # code of a user or of another package may raise any error
        raise ConfigError(
            f"model {name} cannot be built: {_in_a_line(error)}; name a model that can be built without arguments: "
            f"{FORMS}"
        ) from error
    _check_parameters(built)
    return built


def _check_parameters(built: Built) -> None:
    """Raise ConfigError if a parameter has no size yet, or has a dtype that no kernel supports."""
    for name, p in built.model.named_parameters():
        if is_lazy(p):
            raise ConfigError(
                f"model {built.name}: {name} has no size before the first forward pass; give its layer a size, or call "
                "the model once in the factory"
            )
        if p.requires_grad and p.dtype not in COMPUTE_DTYPES:
            known = ", ".join(str(dtype) for dtype in COMPUTE_DTYPES)
            raise ConfigError(f"model {built.name}: {name} has the dtype {p.dtype}; give it one of {known}")


def _in_a_line(error: BaseException) -> str:
    """Returns an error's type and text without line breaks."""
    words = " ".join(str(error).split())[:_SHOWN]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def loss_of(output: Any) -> Tensor:
    """Returns a number whose gradient reaches every output of a model."""
    if isinstance(output, Tensor):
        return output.float().sum()
    values = output.values() if hasattr(output, "values") else output
    tensors = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


def operations(built: Built) -> list[float] | None:
    """Returns the number of multiplications of the forward pass for each trained parameter, in order; None if the
    inputs are unknown.

    A weight of a layer is used once for each position of the layer's output. Other operations are ignored.
    """
    if built.inputs is None:
        return None
    counts: dict[int, float] = {}

    def count(module: nn.Module, _: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        for p in module.parameters(recurse=False):
            if isinstance(first, Tensor) and p.ndim > 1 and not isinstance(module, nn.Embedding):
                is_filter = p.ndim > 3 or isinstance(
                    module, nn.Conv1d
                )  # else e.g. the positions of a vision transformer
                channels = p.shape[0] if is_filter else first.shape[-1]
                counts[id(p)] = counts.get(id(p), 0.0) + p.numel() * first.numel() / max(1, channels)

    hooks = [module.register_forward_hook(count) for module in built.model.modules()]
    try:
        with torch.no_grad():
            built.model(*built.inputs)
    except Exception as error:
        raise ConfigError(
            f"model {built.name} cannot be called with {[_shape(value) for value in built.inputs]}: "
            f"{_in_a_line(error)}; give a factory that returns the model and its inputs"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return [max(counts.get(id(p), 0.0), float(p.numel())) for p in built.model.parameters() if p.requires_grad]


def _shape(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _torchvision(name: str) -> Make:
    models = import_optional("torchvision.models", "torchvision", f"model torchvision:{name}", "name your own factory")
    if name not in models.list_models():
        raise ConfigError(
            f"torchvision has no model {name!r}{did_you_mean(name, models.list_models())} "
            "(names: torchvision.models.list_models())"
        )
    # By default, detectors and segmenters use pretrained weights of their backbone, which would be downloaded.
    takes = inspect.signature(models.get_model_builder(name)).parameters
    without = {"weights_backbone": None} if "weights_backbone" in takes else {}
    return lambda batch: (
        models.get_model(name, weights=None, **without),
        (torch.zeros(batch, 3, IMAGE_SIZE, IMAGE_SIZE),),
    )


def _transformers(name: str) -> Make:
    package = import_optional("transformers", "transformers", f"model transformers:{name}", "name your own factory")
    types = list(package.CONFIG_MAPPING)
    try:
        if os.path.exists(name):
            config = package.AutoConfig.from_pretrained(name, local_files_only=True)
        elif name in types:
            config = package.AutoConfig.for_model(name)
        else:
            raise ConfigError(
                f"transformers:{name} is neither a type of model nor a folder or file with a configuration"
                f"{did_you_mean(name, types)} (nothing is downloaded: give e.g. transformers:gpt2 or "
                "transformers:./config.json)"
            )
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"transformers:{name} cannot be built: {_in_a_line(error)}; give another configuration"
        ) from error
    if package.MODEL_MAPPING.get(type(config), None) is None:  # it imports the model's module
        raise ConfigError(
            f"transformers:{name} is a {type(config).__name__}, which no AutoModel has; name another type"
        )

    def make(batch: int) -> tuple[nn.Module, Any]:
        model = package.AutoModel.from_config(config)
        return model, _inputs_of(model, batch)

    return make


def _inputs_of(model: Any, batch: int) -> tuple[Any, ...]:
    """Returns inputs of a model of transformers: images, or tokens, of which a decoder that follows an encoder gets its
    own."""
    if model.main_input_name == "pixel_values":
        side = getattr(model.config, "image_size", IMAGE_SIZE)
        sides = (side, side) if isinstance(side, int) else tuple(side)
        return (torch.zeros(batch, getattr(model.config, "num_channels", 3), *sides),)
    tokens = torch.zeros(batch, TOKENS, dtype=torch.int64)
    return (tokens, None, tokens) if getattr(model.config, "is_encoder_decoder", False) else (tokens,)


def _factory(module: str, name: str) -> Make:
    """Returns the maker of a user's function, which is in the current folder or in Python's path."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ConfigError(f"model {module}:{name}: {_in_a_line(error)}; a model is {FORMS}") from error
    if not callable(function):
        raise ConfigError(f"module {module!r} has no function {name!r}; name one that returns a model")

    def make(_: int) -> tuple[nn.Module, Any]:
        made = function()
        model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"{module}:{name} returned {type(model).__name__}; return a torch.nn.Module, or a module and its inputs"
            )
        inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
        if not (inputs is None or isinstance(inputs, (tuple, list))):
            raise ConfigError(
                f"{module}:{name} returned inputs of type {type(inputs).__name__}; return a tensor, or a tuple of "
                "inputs"
            )
        return model, None if inputs is None else tuple(inputs)

    return make
