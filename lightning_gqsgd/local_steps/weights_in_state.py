"""Detects weights in the state of an inner optimizer, which an average of the parameters would not include.

A schedule-free optimizer trains one sequence of weights and keeps a second one, and evaluates at a mixture of both
(arXiv 2405.15682). Lookahead returns to its own slow weights (arXiv 1907.08610). A 16-bit training may keep its
parameters in fp32. Such an optimizer overwrites the averaged parameters with weights of its own rank.

A state tensor is considered weights if it has the parameters' pattern and scale, and moves. Three kinds of state look
like weights but are not:

* A gradient that is parallel to the parameters, such as that of an L2 penalty alone. It looks like the gradient, too.
* A constant, such as Adagrad's sum at the start beside a LayerNorm's weights. Means are taken off first.
* The initial parameters, which Prodigy and D-Adaptation keep. They never move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gqsgd.errors import ConfigError, counted
from lightning_gqsgd.local_steps.options import LocalOptions
from lightning_gqsgd.local_steps.sharding import own_part
from lightning_gqsgd.session.parameters import parameters_of

#: The largest distance between state and parameters, relative to the parameters, at which the state may be weights.
#: Momentum and second moments are at a distance of 1 or more, because they have another pattern.
_FAR = 0.5

#: The smallest cosine between state and gradients at which the state is considered gradients.
_LIKE_GRADIENTS = 0.9


class WeightsInState:
    """Looks for weights in the state of inner optimizers.

    Args:
        optimizers: the inner optimizers.
        options: the options of local steps. With another ``inner_state`` than ``"keep"``, there is nothing to look for.
    """

    def __init__(self, optimizers: Sequence[Optimizer], options: LocalOptions) -> None:
        self._optimizers = list(optimizers) if options.inner_state == "keep" else []
        self._options = options
        # By the optimizer's number and the state's name: of what may be weights, the distance to the parameters and the
        # `_sums`, as they were when it was first seen; and what is something else.
        self._seen: dict[tuple[int, str], tuple[float, dict[int, tuple[float, float]]]] = {}
        self._others: set[tuple[int, str]] = set()

    @torch.no_grad()
    def check(self) -> None:
        """Check the current state. New state tensors are judged, and those that may be weights are watched.

        Waits for a GPU. All ranks get the same result, because they run the same optimizer from the same parameters.

        Raises:
            ConfigError: if an optimizer keeps weights in its state.
        """
        for number, optimizer in enumerate(self._optimizers):
            for name, kept in _tensors_by_name(optimizer).items():
                key = (number, name)
                if key in self._others:
                    continue
                if key not in self._seen:
                    self._judge(key, kept)
                    continue
                distance, before = self._seen[key]
                now = _sums(kept)
                if any(now.get(parameter, sums) != sums for parameter, sums in before.items()):
                    raise ConfigError(_refusal(optimizer, name, len(kept), distance, self._options))

    def _judge(self, key: tuple[int, str], kept: list[tuple[Tensor, Tensor]]) -> None:
        """Decide whether new state may be weights. If it also looks like gradients, decide later."""
        distance = _distance(kept)
        if not distance <= _FAR:
            self._others.add(key)
        elif not _cosine_to_gradients(kept) >= _LIKE_GRADIENTS:
            self._seen[key] = (distance, _sums(kept))


def _tensors_by_name(optimizer: Optimizer) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Returns an optimizer's state tensors that have their parameter's shape, as pairs (parameter, state) by name.

    A tensor that shares the parameter's memory is left out, because it is averaged with the parameter.
    """
    tensors: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for parameter in parameters_of([optimizer]):
        for name, value in optimizer.state.get(parameter, {}).items():
            if _is_beside(parameter, value):
                tensors.setdefault(str(name), []).append((parameter, value))
    return tensors


def _is_beside(parameter: Tensor, value: object) -> bool:
    """Returns whether a value of the state has a parameter's shape, and its own memory."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_sparse:
        return False
    return (
        value.shape == parameter.shape
        and value.numel() > 0
        and own_part(value).data_ptr() != own_part(parameter).data_ptr()
    )


def _distance(kept: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Returns the distance between state and parameters, both centred, relative to the parameters.

    Infinite or NaN if there is nothing to compare.
    """
    apart = scale = 0.0
    for parameter, value in kept:
        weights = _centred(parameter)
        apart += float((_centred(value).to(weights.device) - weights).square().sum())
        scale += float(weights.square().sum())
    return (apart / scale) ** 0.5 if scale else torch.inf


def _cosine_to_gradients(kept: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Returns the cosine between state and gradients, both centred, over the parameters that have a gradient."""
    product = ours = theirs = 0.0
    for parameter, value in kept:
        if parameter.grad is None or parameter.grad.is_sparse:
            continue
        gradient = _centred(parameter.grad)
        state = _centred(value).to(gradient.device)
        product += float((state * gradient).sum())
        ours += float(state.square().sum())
        theirs += float(gradient.square().sum())
    return product / (ours * theirs) ** 0.5 if ours and theirs else 0.0


def _centred(tensor: Tensor) -> Tensor:
    tensor = own_part(tensor)
    if not tensor.numel():  # a rank may have no part of a small parameter
        return tensor
    wide = tensor.to(torch.float32) if tensor.element_size() < 4 else tensor
    return wide - wide.mean()


def _sums(kept: Iterable[tuple[Tensor, Tensor]]) -> dict[int, tuple[float, float]]:
    """Returns two sums, by the parameter's id, that change if values change."""
    sums = {}
    for parameter, value in kept:
        wide = own_part(value).double()
        sums[id(parameter)] = (float(wide.sum()), float(wide.square().sum()))
    return sums


def _refusal(optimizer: Optimizer, name: str, count: int, distance: float, options: LocalOptions) -> str:
    remedy = "take inner_state='average', which averages it with the parameters"
    if options.is_merged:
        remedy = (
            "take another optimizer, or inner_state='average' with a number of steps for every, without elastic, "
            "because ranks that make different numbers of steps cannot average it"
        )
    if options.delay:
        remedy += f", and delay=0 instead of delay={options.delay}, which inner_state='average' needs"
    remedy += "; or, if it is a copy that a step needs until it ends, as in SAM, let the step delete it from the state"
    return (
        f"the inner optimizer {type(optimizer).__name__} keeps weights in its state: {name!r} of "
        f"{counted(count, 'parameter')} was {100 * distance:.2g} % away from them when it was seen first (limit: "
        f"{100 * _FAR:.0f} %), and has moved since. With inner_state='keep' it would stay on its rank, and ranks would "
        f"end with different models, e.g. after eval() of a schedule-free optimizer, or at Lookahead's next "
        f"exchange; {remedy}"
    )
