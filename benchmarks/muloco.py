"""MuLoCo on four virtual workers: what Muon inside local steps ends with, beside AdamW inside, and beside DDP.

    GQSGD_DATA=FOLDER python -m benchmarks.muloco --save

Without a folder with WikiText-2, the text is that of Python's ``help``. All ways start from the same network, and see
the same batches.
"""

from __future__ import annotations

import argparse
import math
import sys
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.report import Report, command_line, listed, present
from benchmarks.virtual_characters import BATCH, LENGTH, WORKERS, Scheduled, VirtualCharacters, outcome
from lightning_gqsgd.research.optim import MuonAdamW
from lightning_gqsgd.research.simulation.shapes import Shaped

#: Inner optimizers, and the learning rates that are tried with each.
RATES: dict[str, tuple[float, ...]] = {"AdamW": (1e-3, 2e-3, 4e-3, 8e-3), "Muon": (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)}
STEPS, SEEDS = 480, 3
#: Steps between averages of the local ways.
EVERY = 30
#: First steps, whose averages leave the outer optimizer out: as large a share as the default is of 1,024 steps.
OUTER_SHARE = 0.25

#: Ways of averaging: name of a preset, and its fields.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "every step, 32 bits": ("ddp", {}),
    "30 local steps, 32 bits": ("gqsgd_diloco", {"local_steps": EVERY, "bits": 32}),
    "30 local steps, 4 bits": ("gqsgd_diloco", {"local_steps": EVERY}),
    "30 local steps, 2 bits, errors fed back": ("gqsgd_muloco", {"local_steps": EVERY}),
}


def trained(way: str, name: str, rate: float, seed: int) -> tuple[float, float]:
    """Returns the loss at the end, and the megabytes that a worker has sent."""
    preset, fields = WAYS[way]
    problem = VirtualCharacters(seed)

    def inner(parameters: list[nn.Parameter]) -> Optimizer:
        if name == "AdamW":
            return Scheduled(torch.optim.AdamW(parameters, lr=rate, weight_decay=0.1), STEPS)
        return Scheduled(MuonAdamW(*problem.divided(parameters), lr=rate, betas=(0.9, 0.999)), STEPS)

    def shaped(flat: list[Tensor]) -> Optimizer:
        return Shaped(flat, problem.shapes, inner)

    after = {"outer_after": round(OUTER_SHARE * STEPS)} if preset != "ddp" else {}
    return outcome(STEPS, problem, shaped, preset, seed=seed, **fields, **after)


def measure(options: argparse.Namespace) -> Report:
    """Tune the learning rate of every way with the first seed, and train with all seeds."""
    report = Report(
        "muloco",
        f"Muon inside local steps: {STEPS} steps of a character transformer, {WORKERS} virtual workers",
        {
            "inner": "",
            "averages": "",
            "learning rate": "g",
            "sent (MB)": ".3f",
            "loss at the end": ".3f",
            "less every step's": "+.3f",
            "lowest": ".3f",
            "highest": ".3f",
        },
    )
    for name, rates in RATES.items():
        plain = math.nan
        for way in WAYS:
            tried = {rate: trained(way, name, rate, 0) for rate in rates}
            best = min(tried, key=lambda rate: tried[rate][0])
            first, sent = tried[best]
            losses = [first] + [trained(way, name, best, seed)[0] for seed in range(1, SEEDS)]
            plain = fmean(losses) if WAYS[way][0] == "ddp" else plain
            row: list[str | float | None] = [
                name,
                way,
                best,
                sent,
                fmean(losses),
                fmean(losses) - plain,
                min(losses),
                max(losses),
            ]
            print(f"muloco: {row}; tried {tried}", file=sys.stderr, flush=True)
            report.rows.append(row)
    problem = VirtualCharacters()
    numel = sum(segment.numel for segment in problem.segments)
    report.notes = (
        f"{problem.text}; {numel:,} parameters, {BATCH} windows of {LENGTH} bytes per worker and step, means over "
        f"{SEEDS} seeds. Loss: nats per byte of the validation text, after the last average. Sent: "
        "bytes of each worker. Less every step's: the difference from the loss of the same optimizer whose gradients "
        "are averaged in every step.",
        "Learning rates that were tried with the first seed, each with warm-up and a cosine down to a tenth: "
        + "; ".join(f"{name}: {listed(rates)}" for name, rates in RATES.items())
        + ". Muon is that of torch for the matrices of hidden layers, and AdamW for all other parameters. The outer "
        "optimizer, Nesterov momentum as in `gqsgd_diloco`, begins after a quarter of the steps, and is not tuned.",
    )
    return report


if __name__ == "__main__":
    present(command_line(__doc__), measure, threads=1)
