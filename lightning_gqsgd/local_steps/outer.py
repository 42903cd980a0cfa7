"""The outer optimizer, which moves the anchor by the mean change of all ranks."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_gqsgd.errors import ConfigError, check_one_of, counted, describe_difference
from lightning_gqsgd.kernels.wire import is_in_range
from lightning_gqsgd.session.parameters import keys_in, parameters_of

logger = logging.getLogger(__name__)

#: A name in `OUTERS`, or a function that creates an optimizer from a list of tensors.
OuterOptimizer = str | Callable[..., Optimizer]

#: Outer optimizers by name: DiLoCo's (arXiv 2311.08105), FedPAQ's (arXiv 1909.13014), and the heavy ball of CHB (arXiv
#: 2209.11944), whose momentum is our choice.
OUTERS: dict[str, Callable[..., Optimizer]] = {
    "nesterov": partial(SGD, lr=0.7, momentum=0.9, nesterov=True),
    "sgd": partial(SGD, lr=1.0),
    "heavy_ball": partial(SGD, lr=1.0, momentum=0.4),
}

#: A function that creates one, for errors.
_EXAMPLE = "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)"


def check_outer(outer: object) -> None:
    """Raise ConfigError for a value that is neither the name of an outer optimizer nor able to create one."""
    if isinstance(outer, str):
        check_one_of("outer", outer, OUTERS)
    elif isinstance(outer, Optimizer):
        raise ConfigError(
            f"outer={type(outer).__name__} is an optimizer of tensors of its own; give what makes one, e.g. {_EXAMPLE}"
        )
    elif not callable(outer):
        raise ConfigError(
            f"outer={outer!r} is neither one of {', '.join(map(repr, OUTERS))} nor a torch.optim class, or a function "
            "that returns an optimizer; give one of them"
        )


def make_outer(outer: OuterOptimizer, anchors: list[Tensor]) -> Optimizer:
    """Create the outer optimizer of some tensors.

    Raises:
        ConfigError: if ``outer`` creates no optimizer, an optimizer of other tensors, one whose steps need the loss, or
            one with a hyperparameter that is not finite.
    """
    try:
        optimizer = (OUTERS[outer] if isinstance(outer, str) else outer)(anchors)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"outer={outer!r} makes no optimizer of a list of {counted(len(anchors), 'tensor')} ("
            f"{type(error).__name__}: {error}); give a function that makes one, e.g. {_EXAMPLE}"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"outer={outer!r} makes a {type(optimizer).__name__}, not a torch optimizer; give a function that returns "
            "a torch.optim.Optimizer of the tensors that it is called with"
        )
    own = [id(tensor) for tensor in parameters_of([optimizer])]
    if sorted(own) != sorted(map(id, anchors)):
        raise ConfigError(
            f"outer={outer!r} makes a {type(optimizer).__name__} of {counted(len(own), 'tensor')}, not of the "
            f"{counted(len(anchors), 'anchor')} that it is called with, and would not move them; make it of all of "
            f"them, e.g. {_EXAMPLE}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"outer={outer!r} makes a {type(optimizer).__name__}, whose steps evaluate the loss again; a mean change "
            "has no loss, so take an optimizer of gradients alone, such as torch.optim.SGD or torch.optim.Adam"
        )
    # Anchors would become NaN, and the average would fail as if a rank had sent a NaN.
    for name, value in _numbers(optimizer).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(
                f"outer={outer!r} makes a {type(optimizer).__name__} with {name}={value}; give a finite one"
            )
    return optimizer


def load_outer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load an outer optimizer's state, including its hyperparameters, as torch's optimizers do.

    If the checkpoint's hyperparameters differ from those of this run, the difference is logged.

    Raises:
        ConfigError: if the state belongs to another kind of optimizer, or if a finite value becomes infinite in the
            anchors' dtype. Nothing is loaded then.
    """
    asked = _numbers(optimizer)
    before = optimizer.state_dict()
    try:
        optimizer.load_state_dict(dict(state))
        missing = sorted(set(asked) - set(_numbers(optimizer)))
        if missing:  # torch has loaded the hyperparameters of another class
            optimizer.load_state_dict(before)
            raise ValueError(f"it has no {missing[0]!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the state of local steps has the state of another outer optimizer than {type(optimizer).__name__} "
            f"({error}); resume with the one that wrote it"
        ) from error
    # torch has cast the saved values, in the order of parameters.
    for number, tensor in zip(keys_in(state), parameters_of([optimizer]), strict=True):
        for name, value in state["state"].get(number, {}).items():
            if isinstance(value, Tensor) and not is_in_range(value, tensor.dtype):
                optimizer.load_state_dict(before)
                raise ConfigError(
                    f"the state of local steps has {value.dtype} for the outer optimizer's {name!r} with values beyond "
                    f"the largest number of this run's {tensor.dtype}; resume with anchors of the dtype that wrote it"
                )
    loaded = _numbers(optimizer)
    if loaded != asked:
        logger.warning(
            "gqsgd: the checkpoint's outer optimizer goes on with its own numbers, not with those that this run asked "
            "for (%s); to change them, set them in local_steps.averages.outer.param_groups after loading",
            describe_difference(
                {name: repr(value) for name, value in loaded.items()},
                {name: repr(value) for name, value in asked.items()},
            ),
        )


def _numbers(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the hyperparameters in an optimizer's first group."""
    return {name: value for name, value in optimizer.param_groups[0].items() if name not in ("params", "initial_lr")}


def describe_outer(optimizer: Optimizer) -> str:
    """Returns class and hyperparameters, e.g. ``SGD(lr=0.7, momentum=0.9, nesterov=True)``, without those that are
    zero, False or None."""
    present = sorted(_numbers(optimizer).items())
    numbers = ", ".join(f"{name}={_plain(value)}" for name, value in present if value)
    return f"{type(optimizer).__name__}({numbers})"


def _plain(value: Any) -> str:
    return str(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)
