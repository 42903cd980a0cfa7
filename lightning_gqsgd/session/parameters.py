"""The parameters of a model, numbered and described for their reduction."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError, listed
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.spec.bits_by_name import check_matched
from lightning_gqsgd.wire.plan import Segments

#: What torch.compile puts into the names of a module's tensors.
_OF_COMPILED = "_orig_mod."


@dataclass(frozen=True)
class Parameter:
    """A parameter of a model.

    Attributes:
        number: its place in the model. The dither depends on it.
        name: its name in the model.
        numel: number of its coordinates.
        raw: whether its gradient is sent uncompressed.
        bits: the number of bits that ``bits`` by name gives it; None if it uses the configuration's.
    """

    number: int
    name: str
    numel: int
    raw: bool
    bits: int | None = None


def number_parameters(parameters: Mapping[str, Tensor], config: GQSGDConfig) -> list[Parameter]:
    """Returns the parameters of a model, in order, with the settings that a configuration gives them.

    Raises:
        ConfigError: if a parameter has no shape yet, or if a pattern of ``exclude`` matches no parameter; see also
            `spec.bits_by_name.BitsByName.check`.
    """
    lazy = [name for name, tensor in parameters.items() if is_lazy(tensor)]
    if lazy:
        raise ConfigError(
            f"parameter {listed(lazy)} has no shape before the first forward pass: call the module once first, e.g. on "
            "zeros under torch.no_grad(), on every rank"
        )
    check_matched("exclude", config.exclude, list(parameters))
    numbered = [
        Parameter(number, name, tensor.numel(), tensor.numel() < config.min_numel or _is_excluded(name, config))
        for number, (name, tensor) in enumerate(parameters.items())
    ]
    by_name = config.bits_by_name
    if by_name is None:
        return numbered
    by_name.check(list(parameters), [entry.name for entry in numbered if entry.raw])
    return [replace(entry, bits=by_name.bits_of(entry.name)) for entry in numbered]


def check_for_tensors(config: GQSGDConfig, who: str) -> None:
    """Raise ConfigError if a configuration for single tensors needs to know parameters or steps.

    Args:
        config: the configuration, with its reducer chosen.
        who: the function or process group that reduces them, in words.
    """
    if config.remembers:
        raise ConfigError(
            f"{who} does not know which tensor it reduces, so it cannot remember anything; give "
            f"{config.without_memory}, or register the hook on a DDP model (register_gqsgd)"
        )
    if config.exclude:
        raise ConfigError(
            f"exclude={config.exclude}: {who} reduces tensors that have no names; leave exclude out, and reduce such "
            "tensors with bits=32"
        )
    if config.warmup_steps:
        raise ConfigError(
            f"warmup_steps={config.warmup_steps}: {who} counts no steps; leave it out, and give bits=32 as long as "
            "nothing is to be compressed"
        )


def segments_of(parameters: Iterable[Parameter], choices: Mapping[int, int]) -> Segments:
    """Returns the segments of a flat tensor's parameters; ``choices`` maps numbers of bits to numbers of
    configurations.

    A parameter without its own number of bits uses choice 0.
    """
    return Segments(Segment(p.number, p.numel, p.raw, 0 if p.bits is None else choices[p.bits]) for p in parameters)


def parameters_of(optimizers: Iterable[Optimizer]) -> Iterator[nn.Parameter]:
    """Returns all parameters of some optimizers, in order."""
    return (parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"])


def new_order(known: Iterable[Tensor], present: Iterable[Tensor]) -> tuple[int, ...]:
    """Returns the numbers that parameters of a model have in ``known``, in the order in which the model has them now.

    Empty if the order is that of ``known``, and none has left; also if all have left, which callers refuse by name.
    Parameters that are new in the model do not count.
    """
    numbers = {id(parameter): number for number, parameter in enumerate(known)}
    order = tuple(numbers[id(parameter)] for parameter in present if id(parameter) in numbers)
    return () if order == tuple(range(len(numbers))) else order


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """Returns in which order the coordinates of a tensor lie in memory: the strides of its dimensions, of those with
    more than one coordinate. Tensors of equal shapes can be compared. Empty for a tensor without strides."""
    if tensor.layout != torch.strided:
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def plain_name(name: str) -> str:
    """Returns a tensor's name in a module, without what torch.compile has put into it."""
    return name.replace(_OF_COMPILED, "")


def keys_in(state: Mapping[str, Any]) -> Iterable[Any]:
    """Returns the keys of an optimizer's parameters in its state, in order: numbers, or names."""
    return [key for group in state["param_groups"] for key in group["params"]]


def digest(parameters: Iterable[object]) -> str:
    """Returns the number of parameters with a digest, which is equal on ranks whose models have equal parameters."""
    texts = list(map(str, parameters))
    hashed = hashlib.sha256("\n".join(texts).encode())
    return f"{len(texts)} (digest {hashed.hexdigest()[:16]})"


def _is_excluded(name: str, config: GQSGDConfig) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in config.exclude)
