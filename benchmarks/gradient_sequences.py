"""Sequences of real gradients: those of several ranks, step after step, along one training.

The training itself is uncompressed: parameters move by the exact mean of the ranks' gradients, or with local steps by
the exact mean of their changes. So all codecs can be measured on the same sequence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.research.simulation.problems import MIN_NUMEL
from workloads.characters import CharacterTransformer, load_texts, windows
from workloads.digits import load_digits
from workloads.image_files import decode
from workloads.resnet import ResNet

IMAGE_SIZE, TEXT_LENGTH = 16, 32

#: Samples whose loss is computed at once: gradients of larger batches are sums over parts, which need less memory.
PART = 128

Loss = Callable[[nn.Module, int, torch.Generator], Tensor]


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        make: a new model.
        optimizer: of a model's parameters, which moves them by the exact mean.
        inner: of a model's parameters, in local steps.
        loss: mean loss of so many random samples.
    """

    make: Callable[[], nn.Module]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    inner: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    loss: Loss


@cache
def images(size: int = IMAGE_SIZE) -> tuple[str, Tensor, Tensor]:
    """Name, images, uint8 [N, 3, size, size], and labels: CIFAR-10 from the folder GQSGD_DATA, or else the digits."""
    folder = os.environ.get("GQSGD_DATA")
    archive = Path(folder) / "cifar10" / "cifar10-jpeg.tar.xz" if folder else None
    if archive is not None and archive.is_file():
        loaded = decode(archive, "CIFAR-10", size, 3)
    else:
        loaded = load_digits("digits, resized", size, 3)
    return loaded.name, torch.from_numpy(loaded.train_images).permute(0, 3, 1, 2), torch.from_numpy(loaded.train_labels)


def _image_loss(model: nn.Module, size: int, generator: torch.Generator) -> Tensor:
    _, pixels, labels = images()
    chosen = torch.randint(len(labels), (size,), generator=generator)
    return F.cross_entropy(model(pixels[chosen].float() / 64 - 2), labels[chosen])


def _text_loss(model: nn.Module, size: int, generator: torch.Generator) -> Tensor:
    inputs, targets = windows(_text(), size, TEXT_LENGTH, generator)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@cache
def _text() -> Tensor:
    return load_texts().train


TASKS = {
    "ResNet": Task(
        lambda: ResNet(blocks=[2, 2, 2], width=16),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, weight_decay=5e-4),
        _image_loss,
    ),
    "transformer": Task(
        lambda: CharacterTransformer(TEXT_LENGTH, layers=2, width=64, heads=4),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        _text_loss,
    ),
}


def segments_of(model: nn.Module) -> list[Segment]:
    """The parameters in a flat gradient, which are those that are trained; small ones travel uncompressed."""
    sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    return [Segment(number, size, raw=size < MIN_NUMEL) for number, size in enumerate(sizes)]


def gradients(task: Task, model: nn.Module, ranks: int, batch: int, steps: int) -> Iterator[list[Tensor]]:
    """One flat gradient for each rank, in every step."""
    parameters = list(model.parameters())
    optimizer = task.optimizer(parameters)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        each = [_gradient(task, model, parameters, batch, generator) for _ in range(ranks)]
        yield each
        _scatter(torch.stack(each).mean(0), parameters, lambda parameter, part: setattr(parameter, "grad", part))
        optimizer.step()


def changes(
    task: Task, model: nn.Module, ranks: int, batch: int, rounds: int, local_steps: int
) -> Iterator[list[Tensor]]:
    """The change that each rank makes in a round of local steps; see `gradients` for the other arguments."""
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(1)
    anchor = _flat(parameters)
    optimizers = [task.inner(parameters) for _ in range(ranks)]
    for _ in range(rounds):
        each = []
        for optimizer in optimizers:
            _set(parameters, anchor)
            for _ in range(local_steps):
                part = _gradient(task, model, parameters, batch, generator)
                _scatter(part, parameters, lambda parameter, part: setattr(parameter, "grad", part))
                optimizer.step()
            each.append(_flat(parameters) - anchor)
        yield each
        anchor = anchor + torch.stack(each).mean(0)


def _gradient(
    task: Task, model: nn.Module, parameters: list[nn.Parameter], batch: int, generator: torch.Generator
) -> Tensor:
    """The flat gradient of a random batch."""
    total = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for start in range(0, batch, PART):
        size = min(PART, batch - start)
        grads = torch.autograd.grad(task.loss(model, size, generator), parameters)
        total += torch.cat([grad.flatten() for grad in grads]) * (size / batch)
    return total


def _flat(parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def _set(parameters: list[nn.Parameter], flat: Tensor) -> None:
    with torch.no_grad():
        _scatter(flat, parameters, lambda parameter, part: parameter.copy_(part))


def _scatter(flat: Tensor, parameters: list[nn.Parameter], use: Callable[[nn.Parameter, Tensor], object]) -> None:
    """Give each parameter its part of a flat vector."""
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        use(parameter, part.view_as(parameter))
