"""Error of one quantised mean with and without a reference that all ranks share, on sequences of real gradients.

    GQSGD_DATA=FOLDER python -m benchmarks.side_information --save

Each sequence is one uncompressed training (see `benchmarks.gradient_sequences`), along which all configurations average
the same gradients, or the same changes of local steps. Without the folder GQSGD_DATA with CIFAR-10 and WikiText-2, the
images are scikit-learn's digits and the text is that of Python's ``help``.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gradient_sequences import TASKS, changes, gradients, images, segments_of
from benchmarks.report import Report, command_line, present
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.reducers.memory import StabilityWarning
from lightning_gqsgd.research.simulation import VirtualRanks, relative_error
from lightning_gqsgd.spec.memories import MEMORIES
from workloads.characters import load_texts

#: Columns: the fields of a configuration. The last one is DIANA's reference with the same step: one for each rank.
CASES: dict[str, dict[str, Any]] = {
    "linear": {"codec": "linear"},
    "linear, shared": {"codec": "linear", "memory": "shared"},
    "companded": {"codec": "companded"},
    "companded, shared": {"codec": "companded", "memory": "shared"},
    "companded, own": {"codec": "companded", "memory": {"alpha": 0.0, "beta": 0.0, "rho": 0.1}},
}
BITS = (1, 2, 3, 4)
RANKS = 4
SEED = 0


class Sequence(NamedTuple):
    """A sequence of gradients or of changes.

    Attributes:
        task: name of a task of `gradient_sequences.TASKS`.
        batch: samples of a rank in each step.
        local_steps: steps in a round, whose changes are averaged; 0: gradients are averaged in every step.
        length: number of steps, or of rounds.
    """

    task: str
    batch: int
    local_steps: int
    length: int

    @property
    def averaged(self) -> str:
        """What is averaged, in words."""
        return f"changes of {self.local_steps} steps" if self.local_steps else "gradients"

    def run(self) -> tuple[list[Segment], Iterator[list[Tensor]]]:
        """The parameters, and the vectors of all ranks in each step."""
        torch.manual_seed(SEED)
        task = TASKS[self.task]
        model = task.make()
        if self.local_steps:
            vectors = changes(task, model, RANKS, self.batch, self.length, self.local_steps)
        else:
            vectors = gradients(task, model, RANKS, self.batch, self.length)
        return segments_of(model), vectors


class Energies:
    """Mean shares of energy that a shared reference leaves, |x - h|²/|x|²: of the ranks' vectors and of their mean.

    The reference is that of exact means. Its numbers are those of ``memory="shared"``.
    """

    def __init__(self) -> None:
        self._reference: Tensor | None = None
        self._shares: list[tuple[float, float]] = []

    def add(self, vectors: list[Tensor], *, counts: bool) -> None:
        """Take a step; ``counts``: whether the step is part of the mean."""
        each = torch.stack(vectors)
        mean, memory = each.mean(0), MEMORIES["shared"]
        assert memory is not None
        assert memory.rho is not None
        if self._reference is None:
            self._reference = torch.zeros_like(mean)
        if counts:
            pairs = ((each, each - self._reference), (mean, mean - self._reference))
            first, second = (float(left.square().sum() / whole.square().sum()) for whole, left in pairs)
            self._shares.append((first, second))
        self._reference = memory.beta * self._reference + memory.rho * mean

    def means(self) -> tuple[float, float]:
        """The two shares."""
        first, second = zip(*self._shares, strict=True)
        return sum(first) / len(first), sum(second) / len(second)


def measured(sequence: Sequence) -> tuple[tuple[float, float], dict[tuple[int, str], float]]:
    """Shares of energy, and relative errors in per cent by bits and case; means over the second half of the steps."""
    segments, vectors = sequence.run()
    virtual = {
        (number, name): VirtualRanks(RANKS, segments, bits=number, reducer="two_shot", block_size=128, **fields)
        for number in BITS
        for name, fields in CASES.items()
        if number > 1 or fields["codec"] == "linear"  # companded codes begin at 2 bits
    }
    energies, half = Energies(), sequence.length // 2
    errors = dict.fromkeys(virtual, 0.0)
    for step, each in enumerate(vectors):
        energies.add(each, counts=step >= half)
        for key, group in virtual.items():
            mean = group.mean(each, step)
            if step >= half:
                errors[key] += 100 * relative_error(mean, each) / (sequence.length - half)
    return energies.means(), errors


def measure(options: argparse.Namespace) -> Report:
    """Measure all sequences."""
    sequences = [Sequence(task, batch, 0, steps) for task in TASKS for batch, steps in ((8, 160), (64, 80), (512, 32))]
    sequences += [Sequence(task, 32, 8, 24) for task in TASKS]
    report = Report(
        "side_information",
        f"Relative L2 error (%) of one mean of {RANKS} ranks, with and without a shared reference, two_shot",
        {
            "averaged": "",
            "samples per rank": "d",
            "steps": "d",
            "left of x": ".2f",
            "left of the mean": ".2f",
            "bits": "d",
            **dict.fromkeys(CASES, ".1f"),
            "best shared / best without": ".2f",
        },
    )
    for sequence in sequences:
        print(f"side_information: {sequence}", file=sys.stderr)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StabilityWarning)  # of the worst gradient at 1 and 2 bits
            left, errors = measured(sequence)
        for bits in BITS:
            cells = [errors.get((bits, name)) for name in CASES]
            plain = min(cell for cell, name in zip(cells, CASES, strict=True) if cell and "," not in name)
            shared = min(cell for cell, name in zip(cells, CASES, strict=True) if cell and "shared" in name)
            what = f"{sequence.task}, {sequence.averaged}"
            report.rows.append([what, sequence.batch, sequence.length, *left, bits, *cells, shared / plain])
    report.notes = (
        "left of x, of the mean: |x - h|²/|x|² of one rank's vectors and of their mean, where h is the running mean "
        'that memory="shared" keeps, made of exact means. The first shot sends x - h, the second one the mean less h. '
        "Below 1, the reference helps.",
        "shared: that reference, one for all ranks. own: DIANA's, one for each rank, with the same step 0.1. Blocks of "
        "128; 0.12 bits per coordinate are added by scales. All numbers are means over the second half of the steps.",
        f"ResNet: 14 layers, 16 channels, {images()[0]} at 16x16, SGD with momentum 0.9. transformer: two layers of "
        f"width 64 on windows of 32 bytes of {load_texts().name}, AdamW. Local steps: SGD without momentum, and AdamW.",
    )
    return report


if __name__ == "__main__":
    present(command_line(__doc__), measure, threads=1)
