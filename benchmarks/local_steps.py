"""Local steps on slow links: time to the loss that DDP reaches, bytes, and the loss at the end.

    GQSGD_DATA=FOLDER python -m benchmarks.local_steps --save

The benchmark needs Linux, root and iproute2, see `netlab`. Each case trains the same character transformer from the
same start on the same batches. Without a folder with WikiText-2, the text is that of Python's ``help``.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.hosts import add_labs, begin, finish, in_labs, work_or_present
from benchmarks.report import Report
from lightning_gqsgd import LocalSteps, register_gqsgd
from lightning_gqsgd.errors import counted
from lightning_gqsgd.reducers.base import ring_bytes
from lightning_gqsgd.telemetry import Telemetry
from pictures.style import DPI, STYLE
from workloads.characters import CharacterTransformer, load_texts, windows

PROGRAM = "python -m benchmarks.local_steps"

#: What each case is: gradients averaged by DDP, by the hook, or arguments of `LocalSteps`.
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "gqsgd_4bit": {"preset": "gqsgd_4bit"},
    "diloco, H=16, 4 bits": {"every": 16, "preset": "gqsgd_4bit"},
    "diloco, H=32, 4 bits": {"every": 32, "preset": "gqsgd_4bit"},
    "diloco, H=16, 2 bits": {"every": 16, "preset": "gqsgd_2bit"},
    "diloco, H=32, 2 bits": {"every": 32, "preset": "gqsgd_2bit"},
    "diloco, H=32, 4 bits, 4 fragments, delay 4": {
        "every": 32,
        "preset": "gqsgd_4bit",
        "fragments": 4,
        "delay": 4,
    },
    "fedpaq, H=16, 4 bits": {"every": 16, "preset": "gqsgd_4bit", "outer": "sgd"},
}
BATCH, LENGTH, VALIDATION_BATCHES = 4, 64, 2

#: Variable of the environment: seconds after which a worker stops a case.
LIMIT = "GQSGD_BENCHMARK_LIMIT_S"
WARMUP = 16


class Case:
    """A model that is trained in one way, from the same start in every case."""

    def __init__(self, name: str, seed: int, steps: int, learning_rate: float) -> None:
        torch.manual_seed(seed)
        self.network = CharacterTransformer(LENGTH)
        self.model: nn.Module = self.network
        self.numel = sum(parameter.numel() for parameter in self.network.parameters())
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=learning_rate, weight_decay=0.1)
        self.optimizer: Any = optimizer
        self.telemetry: Telemetry | None = None
        self.close: Callable[[], None] = lambda: None
        self.settle: Callable[[], None] = lambda: None
        if "every" in CASES[name]:
            self.optimizer = LocalSteps(self.network, optimizer, sample_every=0, **CASES[name])
            self.telemetry, self.close = self.optimizer.telemetry, self.optimizer.close
            self.settle = self.optimizer.finish
        else:
            wrapped = DistributedDataParallel(self.network)
            self.model = wrapped
            if CASES[name]:
                state = register_gqsgd(wrapped, sample_every=0, **CASES[name])
                self.telemetry, self.close = state.telemetry, state.close
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, steps))
        self.steps = 0

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Make one step."""
        inputs, targets = batch
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.steps += 1

    def sent_bytes(self, ranks: int) -> float:
        """Bytes that each rank has sent."""
        if self.telemetry is not None:
            return self.telemetry.totals()["bytes_sent"]
        return self.steps * ring_bytes(4 * self.numel, ranks)

    @torch.no_grad()
    def loss(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Mean validation loss in nats per character."""
        losses = [F.cross_entropy(self.network(x).flatten(0, 1), y.flatten()) for x, y in batches]
        return float(torch.stack(losses).mean())


def _schedule(step: int, steps: int) -> float:
    """Warm-up, then a cosine down to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP))


def train(name: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train one case; seconds are those of training steps without the first two, which compile and build buckets."""
    texts = load_texts()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    validation = torch.Generator().manual_seed(1)
    batches = [windows(texts.valid, 32, LENGTH, validation) for _ in range(VALIDATION_BATCHES)]
    own = torch.Generator().manual_seed(1000 * seed + rank)
    case = Case(name, seed, options.steps, options.learning_rate)
    curve, seconds = [(0.0, case.loss(batches))], 0.0
    while case.steps < options.steps:
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(options.validate_every):
            case.step(windows(texts.train, BATCH, LENGTH, own))
        if case.steps == options.steps:
            case.settle()
        seconds += time.perf_counter() - begun
        curve.append((seconds, case.loss(batches)))
        stop = torch.tensor([float(seconds > float(os.environ[LIMIT]))])
        dist.broadcast(stop, 0)
        if stop.item():
            break
    result = {
        "curve": curve,
        "steps": case.steps,
        "bytes": case.sent_bytes(ranks),
        "waited": 0.0 if case.telemetry is None else case.telemetry.totals()["exposed_s"],
        "numel": case.numel,
        "text": texts.name,
    }
    case.close()
    return result


def work(options: argparse.Namespace) -> None:
    """Do one rank's part."""
    begin()
    for name in CASES:  # kernels are compiled before anything is timed
        Case(name, 0, options.steps, options.learning_rate).close()
    finish({name: [train(name, options, seed) for seed in range(options.seeds)] for name in options.case})


def measure(options: argparse.Namespace) -> Report:
    """Run the workers in every lab."""
    report = Report(
        "local_steps",
        f"Local steps: {options.steps} steps of a character transformer on two hosts",
        {
            "case": "",
            "rate": "",
            "sent (MB)": ".2f",
            "training (s)": ".0f",
            "loss at the end": ".3f",
            "to ddp's loss (s)": ".0f",
            "ddp / that": ".1f",
        },
    )
    rates = options.rate
    for number, rate in enumerate(rates):
        os.environ[LIMIT] = str(options.most_seconds if number else math.inf)
        options.rate = [rate]
        in_labs(options, PROGRAM, report, _add_rows)
    _fill_in(report, options)
    report.draw = lambda file: _draw(report, file)
    return report


def _add_rows(report: Report, hosts: int, rate: str, result: dict[str, Any]) -> None:
    report.rows.append([rate])  # `_fill_in` makes the rows when all rates are there


def _fill_in(report: Report, options: argparse.Namespace) -> None:
    """Make the rows of all rates.

    A case that was stopped for its time has, step by step, the losses of the same case on a faster link: results do not
    depend on the link. Its seconds go on as they were on average.
    """
    report.rows.clear()
    runs = list(report.raw.items())
    whole = {
        (name, seed): run["curve"]
        for _, result in runs
        for name, seeds in result.items()
        for seed, run in enumerate(seeds)
        if run["steps"] == options.steps
    }
    text = numel = None
    for where, result in runs:
        rate = where.partition(", ")[2]
        curves: dict[str, list[list[tuple[float, float]]]] = {}
        for name, seeds in result.items():
            for seed, run in enumerate(seeds):
                text, numel = run["text"], run["numel"]
                share = run["steps"] / options.steps
                losses = [loss for _, loss in whole.get((name, seed), run["curve"])]
                total = run["curve"][-1][0] / share
                spread = [total * number / (len(losses) - 1) for number in range(len(losses))]
                measured = [second for second, _ in run["curve"]] if share == 1 else spread
                run["extrapolated"], run["seconds"] = share < 1, measured
                run["losses"], run["sent"] = losses, run["bytes"] / share
                curves.setdefault(name, []).append(list(zip(measured, losses, strict=True)))
        plain = curves.get("ddp", [])
        for name, seeds in result.items():
            reached = [_time_to(curve, ddp[-1][1]) for curve, ddp in zip(curves[name], plain, strict=False)]
            ratios = [ddp[-1][0] / second for second, ddp in zip(reached, plain, strict=False) if second]
            shown = [second for second in reached if second]
            report.rows.append(
                [
                    f"{name} *" if seeds[0]["extrapolated"] else name,
                    rate,
                    _mean([run["sent"] for run in seeds]) / 1e6,
                    _mean([curve[-1][0] for curve in curves[name]]),
                    _mean([curve[-1][1] for curve in curves[name]]),
                    _mean(shown) if len(shown) == len(seeds) else None,
                    _mean(ratios) if len(ratios) == len(seeds) else None,
                ]
            )
    report.notes = (
        f"{text}; {numel:,} parameters, AdamW, {BATCH} windows of {LENGTH} bytes per host and step; means over "
        f"{counted(options.seeds, 'seed')}. Loss: nats per byte on {VALIDATION_BATCHES} x 32 windows of the validation "
        f"text, every {options.validate_every} steps, after the last average at the end. To ddp's loss: the training "
        "seconds of the first validation that is not above ddp's last one; a dash: never. Sent: bytes that each host "
        "sends.",
        f"\\* stopped after {options.most_seconds:.0f} s or the next validation; its seconds are extrapolated from its "
        "mean step, and its losses are those of the same run on the first link, because results do not depend on the "
        "link.",
    )


def _time_to(curve: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Seconds until a loss is reached; None: never."""
    return next((second for second, value in curve if value <= loss), None)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _draw(report: Report, file: Path) -> None:
    """Loss against seconds, one picture for each rate."""
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(report.raw), figsize=(5 * len(report.raw), 3.6), squeeze=False)
        for axis, (where, result) in zip(axes[0], report.raw.items(), strict=True):
            for name, seeds in result.items():
                axis.plot(seeds[0]["seconds"][1:], seeds[0]["losses"][1:], label=name, marker=".", markersize=3)
            axis.set_title(where)
            axis.set_xscale("log")
            axis.set_xlabel("training (s)")
        axes[0][0].set_ylabel("validation loss (nats per byte)")
        # Beside the curves: there is no corner that none of them crosses.
        handles, labels = axes[0][-1].get_legend_handles_labels()
        figure.tight_layout()
        figure.legend(handles, labels, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(file, dpi=DPI, bbox_inches="tight")
        plt.close(figure)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__.split("\n")[0])
    add_labs(parser)
    parser.set_defaults(rate=["100mbit", "10mbit"])
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=288)
    parser.add_argument("--validate-every", type=int, default=32, help="steps between two validations (default 32)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of AdamW at its highest (default 1e-3)")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--most-seconds", type=float, default=60.0, help="per case, but on the first link (default 60)")
    work_or_present(parser, work, measure)


if __name__ == "__main__":
    main()
