"""The reducer that "auto" takes, against the best one, over clusters of nodes with several GPUs.

    python -m benchmarks.default_reducer --device h100 --save

For each cluster and model, the predicted step of `reducer="auto"` is compared with the shortest one among reducers at 8
bits, and with that of plain DDP. `gqsgd advise` makes the same predictions. "auto" chooses before it knows how long the
backward pass takes.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product

import torch

from benchmarks.report import Report, command_line, present
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.predict.costs import ESTIMATES, LATENCY_S, Costs, Link, estimated_costs
from lightning_gqsgd.predict.levels import Fit, fitted
from lightning_gqsgd.predict.model import NATIVE, predict
from lightning_gqsgd.predict.models import build
from lightning_gqsgd.predict.timeline import Timeline, estimated
from lightning_gqsgd.session.nodes import Nodes

#: Models, and seconds of their backward passes.
MODELS = {"torchvision:resnet50": 0.06, "torchvision:vgg16": 0.12, "transformers:gpt2": 0.12}
NODES = (2, 4, 8, 16, 32, 64)
PER_NODE = (1, 2, 4, 8)
GBITS = (1.0, 2.5, 10.0, 25.0, 100.0)
BITS = 8


@dataclass(frozen=True)
class Cluster:
    """Nodes with as many ranks each, the rate of their links in Gbit/s, and the name of their device."""

    nodes: int
    per_node: int
    gbit: float
    device: str

    @property
    def link(self) -> Link:
        """The link of a node."""
        return Link(self.gbit * 1e9 / 8, LATENCY_S)

    @property
    def costs(self) -> Costs:
        """What everything costs."""
        return estimated_costs(self.device, self.nodes, self.per_node, self.link)

    @property
    def of_ranks(self) -> Nodes:
        """The nodes of the ranks."""
        ranks = range(self.nodes * self.per_node)
        nodes = tuple(rank // self.per_node for rank in ranks)
        return Nodes(nodes, self.link.bytes_per_s, frozenset({self.device}))

    def fitted(self, config: GQSGDConfig, timeline: Timeline) -> Fit:
        """Returns what the start of a training makes of a configuration."""
        return fitted(config, self.of_ranks, timeline.numel, timeline.dtype)

    def milliseconds(self, timeline: Timeline, method: GQSGDConfig | str) -> float:
        """Returns the predicted length of a step."""
        return 1e3 * predict(timeline, self.costs, self.nodes * self.per_node, method).step_s


@dataclass(frozen=True)
class Steps:
    """Predicted milliseconds of a step by plain DDP and by each reducer, and what "auto" takes and says."""

    ddp: float
    one_level: float
    two_levels: float | None
    takes_two: bool
    is_warned: bool

    @property
    def above_best(self) -> float:
        """By which share the step is longer than that of the best reducer."""
        return self._taken / min(filter(None, (self.one_level, self.two_levels))) - 1

    @property
    def above_ddp(self) -> float:
        """By which share the step is longer than that of plain DDP."""
        return self._taken / self.ddp - 1

    @property
    def _taken(self) -> float:
        return self.two_levels if self.two_levels is not None and self.takes_two else self.one_level


def steps_of(cluster: Cluster, timeline: Timeline, bits: int = BITS) -> Steps:
    """Returns the predictions for a cluster."""
    config = GQSGDConfig(bits=bits, sample_every=0)
    one_level = GQSGDConfig(bits=bits, sample_every=0, reducer="two_shot")
    levels = None
    if cluster.per_node > 1:
        method = GQSGDConfig(bits=bits, sample_every=0, reducer="hierarchical", node_size=cluster.per_node)
        levels = cluster.milliseconds(timeline, method)
    fit = cluster.fitted(config, timeline)
    return Steps(
        cluster.milliseconds(timeline, NATIVE),
        cluster.milliseconds(timeline, one_level),
        levels,
        fit.config.reducer == "hierarchical",
        "SLOWER" in fit.note,
    )


def measure(options: argparse.Namespace) -> Report:
    """Predict all clusters."""
    report = Report(
        f"default_reducer_{options.device}",
        f'What reducer="auto" takes at {BITS} bits, predicted for {options.device}',
        {
            "model": "",
            "nodes": "d",
            "ranks per node": "d",
            "Gbit/s": "g",
            "plain DDP (ms)": ".1f",
            "one level (ms)": ".1f",
            "two levels (ms)": ".1f",
            "taken": "",
            "says that plain DDP is faster": "",
        },
        machine=f"Predictions for {options.device}, not measurements",
    )
    every = []
    for name, backward_s in MODELS.items():
        timeline = estimated(build(name, 1, torch.device("meta")).model, backward_s)
        for nodes, per_node, gbit in product(NODES, PER_NODE, GBITS):
            steps = steps_of(Cluster(nodes, per_node, gbit, options.device), timeline)
            taken = "two levels" if steps.takes_two else "one level"
            times = [steps.ddp, steps.one_level, steps.two_levels]
            said = "yes" if steps.is_warned else "no"
            report.rows.append([name.partition(":")[2], nodes, per_node, gbit, *times, taken, said])
            every.append(steps)
    report.notes = [_in_words(every)]
    return report


def _in_words(every: list[Steps]) -> str:
    several = [steps for steps in every if steps.two_levels is not None]
    slower = [steps for steps in every if steps.above_ddp > 0.01]
    worst = max(steps.above_best for steps in every)
    return (
        f"Two levels are taken in {sum(steps.takes_two for steps in several)} of {len(several)} cases with several "
        f"ranks on each node. At worst, the step is {worst:.1%} longer than that of the best reducer. It is more than "
        f"1% longer than plain DDP's in {len(slower)} of {len(every)} cases; the start line says so in "
        f"{sum(steps.is_warned for steps in slower)} of these."
    )


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--device", choices=[*ESTIMATES], default="h100")
    present(parser, measure)
