"""Lets optimizers of matrices train virtual workers, with views of a worker's flat vector as parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from lightning_gqsgd.errors import ConfigError


class Shaped(Optimizer):
    """Updates flat vectors with optimizers of the parameters that they contain.

    Each virtual worker has one flat parameter, which is enough for an optimizer such as SGD or Adam. Muon and others
    need the matrices::

        simulate("gqsgd_muloco", problem, workers=4, steps=300, optimizer=lambda flat: Shaped(flat, shapes, make))

    Args:
        flat: flat parameters, [d] each, e.g. one for each worker.
        shapes: shapes of the parameters in each of them, in order, with d coordinates in total.
        make: function that creates the optimizer for one flat parameter, from a list of parameters with these shapes.

    Attributes:
        optimizers: the optimizer of each flat parameter, in order.

    Raises:
        ConfigError: if the shapes have another number of coordinates than a flat parameter.
    """

    def __init__(
        self,
        flat: Sequence[Tensor],
        shapes: Sequence[Sequence[int]],
        make: Callable[[list[nn.Parameter]], Optimizer],
    ) -> None:
        super().__init__(list(flat), {})
        self._sizes = [math.prod(shape) for shape in shapes]
        self._parts: list[list[nn.Parameter]] = []
        for vector in flat:
            if vector.numel() != sum(self._sizes):
                raise ConfigError(
                    f"shapes={[tuple(shape) for shape in shapes]} have {sum(self._sizes):,} coordinates, and the flat "
                    f"parameter has {vector.numel():,}; give the shape of each parameter in it"
                )
            views = vector.data.split(self._sizes)
            self._parts.append([nn.Parameter(view.view(*shape)) for view, shape in zip(views, shapes, strict=True)])
        self.optimizers = [make(parts) for parts in self._parts]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make a step of each flat parameter that has a gradient.

        Raises:
            ConfigError: if a closure is given, because virtual workers have none.
        """
        if closure is not None:
            raise ConfigError("Shaped makes steps of gradients that are there; leave closure out")
        for vector, parts, optimizer in zip(self.param_groups[0]["params"], self._parts, self.optimizers, strict=True):
            if vector.grad is None:
                continue
            for part, gradient in zip(parts, vector.grad.split(self._sizes), strict=True):
                part.grad = gradient.view_as(part)
            optimizer.step()
