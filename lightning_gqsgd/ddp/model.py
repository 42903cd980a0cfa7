"""The parameters of a hooked DDP model with their memories, and the state that belongs to one DDP wrapper.

Another DDP model may be wrapped around the same module later. `NumberedParameters` and their memories stay then; an
`Attachment` belongs to one DDP model.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.adaptive.plain import PlainPath
from lightning_gqsgd.ddp.unaveraged import BackwardWatch, TrainedParameters
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.reducers import Setting, new_store
from lightning_gqsgd.reducers.memory import Keeps, MemoryStore
from lightning_gqsgd.session.parameters import Parameter, order_of, segments_of
from lightning_gqsgd.wire.communicator import Communicator

#: Why the memory of all ranks is gathered, for errors.
_MOVING = "moving what ranks remember to the owners of parameters with other numbers (every rank calls rewrap)"


class NumberedParameters:
    """The parameters of a model by number, and what this rank remembers of them.

    Args:
        numbered: number, name and size of each parameter.
        parameters: the parameters, in the same order.
        choices: number of each configuration, by its bits.
        setting: the setting whose memories are kept.
        device: device of the gradients.

    Attributes:
        entries: number, name and size of each parameter, by the parameter's id.
        buckets: the segments of the buckets that were seen, by the ids of their parameters.
        store: what this rank remembers.
        remembered: numbers of the parameters that have been compressed, or loaded.
    """

    def __init__(
        self,
        numbered: Sequence[Parameter],
        parameters: Collection[nn.Parameter],
        choices: Mapping[int, int],
        setting: Setting,
        device: torch.device,
    ) -> None:
        self._choices = choices
        self._setting = setting
        self._device = device
        self.buckets: dict[tuple[int, ...], tuple[Segment, ...]] = {}
        self.entries = _by_id(numbered, parameters)
        self._orders = _orders_of(parameters)
        self.remembered: set[int] = set()
        self.store = self._new_store(setting, self.numbered)

    @property
    def numbered(self) -> list[Parameter]:
        """All entries, in the order of their numbers."""
        return list(self.entries.values())

    def segments_of(self, ids: tuple[int, ...]) -> tuple[Segment, ...]:
        """Returns the segments of a bucket that was not seen before; ``ids``: those of its parameters."""
        self.buckets[ids] = segments_of([self.entries[number] for number in ids], self._choices)
        return self.buckets[ids]

    def moved_to(self, numbered: Sequence[Parameter], parameters: Collection[nn.Parameter]) -> dict[int, int]:
        """Returns the new number of each parameter that was there before, by its old number; see `renumber`.

        A parameter with another memory format is left out, because its memory has the order of before.
        """
        after = _by_id(numbered, parameters)
        orders = _orders_of(parameters)
        stayed = (key for key in self.entries if key in after and orders[key] == self._orders[key])
        return {self.entries[key].number: after[key].number for key in stayed}

    def renumber(
        self,
        numbered: Sequence[Parameter],
        parameters: Collection[nn.Parameter],
        dtype: torch.dtype,
        communicator: Communicator,
    ) -> bool:
        """Give parameters new numbers, and keep what is remembered of those that were there before. A collective, if
        there is a memory whose parts move to other ranks with the numbers. `remembered` and `moved_to` have to be equal
        on all ranks.

        Returns:
            Whether anything has changed.

        Raises:
            CollectiveError: if other ranks do not arrive. Parameters keep their numbers then.
        """
        after = _by_id(numbered, parameters)
        # Parameters are compared in order: two of equal size may have changed places.
        is_same = list(after.items()) == list(self.entries.items())
        moved_to = self.moved_to(numbered, parameters)
        self.buckets.clear()
        if is_same and len(moved_to) == len(after) and dtype == self._setting.dtype:
            return False
        same = {number: moved_to[number] for number in self.remembered if number in moved_to}
        setting = replace(self._setting, dtype=dtype)
        store = self._new_store(setting, after.values())
        store.take_from(self.store, same, communicator.rank, partial(communicator.gather, purpose=_MOVING))
        self.entries = after
        self._orders = _orders_of(parameters)
        self.store = store
        self.remembered = set(same.values())
        self._setting = setting
        return True

    def _new_store(self, setting: Setting, entries: Iterable[Parameter]) -> MemoryStore:
        sizes = {entry.number: entry.numel for entry in entries if not entry.raw}
        return new_store(setting, sizes, self._device)


def _orders_of(parameters: Iterable[nn.Parameter]) -> dict[int, tuple[int, ...]]:
    return {id(p): order_of(p) for p in parameters}


def _by_id(numbered: Sequence[Parameter], parameters: Iterable[nn.Parameter]) -> dict[int, Parameter]:
    return {id(p): entry for entry, p in zip(numbered, parameters, strict=True)}


class UnusedParameters:
    """Keeps the memory of parameters that may turn out to be unused in a step, and puts it back.

    With ``find_unused_parameters=True``, DDP leaves the gradient of a parameter that no rank has used as it is, and
    drops what the hook made of the zeros in its place. What a memory has added to those zeros would be lost, so the
    memory is put back to what it was. Which parameters were used on any rank is only known after the backward pass.

    Args:
        model: the DDP model.
        store: what this rank remembers.
        numbers: numbers of the parameters that DDP reduces, in its order.
    """

    def __init__(self, model: DistributedDataParallel, store: MemoryStore, numbers: Sequence[int]) -> None:
        self._model = weakref.ref(model)
        self._store = store
        self._numbers = list(numbers)
        self._kept: dict[int, dict[Keeps, Tensor]] = {}

    def watch(self, x: Tensor, segments: Sequence[Segment]) -> None:
        """Before a bucket is reduced, keep the memory of each parameter that perhaps no rank has used.

        On the CPU, these are the parameters whose gradient is zero everywhere. On a GPU, the host would have to wait
        for that answer, so the memory of every parameter is kept.
        """
        start = 0
        for segment in segments:
            gradient = x[start : start + segment.numel]
            start += segment.numel
            if not segment.raw and (x.is_cuda or not gradient.any()):
                self._kept[segment.parameter] = self._store.rows(segment.parameter)

    def settle_after_backward(self) -> None:
        """In the last bucket's hook, see to it that `settle` is called when the backward pass is over.

        DDP's map of used parameters cannot be read here, because DDP holds a lock while it calls a hook. DDP completes
        the map in a callback of its own, which is queued after this hook. So the callback that is queued here queues
        `settle` behind DDP's. Outside of a backward pass, where `Join` takes part with zeros, there is no such pass to
        wait for.
        """
        engine = Variable._execution_engine
        if self._kept and torch._C._current_graph_task_id() != -1:
            engine.queue_callback(lambda: engine.queue_callback(self.settle))

    def settle(self) -> None:
        """After the backward pass, put back the memory of the parameters that no rank has used."""
        model = self._model()
        kept = self._kept
        self._kept = {}
        if not kept or model is None:
            return
        used_by = model.reducer._get_local_used_map()  # how many ranks have used each parameter
        for position, number in enumerate(self._numbers):
            for kind, before in kept.get(number, {}).items():
                row = self._store.row(kind, number)
                row.copy_(torch.where(used_by[position] == 0, before, row))


class Attachment:
    """Everything that belongs to one DDP model and to the hook on it.

    Args:
        model: the DDP model.
        parameters: the parameters of its module.
        ranks: number of ranks.
        remembers: whether anything is remembered of gradients.
        plain: lets plain DDP take the hook's place; None: the hook stays.

    Attributes:
        model: refers to the DDP model, as long as that is there.
        trained: which parameters DDP reduces.
        plain: see above.
        unused: keeps the memory of parameters that no rank may have used; None: nothing is to be kept.
        watch: watches the backward passes; None: there is one rank, which has nobody to differ from.
        skips_buckets: whether DDP hands over no bucket without used parameters, the last one included.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        parameters: NumberedParameters,
        *,
        ranks: int,
        remembers: bool,
        plain: PlainPath | None,
    ) -> None:
        self.model = weakref.ref(model)
        self.trained = TrainedParameters(model, parameters.entries)
        self.plain = plain
        self.skips_buckets = getattr(model, "skip_all_reduce_unused_params", False)
        self.unused: UnusedParameters | None = None
        # DDP drops the results of unused parameters, except where it has learnt once which ones are used.
        if remembers and model.find_unused_parameters and not model.static_graph:
            numbers = [entry.number for entry in self.trained.parameters]
            self.unused = UnusedParameters(model, parameters.store, numbers)
        self.watch = BackwardWatch(model, list(self.trained.reduced.values())) if ranks > 1 else None

    def detach(self) -> None:
        """Leave the model: another one is wrapped around its module."""
        if self.watch is not None:
            self.watch.remove()
        if self.plain is not None:
            self.plain.remove()

    def close(self) -> None:
        """Let go of the model: the hook was closed. A forward pass raises that, also while plain DDP has its place."""
        if self.plain is not None:
            self.plain.forget()
        if self.watch is not None:
            self.watch.remove()
        self.trained.forget()
