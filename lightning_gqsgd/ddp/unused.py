"""Memory of parameters that no rank has used in a step.

With ``find_unused_parameters=True``, DDP leaves the gradient of such a parameter as it is, and drops what the hook made
of the zeros in its place. What a memory has added to those zeros would be lost, so the memory is put back to what it
was. Which parameters were used on any rank is only known after the backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.reducers.memory import Keeps, MemoryStore


class UnusedParameters:
    """Keeps the memory of parameters that may turn out to be unused, and puts it back.

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
