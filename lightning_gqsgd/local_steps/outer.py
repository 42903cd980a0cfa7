"""The outer optimizer, which moves the anchor by the mean change of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_gqsgd.errors import ConfigError, check_one_of

#: A name in `OUTERS`, or what makes an optimizer of a list of tensors.
OuterOptimizer = str | Callable[..., Optimizer]

#: Outer optimizers by name: DiLoCo's (arXiv 2311.08105), FedPAQ's (arXiv 1909.13014), and the heavy ball of CHB (arXiv
#: 2209.11944), whose momentum is ours.
OUTERS: dict[str, Callable[..., Optimizer]] = {
    "nesterov": partial(SGD, lr=0.7, momentum=0.9, nesterov=True),
    "sgd": partial(SGD, lr=1.0),
    "heavy_ball": partial(SGD, lr=1.0, momentum=0.4),
}


def check_outer(outer: object) -> None:
    """Raise ConfigError for what is neither a name of an outer optimizer nor able to make one."""
    if isinstance(outer, str):
        check_one_of("outer", outer, OUTERS)
    elif isinstance(outer, Optimizer):
        raise ConfigError(
            f"outer={type(outer).__name__} is an optimizer of tensors of its own; give what makes one, e.g. "
            "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)"
        )
    elif not callable(outer):
        raise ConfigError(f"outer={outer!r} is neither one of {', '.join(map(repr, OUTERS))} nor a torch.optim class")


def make_outer(outer: OuterOptimizer, anchors: list[Tensor]) -> Optimizer:
    """The outer optimizer of some tensors.

    Raises:
        ConfigError: ``outer`` makes something else.
    """
    optimizer = (OUTERS[outer] if isinstance(outer, str) else outer)(anchors)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"outer={outer!r} makes a {type(optimizer).__name__}, not a torch optimizer")
    return optimizer


def describe_outer(optimizer: Optimizer) -> str:
    """Class and numbers, e.g. ``SGD(lr=0.7, momentum=0.9, nesterov=True)``; what is zero, false or None is left out."""
    numbers = ", ".join(f"{name}={_plain(value)}" for name, value in sorted(optimizer.defaults.items()) if value)
    return f"{type(optimizer).__name__}({numbers})"


def _plain(value: Any) -> str:
    return str(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)
