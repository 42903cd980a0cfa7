"""A character transformer as a problem of `simulate`: virtual workers with batches of their own, in one process."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import Optimizer

from benchmarks.gradient_sequences import segments_of
from benchmarks.report import Report
from benchmarks.schedule import share_of_rate
from lightning_gqsgd.research.simulation import simulate
from lightning_gqsgd.research.simulation.problems import Problem
from workloads.characters import CharacterTransformer, load_texts, windows

#: Windows of a worker's batch, characters of a window, and windows of which the loss is taken.
BATCH, LENGTH, VALIDATION = 4, 64, 128
#: Virtual workers of a training.
WORKERS = 4
#: Steps in which learning rates warm up.
WARMUP = 16
#: Steps of a training of `tuned_ways`.
STEPS = 120


class VirtualCharacters:
    """Next-character prediction by a `CharacterTransformer`; the loss is that of the validation text, in nats.

    Args:
        seed: of the start and of all batches.
        layers: blocks of the transformer.
        width: length of a character's vector.
        batch: windows of a worker's batch.

    Attributes:
        network: the network, at its start.
        text: name of the text.
        shapes: shape of each parameter, in order.
        hidden: whether each parameter is a matrix of a hidden layer, for which Muon and Dion are.
    """

    def __init__(self, seed: int = 0, layers: int = 2, width: int = 64, batch: int = BATCH) -> None:
        self._seed = seed
        self._batch = batch
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.network = CharacterTransformer(LENGTH, layers, width)
        texts = load_texts()
        self.text = texts.name
        self._train = texts.train
        self._validation = windows(texts.valid, VALIDATION, LENGTH, torch.Generator().manual_seed(1))
        named = dict(self.network.named_parameters())
        self._names = list(named)
        self.shapes = [parameter.shape for parameter in named.values()]
        self.hidden = [name.startswith("blocks") and parameter.ndim == 2 for name, parameter in named.items()]
        self.segments = segments_of(self.network)

    def start(self) -> Tensor:
        """Returns the parameters at the start, [d]."""
        return torch.cat([parameter.detach().flatten() for parameter in self.network.parameters()])

    def gradients(self, x: Tensor, step: int, workers: int) -> Tensor:
        """Returns each worker's gradient in a step, [workers, d], at one point [d] or at one for each [workers, d]."""
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + step)
        inputs, targets = windows(self._train, workers * self._batch, LENGTH, generator)
        batches = zip(inputs.split(self._batch), targets.split(self._batch), strict=True)
        rows = []
        for point, batch in zip(x.expand(workers, -1), batches, strict=True):
            leaf = point.detach().clone().requires_grad_()
            gradient = torch.autograd.grad(self._loss(leaf, *batch), leaf)[0]
            # Clipped by each worker, as in training.
            rows.append(gradient * min(1.0, 1.0 / float(gradient.norm())))
        return torch.stack(rows)

    @torch.no_grad()
    def loss(self, x: Tensor) -> float:
        """Returns the loss on the validation text, in nats per character."""
        return float(self._loss(x, *self._validation))

    def divided(self, parameters: Sequence[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Returns the matrices of hidden layers among parameters like the network's, in order, and all others."""
        pairs = list(zip(parameters, self.hidden, strict=True))
        matrices = [parameter for parameter, is_hidden in pairs if is_hidden]
        return matrices, [parameter for parameter, is_hidden in pairs if not is_hidden]

    def metrics(self, x: Tensor) -> dict[str, float]:
        """Returns no further metrics."""
        return {}

    def _loss(self, x: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        parts = x.split([shape.numel() for shape in self.shapes])
        parameters = {name: part.view(shape) for name, part, shape in zip(self._names, parts, self.shapes, strict=True)}
        return F.cross_entropy(functional_call(self.network, parameters, (inputs,)).flatten(0, 1), targets.flatten())


class Scheduled(Optimizer):
    """An optimizer, ``inner``, whose learning rate warms up, and then falls to a tenth like a cosine."""

    def __init__(self, inner: Optimizer, steps: int) -> None:
        super().__init__([torch.zeros(1)], {})
        self.inner = inner
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: share_of_rate(step, steps, WARMUP))

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make a step."""
        self.inner.step()
        self._scheduler.step()


def outcome(
    steps: int,
    problem: Problem,
    make: Callable[[list[Tensor]], Optimizer],
    preset: str = "ddp",
    **fields: Any,
) -> tuple[float, float]:
    """Train, and return the loss at the end, infinite after a divergence, and the megabytes that a worker has sent."""
    record = simulate(
        preset,
        problem,
        workers=WORKERS,
        steps=steps,
        optimizer=make,
        record_every=steps,
        progress=False,
        **fields,
    )
    loss = math.inf if record.diverged_at is not None else record.last()
    return loss, float(record.bytes_sent[-1]) / 1e6


def tuned_ways(
    name: str,
    title: str,
    rates: Mapping[str, Sequence[float]],
    trained: Callable[[str, float], tuple[float, float]],
) -> Report:
    """Tune the learning rate of every way, and return the table."""
    report = Report(
        name,
        f"{title}: {STEPS} steps of a character transformer, {WORKERS} virtual workers",
        {"way": "", "learning rate": "g", "sent (MB)": ".2f", "loss at the end": ".3f"},
    )
    for way, several in rates.items():
        tried = {rate: trained(way, rate) for rate in several}
        best = min(tried, key=lambda rate: tried[rate][0])
        loss, sent = tried[best]
        row: list[str | float | None] = [way, best, sent, loss]
        print(f"{name}: {row}; tried {tried}", file=sys.stderr, flush=True)
        report.rows.append(row)
    return report
