"""Local steps on slow links: time to the loss that DDP reaches, bytes, and the loss at the end.

    GQSGD_DATA=FOLDER python -m benchmarks.local_steps --save

The benchmark needs Linux, root and iproute2, see `netlab`. Each case trains the same character transformer from the
same start on the same batches. Without a folder with WikiText-2, the text is that of Python's ``help``.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.hosts import add_labs, begin, finish, in_labs, work_or_present
from benchmarks.report import Report, command_line
from benchmarks.schedule import share_of_rate
from lightning_gqsgd import LocalSteps, register_gqsgd
from lightning_gqsgd.errors import counted
from lightning_gqsgd.reducers.base import ring_bytes
from lightning_gqsgd.wire.telemetry import Telemetry
from pictures.style import drawn
from workloads.characters import CharacterTransformer, load_texts, windows

#: What each case is: gradients averaged by DDP, by a hook, or arguments of `LocalSteps`.
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp_bf16": {},
    "gqsgd_4bit": {"preset": "gqsgd_4bit"},
    "diloco, H=16, 4 bits": {"every": 16, "preset": "gqsgd_4bit"},
    "diloco, H=32, 4 bits": {"every": 32, "preset": "gqsgd_4bit"},
    "diloco, H=128, 4 bits": {"every": 128, "preset": "gqsgd_4bit"},
    "diloco, H=16, 2 bits": {"every": 16, "preset": "gqsgd_2bit"},
    "diloco, H=32, 2 bits": {"every": 32, "preset": "gqsgd_2bit"},
    "diloco, H=32, 4 bits, 4 fragments, delay 4": {
        "every": 32,
        "preset": "gqsgd_4bit",
        "fragments": 4,
        "delay": 4,
    },
    "diloco, H=32, 4 bits, momentum from the start": {"every": 32, "preset": "gqsgd_4bit", "outer_after": 0},
    "fedpaq, H=16, 4 bits": {"every": 16, "preset": "gqsgd_4bit", "outer": "sgd"},
}
BATCH, LENGTH, VALIDATION_BATCHES = 4, 64, 4

#: Variable of the environment: seconds after which a worker stops a case.
LIMIT = "GQSGD_BENCHMARK_LIMIT_S"

#: Seconds after which all cases on a link are given up.
TIMEOUT_S = 3 * 3600.0
WARMUP = 16
#: Of AdamW, at its highest.
RATE_OF_LEARNING = 1e-3

#: Nats above ddp's last loss that count as that loss; the spread of seeds is larger.
TOLERANCE = 0.01


class Case:
    """A model that is trained in one way, from the same start in every case."""

    def __init__(self, name: str, seed: int, options: argparse.Namespace) -> None:
        torch.manual_seed(seed)
        self.network = CharacterTransformer(LENGTH)
        self.model: nn.Module = self.network
        self.numel = sum(parameter.numel() for parameter in self.network.parameters())
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=RATE_OF_LEARNING, weight_decay=0.1)
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
            self.bytes_per_value = 4
            if name == "ddp_bf16":
                wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
                self.bytes_per_value = 2
            self.model = wrapped
            if CASES[name]:
                state = register_gqsgd(wrapped, sample_every=0, **CASES[name])
                self.telemetry, self.close = state.telemetry, state.close
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: share_of_rate(step, options.steps, WARMUP)
        )
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
        return self.steps * ring_bytes(self.bytes_per_value * self.numel, ranks)

    @torch.no_grad()
    def loss(self, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Mean validation loss in nats per character."""
        losses = [F.cross_entropy(self.network(x).flatten(0, 1), y.flatten()) for x, y in batches]
        return float(torch.stack(losses).mean())


def train(name: str, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train one case; its seconds are those of training steps, without validation."""
    texts = load_texts()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    validation = torch.Generator().manual_seed(1)
    batches = [windows(texts.valid, 32, LENGTH, validation) for _ in range(VALIDATION_BATCHES)]
    own = torch.Generator().manual_seed(1000 * seed + rank)
    case = Case(name, seed, options)
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
        "curve": [(round(second, 3), round(loss, 4)) for second, loss in curve],
        "share": case.steps / options.steps,
        "bytes": case.sent_bytes(ranks),
        "waited": None if case.telemetry is None else case.telemetry.totals()["exposed_s"],
        "numel": case.numel,
        "text": texts.name,
    }
    case.close()
    if rank == 0:
        print(f"{name}, seed {seed}: {case.steps} steps in {seconds:.0f} s, loss {curve[-1][1]:.3f}", file=sys.stderr)
    return result


def work(options: argparse.Namespace) -> None:
    """Do one rank's part."""
    begin()
    for name in CASES:  # kernels are compiled before anything is timed
        Case(name, 0, options).close()
    seeds = options.seeds if math.isinf(float(os.environ[LIMIT])) else 1  # times hardly depend on the seed
    finish({name: [train(name, options, seed) for seed in range(seeds)] for name in options.case})


def measure(options: argparse.Namespace) -> Report:
    """Run the workers in every lab."""
    hosts = options.hosts[0]
    report = Report(
        "local_steps" if hosts == 2 else f"local_steps_{hosts}_hosts",
        f"Local steps: {options.steps:,} steps of a character transformer on {hosts} hosts",
        {
            "case": "",
            "rate": "",
            "sent (MB)": ".2f",
            "training (s)": ".0f",
            "waiting (%)": ".1f",
            "loss at the end": "",
            "less ddp's": "",
            "to ddp's loss (s)": ".0f",
            "ddp / that": ".1f",
        },
    )
    rates = options.rate
    for number, rate in enumerate(rates):
        os.environ[LIMIT] = str(options.most_seconds if number else math.inf)
        options.rate = [rate]
        in_labs(options, report, _add_rows, timeout=TIMEOUT_S)
    _fill_in(report, options)
    report.draw = lambda file: _draw(report, file)
    return report


def _add_rows(report: Report, hosts: int, rate: str, result: dict[str, Any]) -> None:
    report.rows.append([rate])  # `_fill_in` makes the rows when all rates are there


def _fill_in(report: Report, options: argparse.Namespace) -> None:
    """Make the rows of all rates.

    On later links, a case has the losses that it has on the first one, because results do not depend on the link, and
    seconds that go on as they were on average where the case was stopped.
    """
    report.rows.clear()
    first = next(iter(report.raw.values()))
    for where, result in report.raw.items():
        for name, runs in result.items():
            result[name] = seeds = [{**runs[min(n, len(runs) - 1)]} for n in range(options.seeds)]
            for run, whole in zip(seeds, first[name], strict=True):
                run["losses"] = [loss for _, loss in whole["curve"]]
                last, count = run["curve"][-1][0] / run["share"], len(run["losses"]) - 1
                spread = [round(last * number / count, 3) for number in range(count + 1)]
                run["seconds"] = [second for second, _ in run["curve"]] if run["share"] == 1 else spread
        rate = where.partition(", ")[2]
        report.rows += [_row(name, rate, seeds, result.get("ddp")) for name, seeds in result.items()]
    some = next(iter(first.values()))[0]
    report.notes = (
        f"{some['text']}; {some['numel']:,} parameters, AdamW, {BATCH} windows of {LENGTH} bytes per host and step; "
        f"means over {counted(options.seeds, 'seed')}, with standard deviations. Loss: nats per byte on "
        f"{VALIDATION_BATCHES} x 32 windows of the validation text, every {options.validate_every} steps, after the "
        "last average at the end. Less ddp's: the difference from ddp's loss with the same seed. To ddp's loss: the "
        "training seconds of the first validation whose loss, as a mean over seeds, is at most "
        f"{TOLERANCE} above ddp's last one; a dash: never. Waiting: the share of the seconds in which a step waited "
        "for codes or an average. Sent: bytes that each host sends.",
        "On links after the first, only the first seed is timed; losses are those of the first link, because results "
        f"do not depend on the link. \\* stopped after {options.most_seconds:.0f} s or the next validation; its "
        "seconds are extrapolated from the mean step.",
    )


def _row(name: str, rate: str, seeds: list[dict[str, Any]], plain: list[dict[str, Any]] | None) -> list[Any]:
    """A case's row of the table, from its runs with all seeds and those of ddp, if ddp is measured at all."""
    ends = np.array([run["losses"][-1] for run in seeds])
    waited = [100 * run["waited"] / run["curve"][-1][0] for run in seeds if run["waited"] is not None]
    row = [
        name if seeds[0]["share"] == 1 else f"{name} *",
        rate,
        np.mean([run["bytes"] / run["share"] for run in seeds]) / 1e6,
        _mean_of(seeds, "seconds")[-1],
        np.mean(waited) if waited else None,
        _with_spread(ends, ".3f"),
    ]
    if plain is None:
        return [*row, None, None, None]
    target = np.array([run["losses"][-1] for run in plain])
    second, slowest = (_time_to(target.mean() + TOLERANCE, of) for of in (seeds, plain))
    ratio = None if second is None or slowest is None else slowest / second
    return [*row, _with_spread(ends - target, "+.3f"), second, ratio]


def _time_to(loss: float, seeds: list[dict[str, Any]]) -> float | None:
    """Seconds until the mean over seeds is at a loss; None: never."""
    reached = np.flatnonzero(_mean_of(seeds, "losses") <= loss)
    return float(_mean_of(seeds, "seconds")[reached[0]]) if len(reached) else None


def _mean_of(seeds: list[dict[str, Any]], key: str) -> Any:
    return np.mean([run[key] for run in seeds], axis=0)


def _with_spread(values: Any, form: str) -> str:
    """Mean and standard deviation; the mean alone where there is one value."""
    return f"{values.mean():{form}}" + (f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else "")


def _draw(report: Report, file: Path) -> None:
    """Loss against seconds as means over seeds, one picture for each rate."""
    from matplotlib.ticker import LogLocator, NullFormatter

    with drawn(file, crop="tight", figsize=(5 * len(report.raw), 3.6)) as figure:
        axes = figure.subplots(1, len(report.raw), squeeze=False)
        for axis, (where, result) in zip(axes[0], report.raw.items(), strict=True):
            for name, seeds in result.items():
                seconds, losses = _mean_of(seeds, "seconds")[1:], _mean_of(seeds, "losses")[1:]
                line = "--" if "every" in CASES[name] else "-"  # there are fewer colours than cases
                axis.plot(seconds, losses, line, label=name, marker=".", markersize=3)
            axis.set_title(where)
            axis.set_xscale("log")
            # The default writes 2 x 10^0, 3 x 10^0 and so on over each other where there are less than two decades.
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.set_xlabel("training (s)")
        axes[0][0].set_ylabel("validation loss (nats per byte)")
        # Beside the curves: there is no corner that none of them crosses.
        handles, labels = axes[0][-1].get_legend_handles_labels()
        figure.tight_layout()
        figure.legend(handles, labels, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


if __name__ == "__main__":
    parser = command_line(__doc__)
    add_labs(parser)
    parser.set_defaults(rate=["none", "100mbit", "10mbit"])
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=1024, help="of each case (default 1,024)")
    parser.add_argument("--validate-every", type=int, default=32, help="steps between two validations (default 32)")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--most-seconds", type=float, default=60.0, help="per case, but on the first link (default 60)")
    options, _ = parser.parse_known_args()
    if len(options.hosts) > 1:
        parser.error(f"--hosts takes one number here, not {' '.join(map(str, options.hosts))}: run it once for each")
    if options.steps < 1 or options.validate_every < 1 or options.steps % options.validate_every:
        limit = f"--validate-every {options.validate_every}"
        parser.error(f"--steps {options.steps} has to be a positive multiple of {limit}")
    work_or_present(parser, work, measure)
