"""The step times that the performance model predicts, against those that are measured, on links of given rates.

    python -m benchmarks.prediction --save

The benchmark needs Linux, root and iproute2, see `netlab`. In every lab, all cases train in turns, among them one
without communication, from which the model learns when buckets are ready. After the rounds that warm up, each process
measures the link, the kernels and the processors (`lightning_gqsgd.predict.probe`). No constant of the model was
chosen by step times.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from benchmarks.hosts import add_labs, begin, finish, in_labs, slowest, work_or_present
from benchmarks.report import Report, command_line
from benchmarks.training import MODELS, Case, batch_of
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.predict.model import BF16, NATIVE, predict
from lightning_gqsgd.predict.probe import Probe
from lightning_gqsgd.predict.probe import measure as probe_here
from lightning_gqsgd.predict.recording import Recorder
from lightning_gqsgd.predict.timeline import Timeline
from lightning_gqsgd.predict.timing import in_turns
from pictures.style import COLOURS, drawn

#: Cases by name, with what the model calls them.
METHODS: dict[str, GQSGDConfig | str] = {
    "ddp": NATIVE,
    "ddp_bf16": BF16,
    "gqsgd": GQSGDConfig(bits=8, sample_every=0),
    "gqsgd_4bit": GQSGDConfig(bits=4, sample_every=0),
}
BATCH_SIZE = {"mlp": 8, "resnet18": 16}
#: The fewest and the most rounds. On slow links a step takes seconds, and varies less.
ROUNDS = (2, 30)
#: Rounds before all others. DDP builds its buckets anew after the first one, and both touch much memory for the first
#: time.
FIRST_ROUNDS = 2
#: Further rounds that warm up, where they are short: steps of many ranks per core become shorter until then.
WARMUP = 3
SHORT_S = 12.0
#: Relative errors that the picture marks.
BANDS = (0.1, 0.2)


def work(options: argparse.Namespace) -> None:
    """Do one rank's part."""
    rank, _ = begin()
    generator = torch.Generator().manual_seed(rank)
    cases: dict[str, Case] = {}
    recorders: dict[str, Recorder] = {}
    for model in options.model:
        network = MODELS[model]()
        batch, labels = batch_of(model, BATCH_SIZE[model], generator)
        update = torch.optim.SGD(network.parameters(), lr=1e-3).step
        forward = partial(_loss, batch=batch, labels=labels)
        recorders[model] = Recorder(network, forward, update, name=model)
        cases |= {f"{model} {name}": Case(name, model, batch, labels) for name in METHODS}
    steps: dict[str, Callable[[], object]] = {name: recorder.step for name, recorder in recorders.items()}
    steps |= {name: case.step for name, case in cases.items()}
    first = in_turns(steps, FIRST_ROUNDS, warmup=0, before=dist.barrier)
    round_s = float(sum(slowest(values)[-1] for values in first.values()))
    if round_s < SHORT_S:
        in_turns(steps, WARMUP, warmup=0, before=dist.barrier)
    probe = probe_here(torch.device("cpu"), "benchmarks.prediction", bits=(8, 4))
    for recorder in recorders.values():
        recorder.forget()
    rounds = int(np.clip(options.seconds / round_s, *ROUNDS))
    seconds = in_turns(steps, rounds, warmup=0, before=dist.barrier)
    timelines = {name: recorder.timeline().to_dict() for name, recorder in recorders.items()}
    result = {name: slowest(values).tolist() for name, values in seconds.items()}
    for case in cases.values():
        case.close()
    finish({"seconds": result, "timelines": timelines, "probe": probe.to_dict()})


def _loss(model: nn.Module, batch: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch), labels)


def measure(options: argparse.Namespace) -> Report:
    """Run the workers in every lab."""
    report = Report(
        "prediction" if options.hosts == [2] else f"prediction_{'_'.join(map(str, options.hosts))}_hosts",
        f"Predicted against measured step time over shaped links of {' and '.join(map(str, options.hosts))} hosts",
        {
            "model": "",
            "case": "",
            "hosts": "d",
            "rate": "",
            "measured (ms)": ".0f",
            "10 to 90 % (ms)": "",
            "predicted (ms)": ".0f",
            "error (%)": "+.1f",
            "of it computation (ms)": ".0f",
            "codec (ms)": ".0f",
            "wire (ms)": ".0f",
        },
    )
    in_labs(options, report, partial(_add_rows, options))
    errors = np.abs(np.array([row[7] for row in report.rows], float))
    report.notes = (
        f"Over {len(errors)} settings, the median of the absolute errors is {np.median(errors):.1f} %, the worst is "
        f"{errors.max():.1f} %, and {np.mean(errors <= 10):.0%} are within 10 %.",
        "measured = median over rounds of the slowest host's time. Each process measures the link, its kernels and its "
        "share of the processors once, after the rounds that warm up, and when buckets are ready in a case of its own "
        "without communication that runs in turns with the others. No step with communication enters the prediction.",
    )
    report.draw = partial(_draw, report)
    return report


def _add_rows(options: argparse.Namespace, report: Report, hosts: int, rate: str, result: dict[str, Any]) -> None:
    costs = Probe.from_dict(result["probe"]).costs
    for model in options.model:
        timeline = Timeline.from_dict(result["timelines"][model])
        for name, method in METHODS.items():
            seconds = np.array(result["seconds"][f"{model} {name}"])
            low, median, high = 1e3 * np.quantile(seconds, (0.1, 0.5, 0.9))
            made = predict(timeline, costs, hosts * options.ranks_per_host, method)
            error = 100 * (1e3 * made.step_s / median - 1)
            parts = (1e3 * made.compute_s, 1e3 * made.codec_s, 1e3 * made.wire_s)
            measured = (median, f"{low:.0f} to {high:.0f}", 1e3 * made.step_s, error)
            report.rows.append([model, name, hosts, rate, *measured, *parts])
            print(
                f"{model} {name}, {hosts} hosts, {rate}: {median:.0f} ms, predicted {1e3 * made.step_s:.0f}", flush=True
            )


def _draw(report: Report, file: Path) -> None:
    with drawn(file, figsize=(5.4, 4.6), layout="constrained") as figure:
        axes = figure.subplots()
        measured = np.array([row[4] for row in report.rows], float)
        predicted = np.array([row[6] for row in report.rows], float)
        ends = np.array([min(measured.min(), predicted.min()) / 1.3, max(measured.max(), predicted.max()) * 1.3])
        for band in reversed(BANDS):
            axes.fill_between(
                ends, ends * (1 - band), ends * (1 + band), color="#888888", alpha=0.15, lw=0, label=f"± {band:.0%}"
            )
        axes.plot(ends, ends, color="#888888", lw=0.8)
        for name in METHODS:
            for hosts, marker in ((2, "o"), (4, "^")):
                chosen = [n for n, row in enumerate(report.rows) if row[1] == name and row[2] == hosts]
                label = name if hosts == 2 else None
                axes.scatter(measured[chosen], predicted[chosen], s=22, marker=marker, color=COLOURS[name], label=label)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        axes.set(
            xlabel="measured step (ms)",
            ylabel="predicted step (ms)",
            title="Step time (circles: 2 hosts, triangles: 4)",
        )
        axes.legend()


if __name__ == "__main__":
    parser = command_line(__doc__)
    add_labs(parser)
    parser.set_defaults(hosts=[2, 4], rate=["50mbit", "200mbit", "1gbit", "none"])
    parser.add_argument("--model", nargs="+", choices=list(BATCH_SIZE), default=list(BATCH_SIZE))
    parser.add_argument("--seconds", type=float, default=25.0, help="of timed rounds per lab, about (default 25)")
    work_or_present(parser, work, measure)
