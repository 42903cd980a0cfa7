"""Runs a plan on a few virtual ranks of many, whose other ranks send zeros.

The kernels of a GPU are compiled for a number of ranks. If all of them were virtual ranks of one process, gradients and
messages would take memory in proportion to the square of that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lightning_gqsgd.reducers.base import Exchange, Steps
from lightning_gqsgd.reducers.memory import MemoryStore
from lightning_gqsgd.wire.plan import Plan
from lightning_gqsgd.wire.telemetry import BucketCounters, Telemetry


def average_of_few(plan: Plan, gradients: Sequence[Tensor], stores: Sequence[MemoryStore]) -> None:
    """Replace the gradients of the first ranks by the mean over all ranks, whose other messages are zeros.

    Args:
        plan: a plan of a setting that does not sample errors.
        gradients: a flat tensor for each of the first ranks.
        stores: their memories.
    """
    ranks = plan.setting.ranks
    starts = [
        plan.starts(x, rank, 0, store, BucketCounters(), Telemetry())
        for rank, (x, store) in enumerate(zip(gradients, stores, strict=True))
    ]
    for of_piece in zip(*starts, strict=True):
        _run([start() for start in of_piece], ranks)


def _run(steps: Sequence[Steps], ranks: int) -> None:
    """Run one piece on the first of ``ranks`` ranks, stage by stage."""
    while True:
        pending = [exchanges for of_rank in steps if (exchanges := next(of_rank, None)) is not None]
        if not pending:
            return
        for same in zip(*pending, strict=True):
            _exchange(same, ranks)


def _exchange(exchanges: Sequence[Exchange], ranks: int) -> None:
    kind = exchanges[0].kind
    inputs = [exchange.input.clone() for exchange in exchanges]
    for rank, exchange in enumerate(exchanges):
        if kind == "all_to_all":
            exchange.output.zero_()
            for source, sent in enumerate(inputs):
                _part(exchange, 0, source, ranks).copy_(_part(exchanges[source]._replace(input=sent), 1, rank, ranks))
        elif kind == "all_gather":
            rows = exchange.output.view(ranks, -1).zero_()
            rows[: len(inputs)] = torch.stack(inputs).view(len(inputs), -1)
        else:
            stacked = torch.stack(inputs)
            exchange.output.copy_(stacked.amax(0) if kind == "max" else stacked.sum(0, dtype=stacked.dtype))


def _part(exchange: Exchange, side: int, rank: int, ranks: int) -> Tensor:
    """Returns what belongs to another rank in the output (side 0) or the input (side 1) of an all-to-all."""
    flat = (exchange.output, exchange.input)[side].view(-1)
    lengths = [flat.numel() // ranks] * ranks if exchange.splits is None else exchange.splits[side]
    start = list(accumulate(lengths, initial=0))[rank]
    return flat[start : start + lengths[rank]]
