"""Loss of an elastic training at as many samples as ddp: unequal members are killed and come back.

    python -m benchmarks.elastic_losses --save

No wall clock counts here: members live under a virtual clock (see `virtual_members`). Three of four are four times as
fast as the last one. A random one is killed every 320 steps of a fast one in the mean, loses what it has learnt since
its last merge and the state of its optimizer, and is back 80 steps later. ddp has four equal ranks with the same
batches in each step. Every way ends after the same number of samples. Learning rates are tried with the first seed,
from the lowest on, until the loss rises. A training that is over is kept in ``--folder``, and the same command goes on
with the next one; after ``--minutes``, none begins.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from benchmarks.kept import kept
from benchmarks.report import Report, command_line, listed, present
from benchmarks.schedule import share_of_rate
from benchmarks.virtual_members import Clock, Training, VirtualMembers
from workloads.characters import CharacterTransformer, load_texts, windows

RANKS = 4
BATCH, LENGTH = 16, 32
VALIDATION = 512
#: Samples of a training, unless the command says otherwise. Each other number has a table of its own.
SAMPLES = 48_000
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)
SEEDS = 3
#: Steps in which learning rates warm up.
WARMUP = 32

#: One result: loss, samples, merges and kills.
Result = dict[str, float]


class Characters:
    """A character model, and how it is trained: with the highest learning rate, and from a seed's start."""

    def __init__(self, rate: float, seed: int, samples: int) -> None:
        texts = load_texts()
        self.text = texts.name
        self._train = texts.train
        self._validation = windows(texts.valid, VALIDATION, LENGTH, torch.Generator().manual_seed(1))
        self._rate, self._seed, self._samples = rate, seed, samples

    def model(self) -> nn.Module:
        """Returns the model at its start."""
        with torch.random.fork_rng():
            torch.manual_seed(self._seed)
            return CharacterTransformer(LENGTH, layers=1, width=64, heads=2)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Returns the optimizer of a model."""
        return AdamW(model.parameters(), lr=self._rate)

    def step(self, model: nn.Module, optimizer: Optimizer, batches: torch.Generator, seen: int, ranks: int = 1) -> None:
        """Make a step on the batches of some ranks, after so many samples of all."""
        inputs, targets = windows(self._train, ranks * BATCH, LENGTH, batches)
        for group in optimizer.param_groups:
            step = min(seen, self._samples) // (RANKS * BATCH)
            group["lr"] = self._rate * share_of_rate(step, self._samples // (RANKS * BATCH), WARMUP)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """Returns the loss on the validation text, nats per character."""
        inputs, targets = self._validation
        return float(F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))


def ddp(rate: float, seed: int, samples: int) -> Result:
    """Train with the mean gradient of all ranks in every step."""
    characters = Characters(rate, seed, samples)
    model = characters.model()
    optimizer = characters.optimizer(model)
    batches = torch.Generator().manual_seed(1000 * seed)
    for seen in range(0, samples, RANKS * BATCH):
        characters.step(model, optimizer, batches, seen, RANKS)
    return {"loss": characters.loss(model), "samples": samples, "merges": 0, "kills": 0}


def elastic(clock: Clock, rate: float, seed: int, samples: int) -> Result:
    """Train with members that merge by the clock."""
    characters = Characters(rate, seed, samples)
    training = Training(characters.model, characters.optimizer, characters.step, BATCH, samples)
    members = VirtualMembers(training, clock, seed)
    loss = characters.loss(members.run())
    return {"loss": loss, "samples": members.samples, "merges": members.merges, "kills": members.kills}


WAYS: dict[str, Callable[[float, int, int], Result]] = {
    "ddp": ddp,
    "elastic, rounds of 16 steps": lambda *given: elastic(Clock(every=16.0), *given),
    "elastic, rounds of 32 steps": lambda *given: elastic(Clock(every=32.0), *given),
}


class Trainings:
    """The trainings of a folder, each in a file. None begins after so many minutes."""

    def __init__(self, folder: Path, samples: int, minutes: float) -> None:
        self._folder, self._samples = folder, samples
        self._end = time.monotonic() + 60 * minutes
        folder.mkdir(parents=True, exist_ok=True)

    def result(self, way: str, rate: float, seed: int) -> Result | None:
        """Returns what a training has ended with; None: it is not there, and time is over."""
        name = f"{load_texts().name} {way} {rate:g} {seed} {self._samples}"
        file = self._folder / f"{''.join(c if c.isalnum() or c in '.-' else '_' for c in name)}.json"

        def make() -> Result:
            began = time.process_time()
            made = WAYS[way](rate, seed, self._samples)
            print(f"{name}: {made} in {time.process_time() - began:.0f} s", flush=True)
            return made

        return kept(file, self._end, make)

    def best(self, way: str) -> tuple[float, list[Result]] | None:
        """Returns the best learning rate of a way, and the results of all seeds; None: some are not there yet."""
        tried: dict[float, float] = {}
        for rate in RATES:
            found = self.result(way, rate, 0)
            if found is None:
                return None
            tried[rate] = found["loss"] if math.isfinite(found["loss"]) else math.inf
            if tried[rate] > min(tried.values()):
                break
        rate = min(tried, key=lambda one: tried[one])
        results = [self.result(way, rate, seed) for seed in range(SEEDS)]
        there = [result for result in results if result is not None]
        return (rate, there) if len(there) == SEEDS else None


def _measure(options: argparse.Namespace) -> Report:
    text = load_texts().name
    numbers = {"learning rate": "g", "samples": ".0f", "loss": ".3f", "lowest": ".3f", "highest": ".3f"}
    columns = {"way": "", **numbers, "less ddp's": "+.3f", "merges": ".0f", "kills": ".0f"}
    clock = Clock()
    of_text = "_wikitext2" if "WikiText" in text else ""
    of_length = f"_{options.samples}" if options.samples != SAMPLES else ""
    report = Report(
        f"elastic_losses{of_text}{of_length}",
        f"Loss at equal samples of members that are unequal, killed and back: {text}",
        columns,
        [
            f"A character transformer of one layer; {SEEDS} seeds of start, batches and kills. "
            "loss: the mean over seeds, nats per byte of the validation text, beside the lowest and the highest. "
            "merges, kills: of all seeds together. samples: those that have entered the model. Changes travel at 4 "
            "bits (gqsgd_diloco). Steps of a round are those of a fast member; a random one is killed every "
            f"{clock.kill_every:g} of them in the mean, and is back {clock.down:g} later.",
            f"Learning rates were tried with the first seed, until the loss rose: {listed(RATES)}.",
        ],
    )
    trainings = Trainings(Path(options.folder), options.samples, options.minutes)
    plain = math.nan
    for way in options.way:
        best = trainings.best(way)
        if best is None:
            report.notes = [*report.notes, f"Not over yet: {way}."]
            continue
        rate, results = best
        losses = [result["loss"] for result in results]
        mean = statistics.fmean(losses)
        plain = mean if way == "ddp" else plain
        totals: dict[str, Any] = {name: sum(result[name] for result in results) for name in ("merges", "kills")}
        samples = statistics.fmean(result["samples"] for result in results)
        ends = (mean, min(losses), max(losses), mean - plain)
        report.rows.append([way, rate, samples, *ends, totals["merges"], totals["kills"]])
        report.raw[way] = {"rate": rate, "results": results}
    return report


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--folder", default="elastic_losses", help="where trainings are kept (default elastic_losses)")
    parser.add_argument("--way", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"of each training (default {SAMPLES})")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no further training begins")
    present(parser, _measure)
