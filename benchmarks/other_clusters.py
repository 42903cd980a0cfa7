"""Steps that others have measured on their clusters, against what the performance model says of them.

    python -m benchmarks.other_clusters --save

`l40s_links.csv` has steps on four machines with an L40S each over NCCL, on links shaped to a rate, and on links without
a limit. Its facts are from the telemetry of Adnan082/diloco-measured at 07b7885 (Apache-2.0). A prediction knows the
model, the rate of the link and the length of the computation, as the command line of `gqsgd advise` does. The logs of
Global-QSGD's authors are compared with the closed form of their paper.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.paper import tree_seconds
from benchmarks.report import Cell, Report, command_line, present
from lightning_gqsgd.predict.costs import LATENCY_S, Link, estimated_costs
from lightning_gqsgd.predict.intervals import LONGEST, SHORTEST, interval
from lightning_gqsgd.predict.model import NATIVE, predict
from lightning_gqsgd.predict.tcp import Factors
from lightning_gqsgd.predict.timeline import Timeline, estimated

ROWS = Path(__file__).with_name("l40s_links.csv")
NODES = 4
#: Bits per second of the links by their names in the file. That of links without a limit is what iperf3 said between
#: two machines.
RATES = {"50m": 50e6, "1g": 1e9, "unshaped": 9.53e9}
UNSHAPED = "unshaped"
#: Whose kernels reduce fp32 gradients; there are no estimates of an L40S, and fp32 needs no codec.
DEVICE = "a100"
#: Of the language model whose steps were measured.
WIDTH = 256
LAYERS = 6
HIDDEN = 768
VOCABULARY = 50_257


class LanguageModel(nn.Module):
    """The parameters of the model, in order: 30,846,720, which is the number that its authors give.

    They give its width, layers, heads and vocabulary as well. Gated layers of 768 and norms without a bias are what
    makes up the number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        linear = partial(nn.Linear, bias=False)
        self.layers = nn.ModuleList()
        for _ in range(LAYERS):
            attention = [linear(WIDTH, WIDTH) for _ in range(4)]
            gated = [linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)]
            self.layers.append(nn.ModuleList([nn.RMSNorm(WIDTH), *attention, nn.RMSNorm(WIDTH), *gated]))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = linear(WIDTH, VOCABULARY)


@dataclass(frozen=True)
class Row:
    """A row of the file.

    Attributes:
        algorithm: "ddp", or "diloco", which averages fp32 changes after every H-th step, beside no computation.
        every: H.
        rate: the link's name.
        repeat: number of the run.
        steps: steps that were counted.
        mean_s: mean seconds of these steps.
        compute_s: median seconds of a step that exchanges nothing.
    """

    algorithm: str
    every: int
    rate: str
    repeat: int
    steps: int
    mean_s: float
    compute_s: float

    @classmethod
    def of(cls, row: dict[str, str]) -> Row:
        """Returns the row of a line of the file."""
        compute_ms = row["median_step_without_exchange_ms"] or row["median_compute_ms"]
        numbers = (int(row["H"]), row["rate"], int(row["repeat"]), int(row["steps_counted"]))
        return cls(row["algorithm"], *numbers, float(row["mean_step_ms"]) / 1e3, float(compute_ms) / 1e3)

    @property
    def exchanges(self) -> int:
        """Exchanges among the steps that were counted."""
        return self.steps // self.every


@dataclass(frozen=True)
class Step:
    """A mean step that is predicted, and the ends of its interval, in seconds.

    Attributes:
        usual_s: the prediction.
        ring_s: the prediction for a ring that takes no longer than its bytes at the link's rate.
        shortest_s: the beginning of the interval.
        longest_s: its end.
    """

    usual_s: float
    ring_s: float
    shortest_s: float
    longest_s: float


def read() -> list[Row]:
    """Returns the rows of the file."""
    with ROWS.open() as lines:
        return [Row.of(line) for line in csv.DictReader(lines)]


def timeline_of(compute_s: float) -> Timeline:
    """Returns the step of a rank: a third of it the forward pass, the rest the backward pass."""
    with torch.device("meta"):
        model = LanguageModel()
    weights = [0.0 if name.startswith("embedding") else float(p.numel()) for name, p in model.named_parameters()]
    return estimated(model, compute_s * 2 / 3, weights=weights)


def step_of(row: Row) -> Step:
    """Predict the mean step of a row."""
    costs = estimated_costs(DEVICE, NODES, 1, Link(RATES[row.rate] / 8, LATENCY_S))
    line = timeline_of(row.compute_s)
    ring = costs.at(Factors())
    if row.algorithm == "ddp":
        usual_s, ring_s = (predict(line, given, NODES, NATIVE).step_s for given in (costs, ring))
        return Step(usual_s, ring_s, *interval(costs, lambda at: predict(line, at, NODES, NATIVE).step_s))
    alone = line.at_once()
    share = row.exchanges / row.steps
    shortest_s, longest_s = interval(costs, lambda at: predict(alone, at, NODES, NATIVE).step_s)
    return Step(
        row.compute_s + share * predict(alone, costs, NODES, NATIVE).step_s,
        row.compute_s + share * predict(alone, ring, NODES, NATIVE).step_s,
        SHORTEST * row.compute_s + share * shortest_s,
        LONGEST * row.compute_s + share * longest_s,
    )


#: What is compared with the logs: parameters, steps in a time; the seconds of fp32 and 8 bits over P2P, and
#: of fp32, 8 bits and exponential 8 bits over SHM.
LOGS = {
    "DeepLight": (607_959_381, 200, (40.03, 23.49), (441.6, 123.9, 142.7)),
    "TXL": (191_950_298, 1, (0.6319, 0.6030), (1.3719, 0.7871, 0.8137)),
    "ResNet": (126_886_696, 1, (0.0983, 0.0843), (0.5492, 0.1874, 0.2160)),
}
#: What each of them sends, in the words of the closed form.
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "8 bits": {"ratio": 4.0},
    "8 bits, exponential": {"ratio": 4.0, "slowdown": 79.0},
}


def logs() -> list[tuple[str, float, float]]:
    """Returns the rows of the authors' logs: name, logged seconds, seconds of the closed form."""
    made = []
    for task, (parameters, steps, (fp32, int8), logged) in LOGS.items():
        compute_s = int8 - (fp32 - int8) / 3
        tree = partial(tree_seconds, 4 * parameters, ranks=4, latency_s=0, bytes_per_s=5.4e9, reduce_bytes_per_s=2e12)
        for (way, options), seconds in zip(WAYS.items(), logged, strict=True):
            made.append((f"{task}, {way}", seconds, compute_s + steps * tree(**options)))
    return made


def measure(options: argparse.Namespace) -> Report:
    """Predict all rows."""
    report = Report(
        "other_clusters",
        "Steps that others have measured, against predictions",
        {
            "measured by others": "",
            "case": "",
            "link": "",
            "run": "",
            "measured (ms)": ".1f",
            "predicted (ms)": ".1f",
            "error (%)": "+.1f",
            "error of a ring's bytes (%)": "+.1f",
            "interval (ms)": "",
            "holds": "",
        },
        machine="A model of the step, no machine",
    )
    for row in read():
        step = step_of(row)
        holds = step.shortest_s <= row.mean_s <= step.longest_s
        case = "ddp" if row.algorithm == "ddp" else f"{row.algorithm}, H = {row.every}"
        off = [100 * (seconds / row.mean_s - 1) for seconds in (step.usual_s, step.ring_s)]
        times = [1e3 * row.mean_s, 1e3 * step.usual_s, *off]
        ends = f"{1e3 * step.shortest_s:.1f} to {1e3 * step.longest_s:.1f}"
        report.rows.append(
            ["4 × L40S", case, row.rate, str(row.repeat), *times, ends, "yes" if holds else "no"],
        )
    for name, logged_s, form_s in logs():
        error = 100 * (form_s / logged_s - 1)
        report.rows.append(["4 × A100", name, "SHM", "–", 1e3 * logged_s, 1e3 * form_s, error, None, None, None])
    report.notes = [_in_words(report.rows), *NOTES]
    return report


NOTES = (
    "4 × L40S: mean step over the steps that were counted, which have as many exchanges as H fits into them. The "
    "prediction knows the model, the rate and the length of a step that exchanges nothing; see docs/prediction.md.",
    "Links without a limit: iperf3 reached 9.53 Gbit/s. The step is shorter than the bytes of a ring take at that "
    "rate, so NCCL has reached more, and the row cannot be predicted from it.",
    "4 × A100: logs of Global-QSGD's authors (docs/paper.md), against the closed form of their paper. Their baseline "
    "is a tree of messages and no all-reduce of NCCL. DeepLight's times are those of an epoch of 200 steps. The form "
    "has no interval.",
)


def _in_words(rows: Sequence[Sequence[Cell]]) -> str:
    ours = [row for row in rows if row[0] == "4 × L40S"]
    errors = np.abs([float(row[6] or 0) for row in ours])
    known = np.abs([float(row[6] or 0) for row in ours if row[2] != UNSHAPED])
    holding = sum(row[9] == "yes" for row in ours)
    return (
        f"Over {len(ours)} steps on L40S, the median of the absolute errors is {np.median(errors):.1f} % and the worst "
        f"is {errors.max():.1f} %; over the {len(known)} on links of a known rate, the worst is {known.max():.1f} %. "
        f"The interval holds in {holding} of {len(ours)}."
    )


if __name__ == "__main__":
    present(command_line(__doc__), measure)
