"""PULSE: how many bf16 weights change in a step of fine-tuning, and the bytes that a receiver needs.

    GQSGD_DATA=FOLDER python -m benchmarks.pulse --save

Without a folder with WikiText-2, the text is that of Python's ``help``.
"""

from __future__ import annotations

import argparse
import copy
from statistics import fmean

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.report import Report, command_line, present
from lightning_gqsgd.research.patches import Receiver, Sender
from workloads.characters import CharacterTransformer, load_texts, windows

#: Learning rates of the fine-tuning, and the one before it.
RATES, PRETRAINING_RATE = (1e-6, 3e-6, 1e-5, 1e-4, 1e-3), 2e-3
#: Steps of the pretraining, of the fine-tuning before anything is counted, and those that are counted.
PRETRAINING, WARMUP, STEPS = 200, 10, 20
BATCH, LENGTH = 4, 64


class Training:
    """A model with its optimizer and batches."""

    def __init__(self, model: nn.Module, lr: float, seed: int) -> None:
        self.model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        self._text = load_texts().train
        self._generator = torch.Generator().manual_seed(seed)

    def step(self) -> None:
        """Make a step."""
        inputs, targets = windows(self._text, BATCH, LENGTH, self._generator)
        self._optimizer.zero_grad()
        F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten()).backward()
        self._optimizer.step()


def measure(options: argparse.Namespace) -> Report:
    """Pretrain, and fine-tune with each learning rate."""
    report = Report(
        "pulse",
        "PULSE: bf16 weights that change in a step of AdamW, and bytes of a patch",
        {
            "learning rate": "g",
            "fp32 weights that change (%)": ".1f",
            "bf16 weights that change (%)": ".2f",
            "patch (kB)": ".1f",
            "bits per changed weight": ".1f",
            "all bf16 weights / patch": ".1f",
        },
    )
    torch.manual_seed(0)
    start = CharacterTransformer(LENGTH)
    pretraining = Training(start, PRETRAINING_RATE, 0)
    for _ in range(PRETRAINING):
        pretraining.step()
    numel = sum(parameter.numel() for parameter in start.parameters())
    whole = 0
    for rate in RATES:
        tuning = Training(copy.deepcopy(start), rate, 1)
        follower = copy.deepcopy(start).bfloat16()
        sender, receiver = Sender(tuning.model.parameters()), Receiver(follower.parameters())
        whole = len(message := sender.message())
        receiver.apply(message)
        changed, changed_masters, sizes = [], [], []
        for step in range(WARMUP + STEPS):
            masters = nn.utils.parameters_to_vector(tuning.model.parameters()).detach().clone()
            before = nn.utils.parameters_to_vector(follower.parameters()).detach().clone()
            tuning.step()
            receiver.apply(message := sender.message())  # compares SHA-256
            if step >= WARMUP:
                sizes.append(len(message))
                after = nn.utils.parameters_to_vector(follower.parameters()).detach()
                changed.append(float((after != before).float().mean()))
                now = nn.utils.parameters_to_vector(tuning.model.parameters()).detach()
                changed_masters.append(float((now != masters).float().mean()))
        bits = 8 * fmean(sizes) / (fmean(changed) * numel)
        report.rows.append(
            [
                rate,
                100 * fmean(changed_masters),
                100 * fmean(changed),
                fmean(sizes) / 1e3,
                bits,
                2 * numel / fmean(sizes),
            ]
        )
    report.notes = (
        f"{load_texts().name}; a character transformer of {numel:,} parameters after {PRETRAINING} steps of AdamW with "
        f"a learning rate of {PRETRAINING_RATE:g}; means over {STEPS} steps after {WARMUP} steps with the rate of the "
        "row. A receiver took every patch, and its SHA-256 was the sender's.",
        f"All bf16 weights are {2 * numel / 1e3:.1f} kB. The first message, all weights with entropy-coded exponents, "
        f"has {whole / 1e3:.1f} kB.",
    )
    return report


if __name__ == "__main__":
    present(command_line(__doc__), measure, threads=1)
