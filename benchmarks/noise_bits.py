"""Bits that the noise of gradients allows (``bits="auto"``), against plain DDP: quality, and how many bits.

    GQSGD_DATA=FOLDER python -m benchmarks.noise_bits --save

Each training is a run of ``recipes/run.py``. Trainings of one seed start from the same weights and see the same
samples. The folder GQSGD_DATA has ``cifar10/cifar10-jpeg.tar.xz``, ``wikitext2/test.txt`` and ``wikitext2/valid.txt``.
Without it, only the digits are trained. Runs that have ended are kept in ``--folder``, so that a benchmark that was
interrupted goes on.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.report import Report, command_line, present
from lightning_gqsgd.errors import counted
from pictures.style import OTHERS, drawn

ROOT = Path(__file__).resolve().parents[1]

PLAIN, NOISE = "ddp", 'bits="auto"'
#: The overrides of each way to average gradients.
WAYS = {PLAIN: ["strategy=ddp"], NOISE: ["strategy=gqsgd", "strategy.bits=auto"]}
#: Most seconds of one training.
LIMIT_S = 3600


@dataclass(frozen=True)
class Task:
    """A training.

    Attributes:
        overrides: what follows ``recipes/run.py``.
        metric: the result's name in ``result.json``.
        unit: of the result, as the table shows it.
        factor: what the result is multiplied by for that unit.
        fields: further overrides where the noise decides.
    """

    overrides: tuple[str, ...]
    metric: str = "test/acc"
    unit: str = "%"
    factor: float = 100.0
    fields: tuple[str, ...] = ()


def tasks(data: Path | None) -> dict[str, Task]:
    """All trainings, by name; ``data`` is the folder GQSGD_DATA, and None leaves out what needs it."""
    whole = ("+exp=quickstart", "data.val_samples=null")
    found = {f"digits, batch {size}": Task((*whole, f"data.batch_size={size}")) for size in (8, 32)}
    large = (*whole, "data.batch_size=350", "trainer.max_epochs=75", "trainer.log_every_n_steps=1")
    found["digits, batch 350"] = Task(large)
    found["digits, batch 350, max_slowdown 0.02"] = Task(large, fields=("+strategy.max_slowdown=0.02",))
    if data is None:
        return found
    found["CIFAR-10, small network"] = Task(
        (
            *("+exp=convnet_cifar", "model.widths=[32,64,64]", "trainer.max_epochs=3", "data.flip=true"),
            *("data.edges=black", "data.cutout=0", "task.label_smoothing=0.1", "task.both_sides=false", "threads=1"),
            f"data.root={data / 'cifar10' / 'cifar10-jpeg.tar.xz'}",
        )
    )
    text = data / "wikitext2"
    found["WikiText-2, transformer"] = Task(
        (
            *("+exp=transformer_wikitext", f"data.train_file={text / 'test.txt'}", "data.sequence_length=64"),
            *(f"data.valid_file={text / 'valid.txt'}", "data.vocabulary_size=5000", "data.batch_size=4"),
            *("data.valid_samples=256", "trainer.max_steps=600", "trainer.val_check_interval=100"),
            *("trainer.check_val_every_n_epoch=null", "threads=1", "test=false"),
        ),
        metric="val/perplexity",
        unit="perplexity",
        factor=1.0,
    )
    return found


def train(task: Task, way: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train once, unless the folder has the result: ``result.json``, and a row for each time that bits were logged."""
    done = folder / "result.json"
    if not done.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        fields = () if way == PLAIN else task.fields
        words = [*task.overrides, *WAYS[way], *fields, f"seed={seed}", f"hydra.run.dir='{folder}'"]
        with (folder / "benchmark.log").open("w") as log:
            command = [sys.executable, "recipes/run.py", *words]
            code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=LIMIT_S, check=False).returncode
        if code or not done.is_file():
            raise RuntimeError(
                f"{' '.join(words)} ended with status {code}; its output is in {folder / 'benchmark.log'}"
            )
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("gqsgd/bits")]
    curve = [(int(row["step"]), float(row["gqsgd/bits"]), float(row["gqsgd/noise_scale"] or "nan")) for row in rows]
    return {**json.loads(done.read_text()), "curve": curve}


def measure(options: argparse.Namespace) -> Report:
    """Train everything, and make the table."""
    data = os.environ.get("GQSGD_DATA")
    known = tasks(None if data is None else Path(data).resolve())
    unknown = [name for name in options.task if name not in known]
    if unknown:
        needs = "those of images and text need the folder GQSGD_DATA"
        raise SystemExit(f"--task {unknown[0]!r}: there are {', '.join(known)}; {needs}")
    chosen = {name: known[name] for name in options.task or known}
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with Progress(disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("trainings", total=len(chosen) * len(WAYS) * options.seeds)
        for name, task in chosen.items():
            for seed in range(options.seeds):
                for way in WAYS:
                    progress.update(bar, description=f"{name}, {way}, seed {seed}")
                    folder = options.folder.resolve() / f"{name}-{way}-{seed}".replace(" ", "_").replace('"', "")
                    result = train(task, way, seed, folder)
                    runs.setdefault(name, {}).setdefault(way, []).append(result)
                    progress.advance(bar)
    report = Report(
        name="noise_bits",
        title='bits="auto" against plain DDP: what the noise of gradients allows',
        columns={
            "task": "",
            "result": "",
            "ddp": "",
            'bits="auto"': "",
            "difference": "",
            "average bits": ".2f",
            "bits, and from which step, by seed": "",
            "noise scale, first": ".1f",
            "noise scale, last": ".1f",
            "MB sent": ".1f",
            "by ddp": ".1f",
        },
    )
    report.rows += [row_of(name, chosen[name], ways) for name, ways in runs.items()]
    report.raw = {"runs": runs}
    report.draw = lambda file: _draw(runs, file)
    report.notes = (
        f"Two processes of one machine; means over {counted(options.seeds, 'seed')}, ± the standard deviation over "
        "seeds; the difference is that of runs of the same seed. Results: the share of test images that are right, or "
        "the perplexity of the validation text, with the last weights. Every training begins with 32 bits, and all "
        "compressed coordinates have the same. Batches are those of one rank.",
        "Noise scale: S/|G|² in batches of one rank (arXiv 1812.06162), at the first and at the last measurement; the "
        "median over seeds.",
        "Two ranks gather messages, whose rounding is about 1 % of the square of a gradient at 4 bits. So "
        "max_slowdown=0.05 allows 4 bits wherever the noise scale is above 0.3.",
    )
    return report


def row_of(name: str, task: Task, ways: dict[str, list[dict[str, Any]]]) -> list[Any]:
    """The row of a task from the results of its runs, by way and seed."""
    results = {way: [task.factor * run["metrics"][task.metric] for run in ways[way]] for way in WAYS}
    apart = [noise - plain for plain, noise in zip(results[PLAIN], results[NOISE], strict=True)]
    curves = [run["curve"] for run in ways[NOISE]]
    scales = [[scale for _, _, scale in curve if scale == scale] for curve in curves]
    return [
        name,
        task.unit,
        _spread(results[PLAIN]),
        _spread(results[NOISE]),
        _spread(apart, sign="+"),
        statistics.mean(run["bits_per_coordinate"] for run in ways[NOISE]),
        "; ".join(_changes(curve) for curve in curves),
        statistics.median(scale[0] for scale in scales),  # infinite where |G|² is lost in the noise
        statistics.median(scale[-1] for scale in scales),
        statistics.mean(run["mb_sent"] for run in ways[NOISE]),
        statistics.mean(run["mb_sent"] for run in ways[PLAIN]),
    ]


def _changes(curve: Sequence[tuple[int, float, float]]) -> str:
    """All bits that were taken, and the step at which each was logged first."""
    pairs = [(bits, step) for step, bits, _ in curve]
    first = [pair for before, pair in zip([(0.0, 0), *pairs], pairs, strict=False) if before[0] != pair[0]]
    return ", ".join(f"{bits:g} ({step})" for bits, step in first)


def _spread(values: Sequence[float], sign: str = "") -> str:
    mean = f"{statistics.mean(values):{sign}.2f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f}"


def _draw(runs: dict[str, dict[str, list[dict[str, Any]]]], file: Path) -> None:
    """Bits and noise scale of the first seed against steps, one line for each task."""
    with drawn(file, crop="tight", figsize=(6.4, 5.0)) as figure:
        above, below = figure.subplots(2, 1, sharex=True)
        for (name, ways), colour in zip(runs.items(), OTHERS, strict=False):
            steps, bits, scales = zip(*ways[NOISE][0]["curve"], strict=True)
            ended = [step + 1 for step in steps]  # an axis with a logarithmic scale has no 0
            above.step(ended, bits, where="post", color=colour)
            below.plot(ended, scales, color=colour, label=name)
        above.set_yscale("log", base=2)
        above.set_yticks([4, 8, 16, 32], ["4", "8", "16", "32"])
        above.set_ylabel("bits")
        above.set_title('bits="auto": the bits of a training, and the noise of its gradients')
        below.set_yscale("log")
        below.set_ylabel("noise scale (batches of a rank)")
        below.set_xscale("log")
        below.set_xlabel("steps")
        figure.tight_layout()
        figure.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind (default 3)")
    parser.add_argument("--task", nargs="+", default=[], help="names of tasks, as in the table (default all)")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "noise_bits", help="where runs are kept")
    present(parser, measure)
