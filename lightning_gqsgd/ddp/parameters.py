"""The parameters of a model by number, and what this rank remembers of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.reducers import new_store
from lightning_gqsgd.reducers.memory import Keeps, MemoryStore
from lightning_gqsgd.session import checkpoint
from lightning_gqsgd.session.parameters import Parameter, segments_of
from lightning_gqsgd.wire.communicator import Communicator


class NumberedParameters:
    """The parameters of a model by number, and what this rank remembers of them.

    Args:
        numbered: number, name and size of each parameter.
        parameters: the parameters, in the same order.
        config: a configuration with its reducer chosen, whose memories are kept.
        ranks: number of ranks.
        choices: number of each configuration, by its bits.
        dtype: dtype of the gradients.
        device: device of the gradients.

    Attributes:
        entries: number, name and size of each parameter, by the parameter's id.
        store: what this rank remembers.
        remembered: numbers of the parameters that have been compressed, or loaded.
        dtype: dtype of the gradients.
    """

    def __init__(
        self,
        numbered: Sequence[Parameter],
        parameters: Iterable[nn.Parameter],
        config: GQSGDConfig,
        ranks: int,
        choices: Mapping[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._choices = choices
        self._device = device
        self._segments: dict[tuple[int, ...], tuple[Segment, ...]] = {}  # by the ids of a bucket's parameters
        self.dtype = dtype
        self.entries = _by_id(numbered, parameters)
        self.remembered: set[int] = set()
        self.store = self._new_store()

    @property
    def numbered(self) -> list[Parameter]:
        """All entries, in the order of their numbers."""
        return list(self.entries.values())

    def segments_of(self, parameters: Sequence[Tensor]) -> tuple[Segment, ...]:
        """Returns the segments of a bucket with these parameters."""
        key = tuple(map(id, parameters))
        if key not in self._segments:
            self._segments[key] = segments_of([self.entries[number] for number in key], self._choices)
        return self._segments[key]

    def renumber(self, numbered: Sequence[Parameter], parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> bool:
        """Give parameters new numbers, and keep what is remembered of those that were there before.

        Returns:
            Whether anything has changed.
        """
        before = self.entries
        self.entries = _by_id(numbered, parameters)
        self._segments.clear()
        is_same = self.numbered == list(before.values()) and self.entries.keys() == before.keys()
        if is_same and dtype == self.dtype:
            return False
        same = {entry.number: self.entries[key].number for key, entry in before.items() if key in self.entries}
        old = self.store
        self.dtype = dtype
        self.store = self._new_store()
        self.store.take_from(old, same)
        self.remembered = {same[number] for number in self.remembered if number in same}
        return True

    def gathered_memory(self, communicator: Communicator) -> dict[str, dict[int, Tensor]] | None:
        """Returns the memory of all ranks, see `checkpoint.gathered_memory`. A collective."""
        return checkpoint.gathered_memory(communicator, self.store, self.remembered)

    def take_memory(self, state: Mapping[str, Any], rank: int, trained: Iterable[Parameter]) -> None:
        """Take the memory from a hook's state, see `checkpoint.take_memory`; log which of ``trained`` have none."""
        numbers = checkpoint.take_memory(self.store, state, rank, self._ranks)
        if numbers is not None:
            checkpoint.say_what_is_missing(trained, numbers)
            self.remembered |= numbers

    def _new_store(self) -> MemoryStore:
        sizes = {entry.number: entry.numel for entry in self.numbered if not entry.raw}
        return new_store(self._config, self._ranks, sizes, self.dtype, self._device)


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
