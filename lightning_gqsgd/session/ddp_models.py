"""Finds the DDP models of this process that have given parameters, and whether they are used."""

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
from lightning_gqsgd.wire.communicator import is_alive


class DDPModels:
    """DDP models that have some parameters, and whether one of them was called.

    Args:
        parameters: ids of the parameters.
        ranks: numbers of ranks, among all of torch.distributed. Only models count that average over at least two of
            them. None: all models count.
    """

    def __init__(self, parameters: Set[int], ranks: Set[int] | None = None) -> None:
        self._parameters = parameters
        self._ranks = ranks
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handles: Handles = []
        self._was_called = False

    def look(self, but: Collection[nn.Module | None] = ()) -> bool:
        """Look for such models among all objects, which takes a fraction of a second.

        Args:
            but: models that do not count.

        Returns:
            Whether there are some that were not found before.
        """
        self._known.update(model for model in but if model is not None)
        found = [model for model in _all_models() if model not in self._known and self._counts(model)]
        self._known.update(found)
        self._handles += [model.register_forward_pre_hook(OwnHook(model, self._note)) for model in found]
        return bool(found)

    def take_called(self) -> bool:
        """Returns whether one that was found was called since the last time, with gradients that DDP averages."""
        was_called = self._was_called
        self._was_called = False
        return was_called

    def forget(self) -> None:
        """Watch no longer those that were found."""
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


def _all_models() -> list[DistributedDataParallel]:
    """Returns all of this process. The type of each object is asked, because some pretend to be of another class."""
    found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
    # Where the constructor has refused a module, an object may be left without one.
    return [model for model in found if "module" in model.__dict__.get("_modules", {})]
