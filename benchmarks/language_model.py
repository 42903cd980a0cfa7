"""A language model of 10.8 M parameters on four virtual workers: loss against bytes, and against predicted time.

    GQSGD_DATA=FOLDER python -m benchmarks.language_model --save
    python -m benchmarks.language_model --device cuda --sweep-steps 250 --minutes 8 --save

A decoder-only transformer predicts bytes of WikiText-2; without a folder with WikiText-2, the text is that of Python's
``help``. Every way starts from the same network and sees the same batches. The learning rate of each way is swept with
the first seed, in trainings of ``--sweep-steps``. Short trainings may prefer higher rates than long ones do, so the
best ``--whole-rates`` of them are also trained in full. The rate that is best then is trained with all seeds: the first
seed of all ways, then the second one, and so on. A training takes hours on two cores and all of them take days: each
training that is over is kept in ``--folder``, and the same command goes on with the next one. After ``--minutes``, no
other training begins, and the table has the seeds that are there.

With ``--device cuda`` or ``--at-once``, all workers compute their gradients in one pass, in bf16, and codes are made by
the kernels of the device. How long trainings will take, by their floating-point operations and by those that are over,
goes to standard error.
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
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.batched_characters import BatchedCharacters
from benchmarks.kept import kept
from benchmarks.report import Report, command_line, gpu_machine, listed, present
from benchmarks.schedule import share_of_rate
from benchmarks.virtual_characters import LENGTH, VirtualCharacters
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.kernels.layout import Segment
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
from pictures.style import drawn

WORKERS = 4
LAYERS, WIDTH = 6, 384
#: Steps between two averages of the local ways, and the share of steps whose averages leave the outer optimizer out.
EVERY, OUTER_SHARE = 32, 0.25
#: Steps in which learning rates warm up; they then fall to a tenth like a cosine.
WARMUP = 32
#: Links whose steps are predicted, and seconds of a worker's backward pass and of its forward pass.
LINKS = {"100 Mbit/s": 1.25e7, "1 Gbit/s": 1.25e8, "10 Gbit/s": 1.25e9}
BACKWARD_S = 0.1

#: Learning rates that are tried, the likeliest ones first.
ADAMW, MUON = (5e-4, 1e-3, 2e-3, 2.5e-4), (4e-3, 8e-3, 1.6e-2, 3.2e-2)


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
    "ddp, Muon": Way(32, rates=MUON),
    f"MuLoCo, H = {EVERY}, 2 bit": Way(2, "gqsgd_muloco", MUON),
}


@dataclass(frozen=True)
class Run:
    """A training: the name of a way, a learning rate, a seed, and steps other than those that the table is about."""

    way: str
    rate: float
    seed: int
    fewer_steps: int | None = None

    @property
    def name(self) -> str:
        """Name in files."""
        steps = "" if self.fewer_steps is None else f", {self.fewer_steps} steps"
        return f"{self.way}, {self.rate:g}, seed {self.seed}{steps}".replace(" ", "_").replace("=", "").replace(",", "")


#: Steps between two lines on standard error.
SAY_EVERY = 100


class Gradients(Protocol):
    """A problem of virtual workers, as far as `EveryStep` needs it; see `VirtualCharacters`."""

    segments: list[Segment]

    def start(self) -> Tensor:
        """Returns the parameters at the start, [d]."""
        ...

    def gradients(self, x: Tensor, step: int, workers: int) -> Tensor:
        """Returns each worker's gradient in a step at a point [d], [workers, d]."""
        ...


class EveryStep:
    """Workers whose gradients are averaged in every step.

    Attributes:
        bytes_sent: bytes that each worker has sent.
    """

    def __init__(self, problem: Gradients, bits: int, seed: int, make: Callable[[list[Tensor]], Optimizer]):
        self._parameter = nn.Parameter(problem.start())
        self._bits = bits
        self._ranks = None
        if bits < 16:
            config = GQSGDConfig(bits=bits, seed=seed, sample_every=0)
            self._ranks = VirtualRanks(WORKERS, problem.segments, torch.float32, config, device=self.x.device)
        self.optimizer = make([self._parameter])
        self.bytes_sent = 0

    @property
    def x(self) -> Tensor:
        """The parameters, [d]."""
        return self._parameter.data

    def train(self, problem: Gradients, step: int) -> None:
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
        self._problem = problem_of(options, run.seed)
        self._rate = run.rate
        self._steps = run.fewer_steps or options.steps
        way = WAYS[run.way]
        make = self._muon if way.rates is MUON else self._adamw
        self._trainer: EveryStep | Local
        if way.preset is None:
            self._trainer = EveryStep(self._problem, way.bits, run.seed, make)
        else:
            self._trainer = Local(self._problem, way, self._steps, run.seed, make)
        self.step = 0
        self.curve: list[tuple[int, float, float]] = []
        self._book()

    def train(self, until: int, validate_every: int) -> None:
        """Make steps, with a validation after every so many of them; a loss that is not finite ends the training."""
        while self.step < min(until, self._steps):
            rate = self._rate * share_of_rate(self.step, self._steps, WARMUP)
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
        return MuonAdamW(*self._problem.divided(parameters), lr=self._rate, betas=(0.9, 0.999))


def problem_of(options: argparse.Namespace, seed: int) -> VirtualCharacters:
    """Returns the problem of a seed, on the device of the command line."""
    sizes = (seed, options.layers, options.width, options.batch)
    if options.device == "cpu" and not options.at_once:
        return VirtualCharacters(*sizes)
    return BatchedCharacters(torch.device(options.device), *sizes)


#: Floating-point operations in a second that small matrices leave of a device, and seconds of a step that a GPU waits
#: for the host: guesses, until the first training is over.
SPEEDS = {"cpu": (2e10, 0.0), "cuda": (1e14, 0.015)}


class Pace:
    """What trainings take, and have taken.

    Args:
        device: "cpu" or "cuda".
        numel: number of parameters.
        batch: windows of a worker in a step.
    """

    def __init__(self, device: str, numel: int, batch: int) -> None:
        per_second, least = SPEEDS[device]
        # Two operations for each parameter and character forward, and four backward.
        self.operations = 6 * numel * batch * LENGTH * WORKERS
        self._seconds = max(least, self.operations / per_second)
        self._steps = 0

    def minutes(self, steps: int) -> float:
        """Returns the minutes that so many steps will take."""
        return steps * self._seconds / 60

    def took(self, steps: int, seconds: float) -> None:
        """Learn from a training that is over."""
        known = self._seconds * self._steps
        self._steps += steps
        self._seconds = (known + seconds) / self._steps


class Trainings:
    """All trainings of a folder.

    Args:
        options: the command line.

    Attributes:
        whole: losses at the end of whole trainings with the first seed, by way and learning rate, where several rates
            were to be trained to the end.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.whole: dict[str, dict[float, float]] = {}
        self._end = time.monotonic() + 60 * options.minutes
        self._folder = Path(options.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / "settings.json"
        problem = problem_of(options, 0)
        settings = {name: getattr(options, name) for name in ("steps", "layers", "width", "batch", "validate_every")}
        settings["text"] = problem.text
        if options.at_once or options.device != "cpu":
            settings["at_once"] = True
        if file.exists() and json.loads(file.read_text()) != settings:
            raise SystemExit(
                f"{self._folder} has trainings with {file.read_text()}, and {json.dumps(settings)} were asked for; "
                "give another --folder, or those settings"
            )
        file.write_text(json.dumps(settings))
        self._pace = Pace(options.device, problem.start().numel(), options.batch)
        self._left = self._all_steps()
        self._say()

    def curve(self, run: Run) -> list[tuple[int, float, float]] | None:
        """Returns the curve of a training, which is made if it is not there; None: time is over before."""
        curve = kept(self._file(run), self._end, lambda: self._made(run))
        return None if curve is None else [(step, sent, loss) for step, sent, loss in curve]

    def _made(self, run: Run) -> list[tuple[int, float, float]]:
        begun = time.monotonic()
        training = Training(run, self._options)
        while not training.is_over:
            training.train(training.step + SAY_EVERY, self._options.validate_every)
            print(f"{run.name}: {training.step} steps, loss {training.curve[-1][2]:.3f}", file=sys.stderr, flush=True)
        self._pace.took(training.step, time.monotonic() - begun)
        self._left -= training.step
        self._say()
        return training.curve

    def best_rate(self, way: str) -> float | None:
        """Returns the best learning rate of a way with the first seed; None: some were not tried yet.

        Short trainings may prefer other rates than whole ones do, so whole trainings of the best rates decide, as far
        as there was time for them.
        """
        tried = {rate: self.curve(Run(way, rate, 0, self._options.sweep_steps)) for rate in self._rates(way)}
        ends = {rate: curve[-1][2] for rate, curve in tried.items() if curve is not None}
        if len(ends) < len(tried):
            return None
        best = sorted(ends, key=lambda rate: ends[rate])[: self._options.whole_rates]
        if len(best) == 1:
            return best[0]
        whole = {rate: self.curve(Run(way, rate, 0)) for rate in best}
        self.whole[way] = {rate: curve[-1][2] for rate, curve in whole.items() if curve is not None}
        return min(self.whole[way], key=lambda rate: self.whole[way][rate], default=best[0])

    def _rates(self, way: str) -> tuple[float, ...]:
        return WAYS[way].rates[: self._options.most_rates]

    def _all_steps(self) -> int:
        """Returns the steps of all trainings that are not over, at most."""
        options = self._options
        steps = 0
        for way in options.way:
            rates = self._rates(way)
            swept = [self._file(Run(way, rate, 0, options.sweep_steps)).exists() for rate in rates]
            steps += swept.count(False) * (options.sweep_steps or options.steps)
            # Without a length of its own, the sweep has trained the first seed.
            for seed in range(0 if options.sweep_steps else 1, options.seeds):
                over = sum(self._file(Run(way, rate, seed)).exists() for rate in rates)
                due = 1 if seed else min(options.whole_rates, len(rates))
                steps += max(0, due - over) * options.steps
        return steps

    def _say(self) -> None:
        minutes = self._pace.minutes(self._left)
        print(
            f"up to {self._left:,} steps of {self._pace.operations:.2g} floating-point operations are left, about "
            f"{minutes:.1f} min",
            file=sys.stderr,
            flush=True,
        )

    def _file(self, run: Run) -> Path:
        return self._folder / f"{run.name}.json"


def step_seconds(way: Way, line: Timeline, bytes_per_s: float) -> float:
    """Returns the predicted seconds of a step on four workers, of local steps a mean over a round."""
    costs = estimated_costs("cpu", WORKERS, 1, Link(bytes_per_s, LATENCY_S))
    named: dict[int, GQSGDConfig | str] = {32: NATIVE, 16: BF16}
    method = named.get(way.bits) or GQSGDConfig(bits=way.bits, sample_every=0)
    if way.preset is None:
        return predict(line, costs, WORKERS, method).step_s
    return line.compute_s + predict(line.at_once(), costs, WORKERS, method).step_s / EVERY


def measure(options: argparse.Namespace) -> Report:
    """Train as far as time allows, and report the trainings that are over."""
    problem = VirtualCharacters(0, options.layers, options.width, options.batch)
    line = estimated(problem.network, BACKWARD_S)
    numel = line.numel
    report = Report(
        "language_model",
        f"A language model of {numel / 1e6:.1f} M parameters, {options.steps:,} steps, {WORKERS} virtual workers",
        {
            "way": "",
            "learning rate": "g",
            "seeds": "d",
            "sent (MB)": ".1f",
            "loss at the end": ".3f",
            "lowest": ".3f",
            "highest": ".3f",
            "less ddp's": "+.3f",
            **{f"minutes at {link}": ".1f" for link in LINKS},
        },
    )
    trainings = Trainings(options)
    rates, found = trained(trainings, options)
    missing = [name for name in options.way if len(found[name]) < options.seeds]
    for name, curves in found.items():
        if not curves:
            continue
        losses = [curve[-1][2] for curve in curves]
        # Of the seeds that both have.
        pairs = zip(losses, (curve[-1][2] for curve in found.get("ddp", ())), strict=False)
        less = [loss - plain for loss, plain in pairs]
        seconds = {link: step_seconds(WAYS[name], line, rate_of) for link, rate_of in LINKS.items()}
        minutes = [options.steps * one / 60 for one in seconds.values()]
        ends = (fmean(losses), min(losses), max(losses), fmean(less) if less else math.nan)
        report.rows.append([name, rates[name], len(losses), curves[0][-1][1], *ends, *minutes])
        report.raw[name] = {"rate": rates[name], "curves": curves, "step_s": seconds}
    others = [
        f"{name} with {rate:g}: {loss:.3f}"
        for name, whole in trainings.whole.items()
        for rate, loss in whole.items()
        if rate != rates[name]
    ]
    tried = [listed(some[: options.most_rates]) for some in (ADAMW, MUON)]
    swept = f", in trainings of {options.sweep_steps} steps" if options.sweep_steps else ""
    report.notes = (
        f"{problem.text}; {options.batch} windows of {LENGTH} bytes of each worker in a step. Loss: nats per byte of "
        "the validation text. Sent: bytes of each worker. "
        f"Learning rates were tried with the first seed{swept}: {tried[0]} with AdamW, and {tried[1]} with Muon.",
        f"Minutes are predicted, and not measured: steps of a worker with a backward pass of {1e3 * BACKWARD_S:.0f} ms "
        "on four hosts with the codec of a CPU, as `gqsgd advise` predicts them. What Muon computes in a step, beyond "
        "what AdamW does, is not in them. Kept trainings may have run on other processors than the one above.",
        *([f"Also trained with the first seed: {'; '.join(others)}."] if others else []),
        *([f"Not over yet: {', '.join(missing)}."] if missing else []),
    )
    if report.rows:
        report.draw = lambda file: _draw(report, file)
    if options.device == "cuda":
        report.machine = gpu_machine(torch.device("cuda"))
    return report


def trained(
    trainings: Trainings, options: argparse.Namespace
) -> tuple[dict[str, float], dict[str, list[list[tuple[int, float, float]]]]]:
    """Returns the best learning rate of ways, and the curves of the seeds that there was time for, by way.

    All rates come first, then one seed of all ways after the other: wherever time is over, ways can be compared.
    """
    tried = {name: trainings.best_rate(name) for name in options.way}
    rates = {name: rate for name, rate in tried.items() if rate is not None}
    found: dict[str, list[list[tuple[int, float, float]]]] = {name: [] for name in options.way}
    for seed in range(options.seeds):
        for name, rate in rates.items():
            curve = trainings.curve(Run(name, rate, seed))
            if curve is not None:
                found[name].append(curve)
    return rates, found


def _draw(report: Report, file: Path) -> None:
    """Loss against bytes, and against predicted time on each link: means over seeds."""
    from matplotlib.ticker import LogLocator, NullFormatter

    panels = 1 + len(LINKS)
    with drawn(file, crop="tight", figsize=(4 * panels, 3.6), layout="tight") as figure:
        axes = figure.subplots(1, panels, sharey=True)
        for name, found in report.raw.items():
            # A start has sent nothing, and a seed that has diverged has fewer points.
            shortest = min(map(len, found["curves"]))
            curves = np.array([curve[1:shortest] for curve in found["curves"]])
            steps, sent, loss = curves.mean(axis=0).T
            axes[0].plot(sent, loss, label=name)
            for axis, seconds in zip(axes[1:], found["step_s"].values(), strict=True):
                axis.plot(steps * seconds / 60, loss)
        titles = ["bytes", *LINKS]
        labels = ["sent by a worker (MB)", *(["predicted time (min)"] * len(LINKS))]
        for axis, title, label in zip(axes, titles, labels, strict=True):
            axis.set(title=title, xlabel=label, xscale="log")
            low, high = axis.get_xlim()
            axis.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0)))
            axis.xaxis.set_major_formatter("{x:,g}")
            axis.xaxis.set_minor_formatter(NullFormatter())
        axes[0].set_ylabel("validation loss (nats per byte)")
        figure.legend(*axes[0].get_legend_handles_labels(), fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--folder", default="language_model", help="where trainings are kept (default language_model)")
    parser.add_argument("--way", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most-rates", type=int, default=len(ADAMW), help="learning rates that are tried")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--batch", type=int, default=8, help="windows of each worker in a step (default 8)")
    parser.add_argument("--validate-every", type=int, default=100)
    parser.add_argument("--sweep-steps", type=int, help="of a training that tries a learning rate (default --steps)")
    parser.add_argument(
        "--whole-rates",
        type=int,
        default=1,
        help="best learning rates of the sweep that are trained in full with the first seed, of which the best counts "
        "(default 1)",
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no other training begins")
    parser.add_argument("--device", choices=list(SPEEDS), default="cpu")
    parser.add_argument("--at-once", action="store_true", help="all workers in one pass, in bf16; always on a GPU")
    present(parser, measure)
