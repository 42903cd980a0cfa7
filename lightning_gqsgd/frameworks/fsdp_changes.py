"""Detects changes of a model under FSDP2 that would let the ranks' weights drift apart.

FSDP reduces what `fully_shard` was given, and calls one all-reduce hook and one reduce-scatter for each module. So a
hook that somebody else sets later replaces the one that averages, and a parameter that comes later gets the gradient of
its own rank alone. FSDP says nothing in either case.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from lightning_gqsgd.errors import ConfigError, counted, listed
from lightning_gqsgd.frameworks.fsdp_modules import seen_groups, sharded_since, unreduced_parameters


class _Seen(NamedTuple):
    """A module as it was when a model was last looked through.

    Attributes:
        module: the module; hooks must not keep a model alive.
        kind: its class, which `fully_shard` and parametrisations replace.
        children: the ids of its children.
        parameters: how many it has itself.
    """

    module: weakref.ref[nn.Module]
    kind: type
    children: list[int]
    parameters: int


class ModelChanges:
    """Compares a model with what it was when hooks were registered on it.

    Args:
        model: the model.
        averages: whether the hooks average over replicas, which nobody does where a module has no hook.
    """

    def __init__(self, model: nn.Module, averages: bool) -> None:
        self._sharded = seen_groups(model)
        self._averages = averages
        self._look_through(model)
        # Registering has warned of those that require a gradient already.
        self._known = {name for name, module, parameter in self._unreduced if _is_trained(module(), parameter)}

    def check(self, model: nn.Module) -> None:
        """Check that FSDP reduces all that the model trains, and that all its modules have hooks.

        Raises:
            ConfigError: a module was sharded since, or a parameter that FSDP does not reduce requires a gradient now.
        """
        if _has_changed(self._seen):
            added = sharded_since(model, self._sharded) if self._averages else []
            if added:
                raise ConfigError(
                    f"{counted(len(added), 'module')} ({listed(added)}) became sharded after register_gqsgd_fsdp, so "
                    "replicas would not average the gradients there; call register_gqsgd_fsdp after the last "
                    "fully_shard, which is that of the root"
                )
            self._look_through(model)
        later = [
            name
            for name, module, parameter in self._unreduced
            if name not in self._known and _is_trained(module(), parameter)
        ]
        if later:
            raise ConfigError(
                f"{counted(len(later), 'parameter')} ({listed(later)}) would be trained by each rank on its own: FSDP "
                "does not reduce the gradients of what was added to the model after fully_shard, or is among its "
                "ignored_params. Add modules and parameters before fully_shard, and call register_gqsgd_fsdp after "
                "it; if you average their gradients yourself, let them require a gradient before register_gqsgd_fsdp"
            )

    def _look_through(self, model: nn.Module) -> None:
        self._seen = [
            _Seen(weakref.ref(module), type(module), [*map(id, module._modules.values())], len(module._parameters))
            for module in model.modules()
        ]
        self._unreduced = [
            (f"{name}.{parameter}" if name else parameter, weakref.ref(module), parameter)
            for name, module, parameter in unreduced_parameters(model)
        ]


def _has_changed(every: Sequence[_Seen]) -> bool:
    """Returns True if a module is not as it was."""
    # One loop without calls, because large models have thousands of modules.
    for reference, kind, children, parameters in every:
        module = reference()
        if module is None or type(module) is not kind or len(module._parameters) != parameters:
            return True
        modules = module._modules
        if len(modules) != len(children) or (children and [*map(id, modules.values())] != children):
            return True
    return False


def _is_trained(module: nn.Module | None, parameter: str) -> bool:
    value = None if module is None else module._parameters.get(parameter)
    return value is not None and value.requires_grad
