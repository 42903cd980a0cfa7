"""Measures the length of steps on one rank, and tells which of them can be compared."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from torch import nn

from lightning_gqsgd.session.copies import OwnHook


class StepClock:
    """Measures steps from their first bucket to the first bucket of the next step.

    A step counts if it has as many forward passes as the step before, and if no forward pass without gradients, such as
    those of a validation, came in between. Steps that accumulate other numbers of micro-batches take other times.

    Attributes:
        backward_s: seconds from the first to the last bucket of the latest step whose last bucket has come.
    """

    def __init__(self) -> None:
        self.backward_s = 0.0
        self._begun: float | None = None
        self._forwards = 0
        self._usual: int | None = None
        self._was_interrupted = False

    def watch(self, model: nn.Module) -> None:
        """Count the forward passes of a model."""
        clock = weakref.ref(self)  # the model's hooks do not keep the clock alive

        def count(module: nn.Module, inputs: Any) -> None:
            here = clock()
            # A compiled model would be compiled anew whenever a counter changes.
            if here is None or torch.compiler.is_compiling():
                return
            # After a validation, Lightning puts the module back into training mode, and not DDP around it.
            inner = getattr(module, "module", module)
            if inner.training and torch.is_grad_enabled():
                here._forwards += 1
            else:
                here._was_interrupted = True

        model.register_forward_pre_hook(OwnHook(model, count))

    def begin_step(self) -> int:
        """Begin a step; returns the length of the step before in microseconds, at least 1, or 0 if it does not
        count."""
        now = time.perf_counter()
        before = self._begun
        counts = before is not None and not self._was_interrupted and self._forwards == self._usual
        self._begun = now
        self._usual = self._forwards
        self._forwards = 0
        self._was_interrupted = False
        return max(1, round(1e6 * (now - before))) if counts and before is not None else 0

    def end_backward(self) -> None:
        """Note that the last bucket of a step has come."""
        if self._begun is not None:
            self.backward_s = time.perf_counter() - self._begun

    def skip(self, seconds: float) -> None:
        """Take time that the package itself has needed once off the step under way."""
        if self._begun is not None:
            self._begun += seconds

    def interrupt(self) -> None:
        """Leave the step under way out."""
        self._begun = None
