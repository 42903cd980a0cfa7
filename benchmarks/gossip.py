"""Gossip over a ring of hosts against all-reduces: time of a step, and how far the hosts' models are apart.

    python -m benchmarks.gossip --save

The benchmark needs Linux, root and iproute2, see `netlab`. Every host makes gradient steps on a quadratic of its own.
An all-reduce averages the gradients of all hosts. Gossip averages a host's model with those of its neighbours after a
step, with the Metropolis weights of `research.simulation.graph.Graph`. Cases take turns step by step, so that all of
them see the same load of the machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.hosts import add_labs, begin, finish, in_labs, slowest, wire_seconds, work_or_present
from benchmarks.report import Report, command_line
from lightning_gqsgd import all_reduce
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.presets import PRESETS
from lightning_gqsgd.reducers.base import ring_bytes
from lightning_gqsgd.research.simulation.graph import Graph
from lightning_gqsgd.wire.plan import Plan

#: Size of the model in MB of fp32.
MB = 4.0
RATE_OF_LEARNING = 0.1
BASELINE = "all-reduce, fp32"
#: Steps that are not timed: they make connections and compile kernels.
UNTIMED = 2
#: Steps that are timed.
STEPS = 20

#: Takes a model, its gradient and the step's number, and makes the step.
Step = Callable[[Tensor, Tensor, int], Tensor]


def exchanged(model: Tensor, graph: Graph, rank: int) -> Tensor:
    """A round of gossip: the weighted mean of this rank's model and its neighbours', [d]."""
    neighbours = [other for other in range(graph.ranks) if other != rank and graph.weights[rank, other] > 0]
    received = {other: torch.empty_like(model) for other in neighbours}
    operations = [dist.P2POp(dist.irecv, received[other], other) for other in neighbours]
    operations += [dist.P2POp(dist.isend, model, other) for other in neighbours]
    for transfer in dist.batch_isend_irecv(operations):
        transfer.wait()
    mixed = float(graph.weights[rank, rank]) * model
    for other in neighbours:
        mixed.add_(received[other], alpha=float(graph.weights[rank, other]))
    return mixed


def _reduced(model: Tensor, gradient: Tensor, step: int) -> Tensor:
    dist.all_reduce(gradient)
    return model.sub_(gradient, alpha=RATE_OF_LEARNING / dist.get_world_size())


def _quantised(model: Tensor, gradient: Tensor, step: int) -> Tensor:
    return model.sub_(all_reduce(gradient, preset="gqsgd_4bit", step=step), alpha=RATE_OF_LEARNING)


def _gossip(rounds: int) -> Step:
    def step(model: Tensor, gradient: Tensor, number: int) -> Tensor:
        model = model.sub_(gradient, alpha=RATE_OF_LEARNING)
        for _ in range(rounds):
            model = exchanged(model, Graph.ring(dist.get_world_size()), dist.get_rank())
        return model

    return step


CASES: dict[str, Step] = {
    BASELINE: _reduced,
    "all-reduce, gqsgd_4bit": _quantised,
    "gossip over the ring, 1 round": _gossip(1),
    "gossip over the ring, 2 rounds": _gossip(2),
}


def sent_bytes(name: str, ranks: int, numel: int) -> float:
    """Bytes that a host sends in a step of a case."""
    if name == BASELINE:
        return ring_bytes(4 * numel, ranks)
    if "gossip" in name:
        return Graph.ring(ranks).sent_bytes(numel) * (2 if "2 rounds" in name else 1)
    config = resolve(PRESETS["gqsgd_4bit"].config, ranks)
    return Plan([Segment(0, numel, raw=False)], setting_of(config, ranks, torch.float32)).sent_bytes


def work(options: argparse.Namespace) -> None:
    """Do one rank's part."""
    rank, ranks = begin()
    numel = round(MB * 1e6 / 4)
    optima = torch.stack([torch.randn(numel, generator=torch.Generator().manual_seed(each)) for each in range(ranks)])
    models = {name: torch.zeros(numel) for name in CASES}
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for step in range(UNTIMED + STEPS):
        for name, make_step in CASES.items():
            gradient = models[name] - optima[rank]
            dist.barrier()
            begun = time.perf_counter()
            models[name] = make_step(models[name], gradient, step)
            seconds[name].append(time.perf_counter() - begun)
    target = optima.mean(0)
    results = {}
    for name, model in models.items():
        everyone = [torch.empty_like(model) for _ in range(ranks)]
        dist.all_gather(everyone, model)
        each = torch.stack(everyone)
        mean = each.mean(0)
        results[name] = {
            "seconds": [float(value) for value in slowest(seconds[name][UNTIMED:])],
            "apart": float((each - mean).norm() / (ranks**0.5 * mean.norm())),
            "away": float((mean - target).norm() / target.norm()),
        }
    finish(results)


def measure(options: argparse.Namespace) -> Report:
    """Run the workers in every lab."""
    report = Report(
        "gossip",
        f"Gossip over a ring against all-reduces, {MB:g} MB of parameters",
        {
            "case": "",
            "hosts": "d",
            "rate": "",
            "MB sent per host": ".2f",
            "step (ms)": ".0f",
            "bytes / rate (ms)": ".0f",
            "step / all-reduce's": ".2f",
            "models apart (%)": ".2f",
            "mean off the optimum (%)": ".2f",
        },
        notes=(
            f"Median of {STEPS} steps, in which the cases take turns; of the slowest host in each step. The "
            "hosts share the cores of one machine, so compare ratios. Where other work shares the cores, too, a codec "
            "waits for them, and its steps are longer than on an idle machine.",
            "Host i minimises ½|x - b_i|² with a normal b_i, so the hosts' optima are as far apart as independent data "
            "can make them. models apart: root mean square distance of the models from their mean, over the norm of "
            "the mean. mean off the optimum: distance of that mean from the mean of all b_i, over its norm. Both are "
            f"of the last step; the learning rate is {RATE_OF_LEARNING}.",
            "In a round of gossip, a host of a ring sends its model to two neighbours. An all-reduce among n hosts "
            "sends 2 (n-1)/n models, so it always sends less. What gossip saves is waiting: a round has one exchange, "
            "and a ring all-reduce has 2 (n-1) of them, one after the other.",
        ),
    )

    def add_rows(report: Report, hosts: int, rate: str, result: dict[str, Any]) -> None:
        numel = round(MB * 1e6 / 4)
        base = float(np.median(result[BASELINE]["seconds"]))
        for name, case in result.items():
            median, sent = float(np.median(case["seconds"])), sent_bytes(name, hosts, numel)
            wire = wire_seconds(sent, rate)
            cells = [sent / 1e6, 1e3 * median, None if wire is None else 1e3 * wire, median / base]
            report.rows.append([name, hosts, rate, *cells, 100 * case["apart"], 100 * case["away"]])

    in_labs(options, report, add_rows)
    return report


if __name__ == "__main__":
    parser = command_line(__doc__)
    add_labs(parser)
    parser.set_defaults(hosts=[4], rate=["100mbit", "1gbit"])
    work_or_present(parser, work, measure)
