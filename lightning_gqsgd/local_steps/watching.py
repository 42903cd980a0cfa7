"""Changes of a model or of its optimizers after local steps began, with which an average would not make ranks equal."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_gqsgd.errors import ConfigError, listed
from lightning_gqsgd.local_steps.fragments import Entry
from lightning_gqsgd.local_steps.starting import in_words, parameters_of, place_of

#: What to do where parameters are other ones.
_REMEDY = (
    "call finish() and close() before the change, and make a new LocalSteps after it (with a strategy of Lightning: "
    "change the model before `fit`)"
)


class WatchedModel:
    """A model whose parameters have to be those that are averaged, of the same shape, dtype and device.

    Args:
        model: the model.
        optimizers: the inner optimizers.
        averaged: the parameters that are averaged.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], averaged: Iterable[Entry]) -> None:
        self._model = weakref.ref(model)
        self._optimizers = list(optimizers)
        self._averaged = [(entry, place_of(entry.tensor)) for entry in averaged]
        self._known = list(model.parameters())  # kept, so that no other parameter gets the id of one that has gone

    def check(self) -> None:
        """Compare the model and the optimizers with what they were.

        Raises:
            ConfigError: an optimizer trains a parameter that is not averaged; or a parameter that is averaged is no
                longer in the model, or has another shape, dtype or device; or a parameter was added that requires a
                gradient.
        """
        self._check_optimizers()
        model = self._model()
        if model is not None:
            self._check_model(model)
        for entry, before in self._averaged:
            if place_of(entry.tensor) != before:
                raise ConfigError(
                    f"parameter {entry.name!r} was {in_words(before)} when LocalSteps was made, and is "
                    f"{in_words(place_of(entry.tensor))} now, so ranks may hold the same average in different numbers; "
                    f"cast, move or resize the model before LocalSteps is made, or {_REMEDY}"
                )

    def _check_optimizers(self) -> None:
        known = {id(entry.tensor) for entry, _ in self._averaged}
        others = [p for p in parameters_of(self._optimizers) if p.requires_grad and id(p) not in known]
        if others:
            raise ConfigError(
                f"the optimizer trains {len(others)} parameters that were frozen, or not in the optimizer, when "
                "LocalSteps was made, so each rank would train its own; freeze them again, call finish() and close(), "
                "then unfreeze or add them, and make a new LocalSteps (with a strategy of Lightning: unfreeze them "
                "before `fit`)"
            )

    def _check_model(self, model: nn.Module) -> None:
        present = dict(model.named_parameters())
        ids = {id(parameter) for parameter in present.values()}
        gone = [entry.name for entry, _ in self._averaged if id(entry.tensor) not in ids]
        if gone:
            raise ConfigError(
                f"parameters that are averaged are no longer in the model: {listed(gone)}. They were removed, or "
                "replaced by others (a new layer, load_state_dict(assign=True), a parametrisation), which each rank "
                f"would keep as they are; {_REMEDY}"
            )
        known = {id(parameter) for parameter in self._known}
        added = [name for name, p in present.items() if p.requires_grad and id(p) not in known]
        if added:
            raise ConfigError(
                f"parameters were added to the model after LocalSteps was made: {listed(added)}. They are not "
                f"averaged, so each rank would have its own; {_REMEDY}"
            )
