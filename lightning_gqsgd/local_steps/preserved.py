"""The preserved model: the value that the anchor would have if the way back lost nothing (MCM, arXiv 2102.12528).

The owner of a shard sends the mean change back in codes, and remembers the error e of these codes. If all of e is fed
back (``memory_down`` with beta = 1), the sum of the means that ranks have subtracted from the anchor a is smaller than
the exact sum by e. So a - e is the model of a server that keeps the exact model. Each owner knows e for its own shard.
The `own_errors` of all ranks together make up e; `LocalAverages.at_preserved` and `LocalAverages.finish` gather them.

The anchor has to move by exactly the mean changes, as with SGD of learning rate 1 without momentum. With other outer
optimizers, there is no preserved model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_gqsgd.local_steps.fragments import Fragment
from lightning_gqsgd.local_steps.rules import Exchanges
from lightning_gqsgd.reducers import Steps
from lightning_gqsgd.reducers.base import Exchange
from lightning_gqsgd.reducers.memory import Keeps, MemoryStore
from lightning_gqsgd.spec.fields import Fields

#: Hyperparameters of torch's SGD with which a step only subtracts the gradient.
_PLAIN = {"lr": 1, "momentum": 0, "weight_decay": 0, "maximize": False}


def is_preserved(config: Fields, outer: Optimizer) -> bool:
    """Returns whether owners remember the whole error of the anchors from the way back.

    Args:
        config: the compression, with the chosen reducer.
        outer: the outer optimizer.
    """
    down = config.down
    if down is None or not down.keeps_error or down.beta != 1 or config.reducer != "two_shot":
        return False
    return type(outer) is SGD and all(
        group[name] == value for group in outer.param_groups for name, value in _PLAIN.items()
    )


def own_errors(store: MemoryStore, numbers: Sequence[int]) -> Tensor:
    """Returns the errors of the way back that this rank remembers, concatenated over parameters. The length is equal on
    all ranks."""
    return torch.cat([store.row(Keeps.DOWN_ERROR, number) for number in numbers])


def errors_by_parameter(store: MemoryStore, numbers: Sequence[int], everyone: Tensor) -> dict[int, Tensor]:
    """Returns the errors of the way back that all owners remember, by parameter number, [numel] each.

    Args:
        store: the memory of any rank.
        numbers: numbers of the compressed parameters, in the order of `own_errors`.
        everyone: `own_errors` of all ranks, [ranks, numel].
    """
    lengths = [len(store.row(Keeps.DOWN_ERROR, number)) for number in numbers]
    parts = everyone.split(lengths, dim=1)
    return {number: store.whole(number, rows) for number, rows in zip(numbers, parts, strict=True)}


def gathered_errors(own: Tensor, everyone: Tensor) -> Exchanges:
    """Returns the request that fills ``everyone``, [ranks, numel], with all ranks' ``own``, [numel]."""

    def steps() -> Steps:
        yield (Exchange("all_gather", everyone.view(-1).view(torch.uint8), own.view(torch.uint8)),)
        return 0

    return Exchanges(own, steps, (len(everyone) - 1) * own.nbytes, own.nbytes)


def preserved(fragments: Iterable[Fragment], errors: Mapping[int, Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields the anchor and the tensor of each parameter that has an error, and its value in the preserved model;
    ``errors`` come from `errors_by_parameter`."""
    for fragment in fragments:
        for entry, anchor in fragment.entries():
            error = errors.get(entry.segment.parameter)
            if error is not None:
                yield anchor, entry.tensor, anchor - error.view(anchor.shape).to(anchor.device, anchor.dtype)
