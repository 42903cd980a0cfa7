"""Finds the DDP models of this process that have given parameters, and notes whether they are called."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.session.copies import Handles, OwnHook, remove_all
from lightning_gqsgd.wire.peers import is_alive


class DDPModels:
    """DDP models that have some parameters, and whether one of them was called.

    Args:
        parameters: ids of the parameters.
        ranks: numbers of ranks in torch.distributed. Only models that average over at least two of them are found. None
            finds all models.
    """

    def __init__(self, parameters: Set[int], ranks: Set[int] | None = None) -> None:
        self._parameters = parameters
        self._ranks = ranks
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handles: Handles = []
        self._was_called = False

    def look(self, but: Collection[nn.Module | None] = ()) -> bool:
        """Search all objects of this process for such models other than ``but``, which takes a fraction of a second.
        Returns whether new ones were found."""
        self._known.update(model for model in but if model is not None)
        found = [model for model in _all_models() if model not in self._known and self._counts(model)]
        self._known.update(found)
        self._handles += [model.register_forward_pre_hook(OwnHook(model, self._note)) for model in found]
        return bool(found)

    def take_called(self) -> bool:
        """Returns whether one of the found models was called since the last call of this method, with gradients that
        DDP averages."""
        was_called = self._was_called
        self._was_called = False
        return was_called

    def forget(self) -> None:
        """Stop watching the found models."""
        remove_all(self._handles)
        self._handles = []

    def _counts(self, model: DistributedDataParallel) -> bool:
        if self._parameters.isdisjoint(map(id, model.parameters())):
            return False
        if self._ranks is None:
            return True
        group = model.process_group
        return is_alive(group) and len(self._ranks & set(dist.get_process_group_ranks(group))) > 1

    def _note(self, model: Any, inputs: object) -> None:
        if torch.is_grad_enabled() and model.require_backward_grad_sync:
            self._was_called = True


def is_in_ddp_model(parameters: Set[int]) -> bool:
    """Returns whether a DDP model of this process has one of the parameters with these ids; it looks at all objects."""
    return any(not parameters.isdisjoint(map(id, model.parameters())) for model in _all_models())


def _all_models() -> list[DistributedDataParallel]:
    """Returns all DDP models of this process. ``type`` is called on each object, because some objects fake their
    ``__class__``."""
    found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    # If the constructor raised, an object without a module may be left.
    return [model for model in found if "module" in model.__dict__.get("_modules", {})]
