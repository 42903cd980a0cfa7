"""Dion on four virtual workers: bytes and loss where factors of low rank are averaged, beside AdamW and Muon.

    GQSGD_DATA=FOLDER python -m benchmarks.dion --save

Without a folder with WikiText-2, the text is that of Python's ``help``. Dion makes its steps of the mean gradient here:
between processes it makes the same ones of averaged factors (tests/distributed/test_matrix_optimizers.py), whose bytes
the table has.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.report import Report, command_line, listed, present
from benchmarks.virtual_characters import (
    BATCH,
    LENGTH,
    STEPS,
    WORKERS,
    Scheduled,
    VirtualCharacters,
    outcome,
    tuned_ways,
)
from lightning_gqsgd.reducers.base import ring_bytes
from lightning_gqsgd.research.optim import Dion, MuonAdamW
from lightning_gqsgd.research.simulation.shapes import Shaped

#: Learning rate of the parameters that are no matrices, beside Dion.
OTHERS_RATE = 4e-3
#: Ways: the rank of Dion's factors over the smaller side, or another optimizer, and the learning rates that are tried.
WAYS: dict[str, tuple[float | None, tuple[float, ...]]] = {
    "AdamW, gradients averaged": (None, (4e-3, 8e-3, 1.6e-2)),
    "Muon, gradients averaged": (None, (8e-3, 1.6e-2, 3.2e-2)),
    "Dion, rank 1/4": (1 / 4, (1e-2, 2e-2, 4e-2)),
    "Dion, rank 1/16": (1 / 16, (2e-2, 4e-2, 8e-2)),
}


def trained(way: str, rate: float) -> tuple[float, float]:
    """Returns the loss at the end, and the megabytes that a worker would send."""
    problem = VirtualCharacters()
    rank, _ = WAYS[way]
    made: list[Shaped] = []

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        matrices, others = problem.divided(parameters)
        if rank is not None:
            return Dion(matrices, others, lr=rate, rank_fraction=rank, others_lr=OTHERS_RATE, betas=(0.9, 0.999))
        if way.startswith("Muon"):
            return MuonAdamW(matrices, others, lr=rate, betas=(0.9, 0.999))
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=0.1)

    def shaped(flat: list[Tensor]) -> Optimizer:
        made.append(Shaped(flat, problem.shapes, lambda parts: Scheduled(make(parts), STEPS)))
        return made[-1]

    loss, sent = outcome(STEPS, problem, shaped)
    (scheduled,) = made[0].optimizers
    if isinstance(scheduled, Scheduled) and isinstance(scheduled.inner, Dion):
        sent = STEPS * ring_bytes(4 * scheduled.inner.averaged_numel, WORKERS) / 1e6
    return loss, sent


def measure(options: argparse.Namespace) -> Report:
    """Tune the learning rate of every way."""
    rates_of = {way: rates for way, (_, rates) in WAYS.items()}
    report = tuned_ways("dion", "Dion", rates_of, trained)
    problem = VirtualCharacters()
    sizes = [segment.numel for segment in problem.segments]
    hidden = sum(size for size, is_hidden in zip(sizes, problem.hidden, strict=True) if is_hidden)
    report.notes = (
        f"{problem.text}; {sum(sizes):,} parameters, of which {hidden:,} are in matrices of hidden layers; {BATCH} "
        f"windows of {LENGTH} bytes per worker and step, 1 seed. Loss: nats per byte of "
        "the validation text. Sent: bytes of each worker in a ring, in fp32; of Dion, those of the factors and "
        "of the gradients of all other parameters.",
        "Learning rates that were tried with the first seed, each with warm-up and a cosine down to a tenth: "
        + "; ".join(f"{way}: {listed(rates)}" for way, (_, rates) in WAYS.items())
        + f". Beside Dion, all other parameters have AdamW with {OTHERS_RATE:g}.",
    )
    return report


if __name__ == "__main__":
    present(command_line(__doc__), measure, threads=1)
