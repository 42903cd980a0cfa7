"""Measures the duration of steps on one rank, and says which of them can be compared."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from torch import nn

from lightning_gqsgd.session.copies import OwnHook


class StepClock:
    """Measures steps from their first bucket to the first bucket of the next step.

    A step counts if it has as many forward passes as the previous step, and if there was no forward pass without
    gradients in between, such as in a validation. Steps that accumulate different numbers of micro-batches take
    different times.

    Attributes:
        backward_s: seconds from the first to the last bucket, for the latest step whose last bucket has arrived.
    """

    def __init__(self) -> None:
        self.backward_s = 0.0
        self._begun: float | None = None
        self._forwards = 0
        self._usual: int | None = None
        self._was_interrupted = False

    def watch(self, model: nn.Module) -> None:
        """Count the forward passes of a model."""
        clock = weakref.ref(self)  # so that the model's hooks do not keep the clock alive

        def count(module: nn.Module, inputs: Any) -> None:
            here = clock()
            # A compiled model would be recompiled whenever a counter changes.
            if here is None or torch.compiler.is_compiling():
                return
            # After a validation, Lightning sets training mode only on the module, not on the DDP model around it.
            inner = getattr(module, "module", module)
            if inner.training and torch.is_grad_enabled():
                here._forwards += 1
            else:
                here._was_interrupted = True

        model.register_forward_pre_hook(OwnHook(model, count))

    def begin_step(self) -> int:
        """Begin a step. Returns the duration of the previous step in microseconds, at least 1; 0 if that step does not
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
        """Note that the last bucket of a step has arrived."""
        if self._begun is not None:
            self.backward_s = time.perf_counter() - self._begun

    def skip(self, seconds: float) -> None:
        """Subtract time that the package itself has used once from the current step."""
        if self._begun is not None:
            self._begun += seconds

    def interrupt(self) -> None:
        """Ignore the current step."""
        self._begun = None
