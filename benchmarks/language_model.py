"""A language model of 10.8 M parameters on four virtual workers: loss against bytes, and against predicted time.

    GQSGD_DATA=FOLDER python -m benchmarks.language_model --save

A decoder-only transformer predicts bytes of WikiText-2; without a folder with WikiText-2, the text is that of Python's
``help``. Every way starts from the same network and sees the same batches. The learning rate of each way is swept with
the first seed, and the best one is trained with all seeds. A training takes hours on two cores and all of them take
days: each training that is over is kept in ``--folder``, and the same command goes on with the next one. After
``--minutes``, no other training begins.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.report import Report, present
from benchmarks.virtual_characters import VirtualCharacters
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import counted
from lightning_gqsgd.local_steps.choosing import options_of, pop_options
from lightning_gqsgd.predict.costs import LATENCY_S, Link, estimated_costs
from lightning_gqsgd.predict.model import BF16, NATIVE, predict
from lightning_gqsgd.predict.timeline import Timeline, estimated
from lightning_gqsgd.presets import make_config
from lightning_gqsgd.reducers.base import ring_bytes
from lightning_gqsgd.research.optim import MuonAdamW
from lightning_gqsgd.research.simulation.local import Crowd, LocalWorkers
from lightning_gqsgd.research.simulation.shapes import Shaped
from lightning_gqsgd.research.simulation.virtual import VirtualRanks
from pictures.style import DPI, STYLE

WORKERS = 4
LAYERS, WIDTH = 6, 384
#: Steps between two averages of the local ways, and the share of steps whose averages leave the outer optimizer out.
EVERY, OUTER_SHARE = 32, 0.25
#: Steps in which learning rates warm up; they then fall to a tenth like a cosine.
WARMUP = 32
#: Links whose steps are predicted, and seconds of a worker's backward pass and of its forward pass.
LINKS = {"100 Mbit/s": 1.25e7, "1 Gbit/s": 1.25e8, "10 Gbit/s": 1.25e9}
BACKWARD_S = 0.1

ADAMW, MUON = (5e-4, 1e-3, 2e-3, 4e-3), (4e-3, 8e-3, 1.6e-2, 3.2e-2)


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        bits: of gradients, or of changes; 32 and 16 are sums of fp32 and bf16 numbers.
        preset: of local steps; None: gradients are averaged in every step.
        rates: learning rates that are tried.
    """

    bits: int
    preset: str | None = None
    rates: tuple[float, ...] = ADAMW


WAYS = {
    "ddp": Way(32),
    "ddp_bf16": Way(16),
    **{f"{bits} bit": Way(bits) for bits in (8, 4, 3, 2)},
    f"DiLoCo, H = {EVERY}, 4 bit": Way(4, "gqsgd_diloco"),
    f"MuLoCo, H = {EVERY}, 2 bit": Way(2, "gqsgd_muloco", MUON),
}


@dataclass(frozen=True)
class Run:
    """A training: the name of a way, a learning rate and a seed."""

    way: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Name in files."""
        return f"{self.way}, {self.rate:g}, seed {self.seed}".replace(" ", "_").replace("=", "").replace(",", "")


#: Steps between two lines on standard error.
SAY_EVERY = 100


class EveryStep:
    """Workers whose gradients are averaged in every step.

    Attributes:
        bytes_sent: bytes that each worker has sent.
    """

    def __init__(self, problem: VirtualCharacters, bits: int, seed: int, make: Callable[[list[Tensor]], Optimizer]):
        self._parameter = nn.Parameter(problem.start())
        self._bits = bits
        self._ranks = None
        if bits < 16:
            config = GQSGDConfig(bits=bits, seed=seed, sample_every=0)
            self._ranks = VirtualRanks(WORKERS, problem.segments, torch.float32, config)
        self.optimizer = make([self._parameter])
        self.bytes_sent = 0

    @property
    def x(self) -> Tensor:
        """The parameters, [d]."""
        return self._parameter.data

    def train(self, problem: VirtualCharacters, step: int) -> None:
        """Make a step."""
        gradients = problem.gradients(self.x, step, WORKERS)
        if self._ranks is not None:
            self._parameter.grad = self._ranks.mean(gradients.unbind(0), step)
            self.bytes_sent = self._ranks.bytes_sent
        else:
            dtype = torch.bfloat16 if self._bits == 16 else torch.float32
            self._parameter.grad = _sum_in(dtype, gradients / WORKERS)
            self.bytes_sent += ring_bytes(self.x.numel() * self._bits // 8, WORKERS)
        self.optimizer.step()


class Local:
    """Workers that train by themselves, and average their changes."""

    def __init__(self, problem: VirtualCharacters, way: Way, steps: int, seed: int, make: Any):
        given = pop_options({"local_steps": EVERY, "outer_after": round(OUTER_SHARE * steps)})
        options, compression = options_of(way.preset, given)
        config = make_config(compression, bits=way.bits, seed=seed, sample_every=0)
        made: list[Optimizer] = []

        def kept(flat: list[Tensor]) -> Optimizer:
            made.append(make(flat))
            return made[0]

        self._workers = LocalWorkers(problem, options, config, Crowd(WORKERS, seed=seed), kept)
        self.optimizer = made[0]

    @property
    def x(self) -> Tensor:
        """The anchors, [d]."""
        return self._workers.x

    @property
    def bytes_sent(self) -> int:
        """Bytes that each worker has sent."""
        return self._workers.bytes_sent

    def train(self, problem: VirtualCharacters, step: int) -> None:
        """Make a step of all workers."""
        self._workers.train(step)


def _sum_in(dtype: torch.dtype, parts: Tensor) -> Tensor:
    """Returns the sum of rows that a ring in this dtype makes, rounding after each addition."""
    total = parts[0].to(dtype)
    for part in parts[1:]:
        total = total + part.to(dtype)
    return total.float()


class Training:
    """One training.

    Attributes:
        step: steps that were made.
        curve: steps, megabytes that a worker has sent, and the validation loss.
    """

    def __init__(self, run: Run, options: argparse.Namespace) -> None:
        self._problem = VirtualCharacters(run.seed, options.layers, options.width, options.batch)
        self._rate, self._steps = run.rate, options.steps
        way = WAYS[run.way]
        make = self._muon if way.rates is MUON else self._adamw
        self._trainer: EveryStep | Local
        if way.preset is None:
            self._trainer = EveryStep(self._problem, way.bits, run.seed, make)
        else:
            self._trainer = Local(self._problem, way, options.steps, run.seed, make)
        self.step = 0
        self.curve: list[tuple[int, float, float]] = []
        self._book()

    def train(self, until: int, validate_every: int) -> None:
        """Make steps, with a validation after every so many of them; a loss that is not finite ends the training."""
        while self.step < min(until, self._steps):
            rate = self._rate * schedule(self.step, self._steps)
            for optimizer in getattr(self._trainer.optimizer, "optimizers", [self._trainer.optimizer]):
                for group in optimizer.param_groups:
                    group["lr"] = rate
            self._trainer.train(self._problem, self.step)
            self.step += 1
            if self.step % validate_every == 0 or self.step == self._steps:
                self._book()
                if not math.isfinite(self.curve[-1][2]):
                    self.step = self._steps

    @property
    def is_over(self) -> bool:
        """Returns whether all steps were made."""
        return self.step >= self._steps

    def _book(self) -> None:
        loss = self._problem.loss(self._trainer.x)
        self.curve.append((self.step, self._trainer.bytes_sent / 1e6, loss if math.isfinite(loss) else math.inf))

    def _adamw(self, flat: list[Tensor]) -> Optimizer:
        return torch.optim.AdamW(flat, lr=self._rate, weight_decay=0.1)

    def _muon(self, flat: list[Tensor]) -> Optimizer:
        return Shaped(flat, self._problem.shapes, self._muon_of)

    def _muon_of(self, parameters: list[nn.Parameter]) -> Optimizer:
        pairs = list(zip(parameters, self._problem.hidden, strict=True))
        matrices = [parameter for parameter, is_hidden in pairs if is_hidden]
        others = [parameter for parameter, is_hidden in pairs if not is_hidden]
        return MuonAdamW(matrices, others, lr=self._rate, betas=(0.9, 0.999))


def schedule(step: int, steps: int) -> float:
    """Returns the share of the highest learning rate."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP))


class Trainings:
    """All trainings of a folder.

    Args:
        options: the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._end = time.monotonic() + 60 * options.minutes
        self._folder = Path(options.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / "settings.json"
        settings = {name: getattr(options, name) for name in ("steps", "layers", "width", "batch", "validate_every")}
        if file.exists() and json.loads(file.read_text()) != settings:
            raise SystemExit(
                f"{self._folder} has trainings with {file.read_text()}, and {json.dumps(settings)} were asked for; "
                "give another --folder, or those settings"
            )
        file.write_text(json.dumps(settings))

    @property
    def is_late(self) -> bool:
        """Returns whether no further training is to begin."""
        return time.monotonic() > self._end

    def curve(self, run: Run) -> list[tuple[int, float, float]] | None:
        """Returns the curve of a training, which is made if it is not there; None: time is over before."""
        result = self._folder / f"{run.name}.json"
        if result.exists():
            return [(step, sent, loss) for step, sent, loss in json.loads(result.read_text())]
        if self.is_late:
            return None
        training = Training(run, self._options)
        while not training.is_over:
            training.train(training.step + SAY_EVERY, self._options.validate_every)
            print(f"{run.name}: {training.step} steps, loss {training.curve[-1][2]:.3f}", file=sys.stderr, flush=True)
        result.write_text(json.dumps(training.curve))
        return training.curve

    def best(self, way: str) -> tuple[float, list[list[tuple[int, float, float]]]] | None:
        """Returns the best learning rate of a way, and the curves of all seeds; None: some are not there yet."""
        tried = {rate: self.curve(Run(way, rate, 0)) for rate in WAYS[way].rates[: self._options.most_rates]}
        found = {rate: curve for rate, curve in tried.items() if curve is not None}
        if len(found) < len(tried):
            return None
        rate = min(found, key=lambda one: found[one][-1][2])
        seeds = [self.curve(Run(way, rate, seed)) for seed in range(self._options.seeds)]
        curves = [curve for curve in seeds if curve is not None]
        return (rate, curves) if len(curves) == len(seeds) else None


def step_seconds(way: Way, line: Timeline, bytes_per_s: float) -> float:
    """Returns the predicted seconds of a step on four workers, of local steps a mean over a round."""
    costs = estimated_costs("cpu", WORKERS, 1, Link(bytes_per_s, LATENCY_S))
    named: dict[int, GQSGDConfig | str] = {32: NATIVE, 16: BF16}
    method = named.get(way.bits) or GQSGDConfig(bits=way.bits, sample_every=0)
    if way.preset is None:
        return predict(line, costs, WORKERS, method).step_s
    return line.compute_s + predict(line.at_once(), costs, WORKERS, method).step_s / EVERY


def measure(options: argparse.Namespace) -> Report:
    """Train as far as time allows, and report the ways whose trainings are all over."""
    problem = VirtualCharacters(0, options.layers, options.width, options.batch)
    line = estimated(problem.network, BACKWARD_S)
    numel = line.numel
    report = Report(
        "language_model",
        f"A language model of {numel / 1e6:.1f} M parameters, {options.steps:,} steps, {WORKERS} virtual workers",
        {
            "way": "",
            "learning rate": "g",
            "sent (MB)": ".1f",
            "loss at the end": ".3f",
            "lowest": ".3f",
            "highest": ".3f",
            "less ddp's": "+.3f",
            **{f"hours at {link}": ".2f" for link in LINKS},
        },
    )
    trainings = Trainings(options)
    plain, missing = math.nan, []
    for name in options.way:
        best = trainings.best(name)
        if best is None:
            missing.append(name)
            continue
        rate, curves = best
        losses = [curve[-1][2] for curve in curves]
        plain = fmean(losses) if name == "ddp" else plain
        seconds = {link: step_seconds(WAYS[name], line, rate_of) for link, rate_of in LINKS.items()}
        hours = [options.steps * one / 3600 for one in seconds.values()]
        ends = (fmean(losses), min(losses), max(losses), fmean(losses) - plain)
        report.rows.append([name, rate, curves[0][-1][1], *ends, *hours])
        report.raw[name] = {"rate": rate, "curves": curves, "step_s": seconds}
    tried = [", ".join(f"{rate:g}" for rate in rates[: options.most_rates]) for rates in (ADAMW, MUON)]
    report.notes = (
        f"{problem.text}; {options.batch} windows of 64 bytes of each worker in a step; "
        f"{counted(options.seeds, 'seed')}. Loss: nats per byte of the validation text. Sent: bytes of each worker. "
        f"Learning rates were tried with the first seed: {tried[0]} with AdamW, and {tried[1]} with Muon inside of "
        "MuLoCo.",
        f"Hours are predicted, and not measured: steps of a worker with a backward pass of {1e3 * BACKWARD_S:.0f} ms "
        "on four hosts with the codec of a CPU, as `gqsgd advise` predicts them.",
        *([f"Not over yet: {', '.join(missing)}."] if missing else []),
    )
    if report.rows:
        report.draw = lambda file: _draw(report, file)
    return report


def _draw(report: Report, file: Path) -> None:
    """Loss against bytes, and against predicted time on each link: means over seeds."""
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 1 + len(LINKS), figsize=(4 * (1 + len(LINKS)), 3.6), sharey=True)
        for name, found in report.raw.items():
            curves = np.array(found["curves"])[:, 1:]  # a start has sent nothing
            steps, sent, loss = curves.mean(axis=0).T
            axes[0].plot(sent, loss, label=name)
            for axis, seconds in zip(axes[1:], found["step_s"].values(), strict=True):
                axis.plot(steps * seconds / 3600, loss)
        titles = ["bytes", *LINKS]
        labels = ["sent by a worker (MB)", *(["predicted time (h)"] * len(LINKS))]
        for axis, title, label in zip(axes, titles, labels, strict=True):
            axis.set(title=title, xlabel=label, xscale="log")
        axes[0].set_ylabel("validation loss (nats per byte)")
        figure.tight_layout()
        figure.legend(*axes[0].get_legend_handles_labels(), fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.savefig(file, dpi=DPI, bbox_inches="tight")
        plt.close(figure)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.language_model", description=__doc__.split("\n")[0])
    parser.add_argument("--folder", default="language_model", help="where trainings are kept (default language_model)")
    parser.add_argument("--way", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most-rates", type=int, default=len(ADAMW), help="learning rates that are tried")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--batch", type=int, default=8, help="windows of each worker in a step (default 8)")
    parser.add_argument("--validate-every", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no further step is made")
    present(parser, measure)


if __name__ == "__main__":
    main()
