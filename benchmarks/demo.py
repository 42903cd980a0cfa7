"""DeMo on four virtual workers: bytes and loss beside AdamW in every step, and what the cosine transform adds.

    GQSGD_DATA=FOLDER python -m benchmarks.demo --save

Without a folder with WikiText-2, the text is that of Python's ``help``. All ways start from the same network, and see
the same batches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.report import Report, command_line, listed, present
from benchmarks.virtual_characters import BATCH, LENGTH, STEPS, Scheduled, VirtualCharacters, outcome, tuned_ways
from lightning_gqsgd.research.systems import SYSTEMS

#: Learning rates that are tried with AdamW, and with optimizers of signs.
ADAMW, SIGNS = (4e-3, 8e-3, 1.6e-2), (5e-4, 1e-3, 2e-3)

_DEMO = dict(SYSTEMS["demo"].fields)


def _adamw(parameters: list[Tensor], lr: float) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)


def _signs(parameters: list[Tensor], lr: float) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1, betas=(0.0, 0.0), eps=1e-12)


class SignOfMomentum(torch.optim.SGD):
    """SGD whose steps are the signs of a momentum of 0.95: what the uncompressed momentum of DeMo would be used for."""

    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        super().__init__(parameters, lr=lr, weight_decay=0.0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.95).add_(parameter.grad)
                parameter.mul_(1 - group["lr"] * 0.1)
                parameter.sub_(momentum.sign(), alpha=group["lr"])


#: Ways: the preset, its fields, what makes the optimizer, and the learning rates that are tried.
Way = tuple[str, dict[str, Any], Callable[[list[Tensor], float], Optimizer], tuple[float, ...]]
WAYS: dict[str, Way] = {
    "AdamW, 32 bits": ("ddp", {}, _adamw, ADAMW),
    "signs of a momentum, 32 bits": ("ddp", {}, SignOfMomentum, SIGNS),
    "DeMo, 1/128": ("gqsgd", _DEMO, _signs, SIGNS),
    "the same without the transform": ("gqsgd", {**_DEMO, "codec": "top_k", "block_size": 4096}, _signs, SIGNS),
}


def trained(way: str, rate: float) -> tuple[float, float]:
    """Returns the loss at the end, and the megabytes that a worker has sent."""
    preset, fields, make, _ = WAYS[way]

    def scheduled(parameters: list[Tensor]) -> Optimizer:
        return Scheduled(make(parameters, rate), STEPS)

    return outcome(STEPS, VirtualCharacters(), scheduled, preset, **fields)


def measure(options: argparse.Namespace) -> Report:
    """Tune the learning rate of every way."""
    rates_of = {way: rates for way, (*_, rates) in WAYS.items()}
    report = tuned_ways("demo", "DeMo", rates_of, trained)
    problem = VirtualCharacters()
    numel = sum(segment.numel for segment in problem.segments)
    report.notes = (
        f"{problem.text}; {numel:,} parameters, {BATCH} windows of {LENGTH} bytes per worker and step, "
        "1 seed. Loss: nats per byte of the validation text. Sent: bytes of each worker, to all others.",
        "DeMo and its variants: momentum 0.999, of which the largest coordinates of each block of 4,096 are sent, 6 "
        "bytes each; steps along the signs of the mean. The other momentum is 0.95. Learning rates that were tried "
        f"with the first seed: {listed(ADAMW)} with AdamW, and "
        f"{listed(SIGNS)} with signs, each with warm-up and a cosine down to a tenth.",
    )
    return report


if __name__ == "__main__":
    present(command_line(__doc__), measure, threads=1)
