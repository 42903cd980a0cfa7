"""Detects changes of a model or its optimizers after which an average would not make ranks equal."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.optim import Optimizer

from lightning_gqsgd.errors import ConfigError, counted, listed
from lightning_gqsgd.local_steps.fragments import Entry
from lightning_gqsgd.local_steps.starting import in_words, place_of
from lightning_gqsgd.session.ddp_models import DDPModels
from lightning_gqsgd.session.parameters import new_order, parameters_of, plain_name
from lightning_gqsgd.wire.agreement import digest_of

logger = logging.getLogger(__name__)

#: How an Accelerator trains with local steps.
WITH_ACCELERATE = (
    "model = accelerator.prepare_model(model, evaluation_mode=True), then optimizer = accelerator.prepare("
    "LocalSteps(model, optimizer, every=32)), and optimizer.optimizer.finish() at the end"
)

#: The models that are watched, because several LocalSteps may average one model's parameters between them.
_WATCHED: weakref.WeakSet[WatchedModel] = weakref.WeakSet()

#: Number of values by which a change of a parameter that is not averaged is noticed.
_SAMPLED = 16

#: What to do if parameters have changed.
_REMEDY = (
    "call finish() and close() before the change, and make a new LocalSteps after it (with a strategy of Lightning: "
    "change the model before `fit`)"
)


class WatchedModel:
    """Watches a model whose parameters have to stay the averaged ones, with the same shape, dtype and device.

    Args:
        model: the model.
        optimizers: the inner optimizers.
        averaged: the parameters that are averaged.
        group: process group of the ranks that average them; None if members join and leave, whom torch.distributed does
            not know.

    Attributes:
        order: the parameters in the order that the model had in the last check (see `new_order`). Where layers have
            changed places on one rank only, ranks would average different models.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        averaged: Iterable[Entry],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._model = weakref.ref(model)
        self._optimizers = list(optimizers)
        self._averaged = [(entry, place_of(entry.tensor)) for entry in averaged]
        ranks = set() if group is None else set(dist.get_process_group_ranks(group))
        self._wrapped = DDPModels({id(entry.whole) for entry, _ in self._averaged}, ranks)
        self._has_looked = len(ranks) < 2  # with fewer, no model averages over two of them
        self._known = list(model.parameters())  # kept, so that no new parameter gets the id of a deleted one
        self.order: tuple[int, ...] = ()
        # Those that were not empty at the start, by name.
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.numel()}
        self._parametrized = _parametrized_in(model)
        self._masks = {name: self._buffers[name] for name in _masks_of(model) if name in self._buffers}
        self._looks_at_others = group is None or len(ranks) > 1
        self._others: dict[str, Tensor] = {}  # values of the parameters that are not averaged, by name
        _WATCHED.add(self)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the parameters and buffers of the model by name, including those that a state_dict leaves out.

        Buffers that a model makes in its first forward pass, such as the mask of its attention, are left out: another
        rank, or a run that resumes, may not have them yet, and makes its own.
        """
        model = self._model()
        assert model is not None  # its trainer asks for them
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in self._buffers]
        return {plain_name(name): tensor for name, tensor in (*model.named_parameters(), *buffers)}

    def digest(self) -> int:
        """Returns a digest of the values of the averaged parameters. Waits for a GPU."""
        return digest_of_tensors({entry.name: entry.tensor for entry, _ in self._averaged})

    def frozen(self) -> tuple[str, ...]:
        """Returns the names of the averaged parameters that do not require a gradient at the moment, in order."""
        return tuple(entry.name for entry, _ in self._averaged if not entry.whole.requires_grad)

    def forget_others(self) -> None:
        """Forget the values of the parameters that are not averaged, because weights were loaded."""
        self._others.clear()

    def check(self) -> None:
        """Compare the model and the optimizers with their original state. Called in each round.

        Raises:
            ConfigError: if an optimizer trains a parameter that is not averaged, if an averaged parameter is no longer
                in the model or has another shape, dtype or device, if a parameter that requires a gradient or a buffer
                of the state_dict was added, if a parametrization was added or removed, or if a mask of pruning has
                changed.
        """
        self._say_if_reduced()
        self._check_optimizers()
        model = self._model()
        if model is not None:
            self._check_model(model)
            self._check_buffers(model)
            self._say_if_others_moved(model)
        for entry, before in self._averaged:
            if place_of(entry.tensor) != before:
                raise ConfigError(
                    f"parameter {entry.name!r} was {in_words(before)} when LocalSteps was made, and is "
                    f"{in_words(place_of(entry.tensor))} now, so ranks may hold the same average in different numbers; "
                    f"cast, move or resize the model before LocalSteps is made, or {_REMEDY}"
                )

    def _say_if_reduced(self) -> None:
        """Warn once if DistributedDataParallel also averages the gradients of this model, over the same ranks.

        The model may have been wrapped after LocalSteps was created. If DistributedDataParallel averages over the ranks
        of a node, and local steps average over nodes, that is correct.
        """
        if not self._has_looked:
            self._has_looked = True
            self._wrapped.look()
        elif self._wrapped.take_called():
            self._wrapped.forget()
            logger.warning(
                "gqsgd: the model of LocalSteps is called through DistributedDataParallel, which averages gradients in "
                "every step, so that local steps save nothing. Call the module itself, and leave "
                "DistributedDataParallel out. With Accelerate: %s",
                WITH_ACCELERATE,
            )

    def _check_optimizers(self) -> None:
        known = {id(entry.whole) for entry, _ in self._averaged}
        others = [p for p in parameters_of(self._optimizers) if p.requires_grad and id(p) not in known]
        if others:
            raise ConfigError(
                f"the optimizer trains {counted(len(others), 'parameter')} that LocalSteps has found frozen, or not in "
                "the optimizer, so each rank would train its own; freeze them again, call finish() and close(), then "
                "unfreeze or add them, and make a new LocalSteps (with a strategy of Lightning: unfreeze them "
                "before `fit`)"
            )

    def _check_model(self, model: nn.Module) -> None:
        present = dict(model.named_parameters())
        ids = {id(parameter) for parameter in present.values()}
        gone = [entry.name for entry, _ in self._averaged if id(entry.whole) not in ids]
        if gone:
            raise ConfigError(
                f"parameters that are averaged are no longer in the model: {listed(gone)}. They were removed, or "
                "replaced by others (a new layer, load_state_dict(assign=True), a parametrisation), which each rank "
                f"would keep as they are; {_REMEDY}"
            )
        self.order = new_order(self._known, present.values())
        known = {id(parameter) for parameter in self._known}
        added = [name for name, p in present.items() if p.requires_grad and id(p) not in known]
        if added:
            raise ConfigError(
                f"parameters were added to the model after LocalSteps was made: {listed(added)}. They are not "
                f"averaged, so each rank would have its own; {_REMEDY}"
            )
        parametrized = _parametrized_in(model)
        if parametrized != self._parametrized:
            names = sorted({name for name, _ in parametrized.items() ^ self._parametrized.items()})
            raise ConfigError(
                f"parametrizations were added or removed after LocalSteps was made: {listed(names)}. The parameters "
                "below them have got other values, which would travel quantised, as if they had been learnt; "
                f"{_REMEDY}"
            )

    @torch.no_grad()
    def _say_if_others_moved(self, model: nn.Module) -> None:
        """Warn once if parameters have changed that are not averaged, since the first check, or since a state was
        loaded."""
        if not self._looks_at_others:
            return
        averaged = {id(entry.whole) for watched in _WATCHED for entry, _ in watched._averaged}
        now = samples_of_others(model, averaged)
        moved = [name for name, values in now.items() if not _is_same(values, self._others.get(name, values))]
        self._others = self._others or now
        if moved:
            self._looks_at_others = False
            logger.warning(
                "gqsgd: parameters have changed that are not averaged: %s. Each rank has its own, also after finish(). "
                "Averages are of the parameters of the optimizer that LocalSteps was made with: if another optimizer "
                "trains these, give LocalSteps one optimizer of all; if a function of yours moves them, as it does a "
                "teacher, let it average them over the ranks before training ends",
                listed(moved),
            )

    def _check_buffers(self, model: nn.Module) -> None:
        present = _saved_buffers(model)
        known = {id(buffer) for buffer in self._buffers.values()}
        added = [name for name, buffer in present.items() if name not in self._buffers and id(buffer) not in known]
        if added:
            raise ConfigError(
                f"buffers were added to the model after LocalSteps was made, or were empty then: {listed(added)}. They "
                "are not averaged, so each rank would have its own, such as the masks of pruning, or the vectors of a "
                "spectral norm. If a module makes its buffers in its first forward pass, run that pass before "
                f"LocalSteps is made. Otherwise, {_REMEDY}"
            )
        changed = [name for name, mask in self._masks.items() if not _is_same(present.get(name, mask), mask)]
        if changed:
            raise ConfigError(
                f"masks of pruning have changed after LocalSteps was made: {listed(changed)}. Ranks may have pruned "
                f"other weights, and an average would make fractions of their masks; {_REMEDY}"
            )


def samples_of_others(model: nn.Module, averaged: Collection[int]) -> dict[str, Tensor]:
    """Returns some values of each parameter that is not averaged, in equal distances, by name.

    Args:
        model: the model.
        averaged: the ids of the parameters that are averaged.
    """
    return {
        plain_name(name): parameter.detach().reshape(-1)[:: max(1, parameter.numel() // _SAMPLED)].clone()
        for name, parameter in model.named_parameters()
        if id(parameter) not in averaged and _has_values(parameter)
    }


def _has_values(parameter: Tensor) -> bool:
    """Returns whether a parameter has plain numbers in memory: quantised weights have a class of their own."""
    return type(parameter.data) is Tensor and parameter.is_floating_point() and not parameter.is_meta


def _parametrized_in(model: nn.Module) -> dict[str, int]:
    """Returns the names of the tensors that `torch.nn.utils.parametrize` computes, each with the number of functions
    that do so."""
    return {
        f"{path}.{name}" if path else name: len(functions)
        for path, module in model.named_modules()
        if is_parametrized(module)
        for name, functions in module.parametrizations.items()
    }


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers that a model's state_dict has and that are not empty, by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.numel() and name not in module._non_persistent_buffers_set
    }


def _masks_of(model: nn.Module) -> list[str]:
    """Returns the names of the buffers that are masks of torch.nn.utils.prune."""
    return [
        f"{path}.{hook._tensor_name}_mask" if path else f"{hook._tensor_name}_mask"
        for path, module in model.named_modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, BasePruningMethod)
    ]


def _is_same(now: Tensor, before: Tensor) -> bool:
    """Returns whether a buffer has the same values as before. Pruning registers a new tensor."""
    return now is before or (place_of(now) == place_of(before) and torch.equal(now, before))


def digest_of_tensors(named: Mapping[str, Tensor]) -> int:
    """Returns a digest of the bits of some tensors. Waits for a GPU."""
    digests = [
        hashlib.blake2b(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for _, tensor in sorted(named.items())
    ]
    return digest_of(" ".join(digests))
