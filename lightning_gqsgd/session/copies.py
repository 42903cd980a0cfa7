"""Copies of models that have a hook: the object that replaces the hook's state, and a warning when a copy is trained.

A copy of a DDP model (by copy, pickle or torch.save) has its own reducer in C++, and that reducer has no communication
hook. This is true for every communication hook of DDP. The gradients of the copy are averaged uncompressed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

logger = logging.getLogger(__name__)

Handles = list[RemovableHandle]


class DetachedState:
    """Replaces the `hook.GQSGDState` in a copy of a model.

    Attributes:
        config: the configuration of the hook on the original, as plain values.
        step: number of steps of that hook when the copy was made.
    """

    def __init__(self, config: dict[str, Any], step: int) -> None:
        self.config = config
        self.step = step

    def is_on(self, model: nn.Module) -> bool:
        """Returns False: a copy has no hook."""
        return False

    def __getattr__(self, name: str) -> Any:
        # It has to be an AttributeError: torch and this package call hasattr() on the states of hooks.
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"gqsgd: this is a copy of a hook's state (by copy or pickle), which has no {name!r}: a copy knows neither "
            "the copied model nor the other ranks; call register_gqsgd on the copied model"
        )


class OwnHook:
    """A forward hook, or forward pre-hook, of one model, which does nothing on copies of the model.

    A closure would call the original's function in forward passes of copies, and could not be pickled with the model.

    Args:
        model: the model, which is not kept alive.
        function: the function that torch calls for that model: ``function(model, inputs)`` or ``function(model, inputs,
            output)``.
    """

    def __init__(self, model: nn.Module, function: Callable[..., None]) -> None:
        self._model = weakref.ref(model)
        self._function = function

    def __call__(self, model: nn.Module, *args: Any) -> None:
        if model is self._model():
            self._function(model, *args)

    def __reduce__(self) -> Any:
        return _no_hook, ()


def on_gradients(parameters: Iterable[nn.Parameter], model: nn.Module, call: Callable[[nn.Parameter], None]) -> Handles:
    """Call a function for each gradient that parameters accumulate, until the model is gone.

    The module may be trained without its DDP model afterwards, so the function must keep neither the module nor the DDP
    model alive.
    """
    handles = [parameter.register_post_accumulate_grad_hook(call) for parameter in parameters]
    weakref.finalize(model, remove_all, handles)
    return handles


def remove_all(handles: Handles) -> None:
    """Remove hooks."""
    for handle in handles:
        handle.remove()


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    """Replaces an `OwnHook` in a copy of a model."""


def say_if_detached(model: nn.Module, inputs: Any) -> None:
    """Forward pre-hook: log once that the model is a copy, when it is trained."""
    if not (model.training and torch.is_grad_enabled()):
        return
    states = [state for _, state in getattr(model, "_comm_hooks", ()) if hasattr(state, "is_on")]
    if states and not any(state.is_on(model) for state in states) and not hasattr(model, "_gqsgd_said"):
        model._gqsgd_said = True  # type: ignore[assignment]
        logger.warning(
            "gqsgd: this DistributedDataParallel model is a copy of one with a hook, and has none itself, so its "
            "gradients are averaged uncompressed; call register_gqsgd on it before it is trained, or train the original"
        )
