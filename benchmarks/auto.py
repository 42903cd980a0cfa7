"""Bits that are chosen by the length of steps (`auto`), against every fixed number of bits, on links of given rates.

    python -m benchmarks.auto --save

The benchmark needs Linux, root and iproute2, see `netlab`. In every lab, `auto` trains alone until it has decided. Then
all cases train in turns, each some steps at a time, on equal data. In the end, the links of one lab change while `auto`
trains, to a slow rate and back, and the steps are counted until it takes the bits that are best there.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from benchmarks.hosts import add_labs, begin, finish, in_labs, slowest, work_or_present
from benchmarks.report import Report, command_line
from benchmarks.training import MODELS, Model, batch_of
from lightning_gqsgd.ddp.hook import register_gqsgd
from lightning_gqsgd.wire.processors import processors
from netlab.lab import reshape_own_link

PLAIN, AUTO = "ddp", "gqsgd_auto"
#: Torch's hooks, by name.
HOOKS = {"ddp, allreduce_hook": default_hooks.allreduce_hook, "ddp_bf16": default_hooks.bf16_compress_hook}
#: Fixed choices of the package, by name.
FIXED: dict[str, dict[str, Any]] = {
    "32 bits": {"bits": 32},
    "16 bits": {"bits": 16},
    "8 bits": {"bits": 8},
    "4 bits": {"bits": 4},
}
#: Fixed choices by model whose early buckets, those of the last layers, have more bits than the others: where the
#: backward pass hides them, fewer bits would save nothing there.
MIXED: dict[str, dict[str, dict[str, Any]]] = {
    "resnet18": {
        "32 bits in layer4, else 4": {"bits": {"*": 4, "layer4.*": 32, "fc.*": 32}},
        "32 bits in layer4.1, else 4": {"bits": {"*": 4, "layer4.1.*": 32, "fc.*": 32}},
        "16 bits in layer4, else 4": {"bits": {"*": 4, "layer4.*": 16, "fc.*": 16}},
    }
}
#: Steps after which a change of the link counts as not noticed.
MOST_STEPS = 150
#: Environment variable of workers: the rates that their links take one after the other.
CHANGES = "GQSGD_BENCHMARK_CHANGES"
#: Steps of each case before its turns, whose length says how many steps a turn has.
WARM_UP = 3
#: Steps between a decision and the next change of the link.
REST = 12
#: Turns of each case, and the least seconds of a turn.
ROUNDS, SECONDS = 5, 2.0


def fixed(model: str) -> dict[str, dict[str, Any]]:
    """The fixed choices for a model: fields of the configuration, by name."""
    return FIXED | MIXED.get(model, {})


class Case(Model):
    """One way of averaging gradients."""

    def __init__(self, name: str, model: str, batch: Tensor, labels: Tensor) -> None:
        super().__init__(model, batch, labels)
        if name in HOOKS:
            self.model.register_comm_hook(None, HOOKS[name])
        elif name != PLAIN:
            fields = {"preset": AUTO} if name == AUTO else fixed(model)[name]
            self.state = register_gqsgd(self.model, **fields, sample_every=0)

    def steps(self, count: int) -> float:
        """Seconds of a step, the mean of some steps in a row.

        A forward pass without gradients comes first, as in a validation. So `auto` does not take the time of the other
        cases for that of its own step.
        """
        with torch.no_grad():
            self.model(self.inputs)
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(count):
            self.step()
        return (time.perf_counter() - begun) / count

    def decide(self) -> int:
        """Train until there is another decision, and plain DDP has had its turn if it is to have one; returns the
        number of steps."""
        assert self.state is not None
        known = len(self.state.decisions)
        for count in range(MOST_STEPS):
            if len(self.state.decisions) > known and not self.state.telemetry.choice["trying"]:
                return count
            self.step()
        return MOST_STEPS


def work(options: argparse.Namespace) -> None:
    """Do one rank's part."""
    rank, _ = begin()
    batch, labels = batch_of(options.model, options.batch_size, torch.Generator().manual_seed(rank))
    changes = os.environ.get(CHANGES, "").split()
    names = (AUTO,) if changes else (PLAIN, *HOOKS, *fixed(options.model), AUTO)
    cases = {name: Case(name, options.model, batch, labels) for name in names}
    auto = cases[AUTO]
    assert auto.state is not None
    auto.decide()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    if changes:
        result: dict[str, Any] = {"changes": [_change(auto, rate) for rate in changes]}
    else:
        warm = slowest([case.steps(WARM_UP) for case in cases.values()]).tolist()
        # A turn of few short steps is shorter than the pauses that other programs of the machine make.
        counts = {
            name: max(options.steps, math.ceil(SECONDS / step_s)) for name, step_s in zip(cases, warm, strict=True)
        }
        for number in range(ROUNDS):
            for name in list(cases) if number % 2 == 0 else reversed(cases):
                seconds[name].append(cases[name].steps(counts[name]))
        result = {"seconds": {name: slowest(values).tolist() for name, values in seconds.items()}}
    result["decisions"] = [decision.to_dict() for decision in auto.state.decisions]
    for case in cases.values():
        case.close()
    finish(result)


def _change(auto: Case, rate: str) -> dict[str, Any]:
    """Change the rate of the links, and train until there is a decision, or too long."""
    assert auto.state is not None
    dist.barrier()
    reshape_own_link(rate)
    known, begun = len(auto.state.decisions), auto.state.step
    auto.decide()
    rows = auto.state.decisions[known:] or auto.state.decisions[-1:]
    # The bits that are kept may be in use before the last decision, which only says that plain DDP stays.
    since = next(row.step for row in rows if all(later.bits == rows[-1].bits for later in rows[rows.index(row) :]))
    result = {"rate": rate, "steps": since - begun, "noticed": len(auto.state.decisions) > known, **rows[-1].to_dict()}
    for _ in range(REST):
        auto.step()
    return result


def measure(options: argparse.Namespace) -> Report:
    """Run the workers in every lab."""
    report = Report(
        "auto" if options.model == "mlp" else f"auto_{options.model}",
        f"Bits chosen by the length of steps: {options.model}, {options.batch_size} samples per host",
        {
            "case": "",
            "hosts": "d",
            "rate": "",
            "step (ms)": ".0f",
            "ddp / step": ".2f",
            "best fixed / step": ".2f",
            "auto took": "",
        },
        notes=(
            f"step = median over {ROUNDS} rounds of the mean of at least {options.steps} steps in a row, and "
            f"{SECONDS:g} seconds, of the slowest host, one compute thread each.",
            "Ratios are medians over rounds of times within one round; the cases take turns, in reverse order in every "
            "second round. best fixed = the fixed number of bits, or plain DDP, with the shortest median. `auto` had "
            "trained alone until its first decision.",
        ),
    )
    in_labs(options, report, partial(_add_rows, options.model))
    if options.changes:
        _measure_changes(options, report)
    load = os.getloadavg()[2]
    if load > 1.5 * processors():  # the benchmark alone is about one busy process for each of its two hosts
        report.notes = (
            *report.notes,
            f"Other programs ran meanwhile: the load over the last 15 minutes was {load:.0f} on {processors()} cores.",
        )
    return report


def _add_rows(model: str, report: Report, hosts: int, rate: str, result: dict[str, Any]) -> None:
    seconds = {name: np.array(values) for name, values in result["seconds"].items()}
    best = min((PLAIN, *fixed(model)), key=lambda name: float(np.median(seconds[name])))
    took = " then ".join(str(decision["bits"]) for decision in result["decisions"])
    for name, values in seconds.items():
        ratios = [float(np.median(seconds[other] / values)) for other in (PLAIN, best)]
        mark = " (best fixed)" if name == best else ""
        row = [f"{name}{mark}", hosts, rate, 1e3 * float(np.median(values)), *ratios, took if name == AUTO else None]
        report.rows.append(row)
    print(f"{hosts} hosts, {rate}: auto took {took}, {report.rows[-1][5]:.2f} times the best fixed choice", flush=True)


def _measure_changes(options: argparse.Namespace, report: Report) -> None:
    """Change the links of a lab while `auto` trains."""
    os.environ[CHANGES] = " ".join(options.changes)
    of_changes = argparse.Namespace(**{**vars(options), "hosts": options.hosts[:1], "rate": ["none"]})
    in_labs(of_changes, report, _add_changes)
    del os.environ[CHANGES]


def _add_changes(report: Report, hosts: int, rate: str, result: dict[str, Any]) -> None:
    for change in result["changes"]:
        took = f"{change['bits']} after {change['steps']} steps" if change["noticed"] else "not noticed"
        step = 1e3 * float(change["seconds"].get(str(change["bits"]), float("nan")))
        report.rows.append([f"{AUTO}, link changed to", hosts, change["rate"], step, None, None, took])


if __name__ == "__main__":
    parser = command_line(__doc__)
    add_labs(parser)
    parser.set_defaults(rate=["none", "1gbit", "100mbit"])
    parser.add_argument("--model", choices=list(MODELS), default="resnet18")
    parser.add_argument("--batch-size", type=int, default=16, help="per host (default 16)")
    parser.add_argument("--steps", type=int, default=4, help="of a case in a round, at least (default 4)")
    parser.add_argument("--changes", nargs="*", default=["200mbit", "none"], help="rates of the last lab, in turn")
    work_or_present(parser, work, measure)
