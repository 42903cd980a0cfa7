"""Notices backward passes whose gradients DDP does not average, and weights that are trained with them.

DDP reduces what the backward pass after each of its forward passes computes, once. Gradients of any other backward pass
are left as they are on each rank, and DDP says nothing: of a second one through the same graph, of the second of two
after two forward passes, and of one whose forward pass went around DDP. An optimizer that steps within the backward
pass uses gradients that are not averaged yet.

None of this is an error by itself. Gradients may be thrown away, or averaged with those of a later backward pass. So
what is said is said once weights are trained with them, or added to a mean that still waits for the optimizer.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_gqsgd.errors import ConfigError

logger = logging.getLogger(__name__)

#: Parameters whose gradients are watched: each costs a call of Python in every backward pass.
WATCHED = 4

_REMEDY = (
    "Call the DistributedDataParallel model itself, not model.module or single layers, and call backward() once for "
    "each of its forward passes: loss.backward() of the sum of all losses"
)


class BackwardWatch:
    """Watches the backward passes of one DDP model on this rank.

    Args:
        model: the DDP model, with the hook on it.
        parameters: the parameters that DDP reduces, in its order.
    """

    def __init__(self, model: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> None:
        self._model = weakref.ref(model)
        self._reduced = {id(p) for p in parameters}
        every = max(1, len(parameters) // (WATCHED - 1))
        watched = list(dict.fromkeys([*parameters[::every][: WATCHED - 1], parameters[-1]]))
        self._watched = [weakref.ref(parameter) for parameter in watched]
        self._has_hook = True  # not plain DDP in its place
        self._expects = False  # a forward pass has announced a backward pass that DDP reduces
        self._is_local = False  # the latest forward pass was one of no_sync
        self._has_begun = False  # the announced backward pass has accumulated a gradient
        self._is_asking = False  # the backward pass under way is looked at again when it ends
        self._has_said = False
        self._reductions = 0
        # Versions of the weights, which every change in place counts: when a gradient was left unaveraged, and when the
        # latest mean was computed, while no optimizer has used it.
        self._stray_version: int | None = None
        self._mean_version: int | None = None
        count = _counter(weakref.ref(self))
        self._handles = [parameter.register_post_accumulate_grad_hook(count) for parameter in watched]
        weakref.finalize(model, _remove, self._handles)  # the module may be trained without DDP afterwards
        _register(self)

    def remove(self) -> None:
        """Watch no longer: another DDP model is wrapped around the module, or the hook was closed."""
        _remove(self._handles)
        _WATCHES.discard(self)

    def before_forward(self, model: DistributedDataParallel, *, has_hook: bool) -> None:
        """Note a forward pass in which gradients are enabled.

        Args:
            model: the DDP model.
            has_hook: whether the hook carries the gradients, not plain DDP.

        Raises:
            ConfigError: the backward pass before has not reached DDP.
        """
        self._say_if_trained_astray()
        self._is_local = not model.require_backward_grad_sync
        if self._is_local:
            return
        if self._expects and self._has_begun and self._has_hook:
            self._check_reached(model)
        self._has_hook = has_hook
        self._expects = True
        self._has_begun = False

    def end_reduction(self) -> None:
        """Note that DDP has handed over the last gradients of a backward pass."""
        self._reductions += 1
        self._expects = False
        self._has_begun = False
        self._stray_version = None  # what was left unaveraged before is part of this mean
        self._mean_version = self._version()

    def count_gradient(self) -> None:
        """Note that a watched parameter has accumulated a gradient."""
        if self._expects or self._is_local:
            self._has_begun = self._expects
            return
        if self._has_said or self._is_asking:
            return
        self._say_if_trained_astray()
        # Lightning's manual optimization prepares DDP right before the backward pass. So only its end tells.
        self._is_asking = True
        before = self._reductions
        Variable._execution_engine.queue_callback(lambda: self._end_stray(before))

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer is about to step.

        Raises:
            ConfigError: DDP still waits for gradients of the backward pass, so none of its means is complete.
        """
        self._mean_version = None
        model = self._model()
        has_news = self._stray_version is not None or (self._expects and self._has_begun)
        if model is None or not has_news or not self._trains(optimizer):
            return
        if torch._C._current_graph_task_id() != -1:
            self._say(
                "an optimizer steps while the backward pass is under way, with gradients that are not averaged yet, "
                "so that ranks train different models. Call optimizer.step() after backward()"
            )
        elif self._stray_version is not None:
            self._say_stray()
        elif self._has_hook:
            self._check_reached(model)
        else:
            self.end_reduction()

    # --- what has happened -------------------------------------------------------------------------------------------

    def _end_stray(self, reductions: int) -> None:
        """At the end of a backward pass that no forward pass of DDP has announced."""
        self._is_asking = False
        if self._reductions != reductions:
            return
        version = self._version()
        if self._mean_version is not None and self._mean_version == version:
            self._say_stray()  # a mean that no optimizer has used is a mean no longer
        self._stray_version = version

    def _say_if_trained_astray(self) -> None:
        """Say that weights were changed by hand since a gradient was left unaveraged."""
        if self._stray_version is not None and self._stray_version != self._version():
            self._say_stray()

    def _say_stray(self) -> None:
        parameters = [parameter for ref in self._watched if (parameter := ref()) is not None]
        if all(parameter.grad is None for parameter in parameters):
            self._stray_version = None  # the gradients were thrown away
            return
        self._say(
            "a backward pass added gradients that DistributedDataParallel does not average, so that ranks train "
            "different models. It was not the first one after a forward pass of the model: either the forward pass "
            "called model.module or single layers, or backward() was called again through the same graph, or after "
            f"two forward passes. {_REMEDY}"
        )

    def _check_reached(self, model: DistributedDataParallel) -> None:
        """Raise ConfigError if the backward pass under way since the latest forward pass is over and not reduced."""
        self._has_begun = False
        try:
            model.reducer._check_reducer_finalized()
        except RuntimeError as error:
            raise ConfigError(
                "DistributedDataParallel still waits for gradients of some parameters, so this step's gradients are "
                "not averaged. Parameters that do not take part in every step, or are frozen after wrapping, need "
                "find_unused_parameters=True, or state.rewrap(DistributedDataParallel)"
            ) from error
        raise ConfigError(
            "the latest backward pass has computed gradients, and none of them has reached DistributedDataParallel, so "
            "each rank would train its own. The model was changed after it was wrapped, for example cast to another "
            "dtype and back: wrap anew, `model = state.rewrap(DistributedDataParallel)`"
        )

    def _trains(self, optimizer: Optimizer) -> bool:
        return any(id(p) in self._reduced for group in optimizer.param_groups for p in group["params"])

    def _version(self) -> int:
        """A number that grows whenever a watched parameter is changed in place."""
        parameters = [parameter for ref in self._watched if (parameter := ref()) is not None]
        return sum(parameter._version for parameter in parameters)

    def _say(self, text: str) -> None:
        if not self._has_said:
            self._has_said = True
            logger.warning("gqsgd: %s", text)
        self._stray_version = None


#: The watches of this process, which the steps of all optimizers are shown to.
_WATCHES: weakref.WeakSet[BackwardWatch] = weakref.WeakSet()
_handle: RemovableHandle | None = None


def _register(watch: BackwardWatch) -> None:
    """Show the steps of all optimizers to a watch, from now on."""
    global _handle
    _WATCHES.add(watch)
    if _handle is None:
        _handle = register_optimizer_step_pre_hook(_before_optimizer_step)


def _before_optimizer_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for watch in list(_WATCHES):
        watch.before_optimizer_step(optimizer)


def _counter(watch: weakref.ref[BackwardWatch]) -> Callable[[nn.Parameter], None]:
    """Return the hook for each accumulated gradient of a watched parameter. It does not keep the watch alive."""

    def count(_: nn.Parameter) -> None:
        here = None if torch.compiler.is_compiling() else watch()
        if here is not None:
            here.count_gradient()

    return count


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
