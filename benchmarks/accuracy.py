"""Error of one quantised mean by dither, bits and block size; the defaults of linear codes were chosen by this table.

    python -m benchmarks.accuracy --save

There are four kinds of gradients. Gaussian gradients are independent. Heavy-tailed gradients have 64 layers whose
scales span three decades; they follow Student's t distribution with 3 degrees of freedom, and ranks are correlated by
0.1. Sparse gradients have 90 % zeros, mostly at the same places on all ranks. The gradients of a network are those of a
ResNet on scikit-learn's digits at initialisation, where every rank has its own samples.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F

from benchmarks.report import Report, command_line, present
from lightning_gqsgd.research.simulation import average, relative_error
from workloads.resnet import ResNet

NUMEL = 1 << 18
LAYERS = 64
CORRELATION = 0.1


def gaussian(ranks: int, generator: torch.Generator) -> list[Tensor]:
    """Independent, standard normal gradients: a tensor (NUMEL,) for each rank."""
    return [torch.randn(NUMEL, generator=generator) for _ in range(ranks)]


def heavy_tailed(ranks: int, generator: torch.Generator) -> list[Tensor]:
    """Heavy-tailed gradients, as the module describes them: a tensor (NUMEL,) for each rank."""
    scales = torch.logspace(-3, 0, LAYERS).repeat_interleave(NUMEL // LAYERS)

    def student() -> Tensor:
        normal, others = torch.randn(4, NUMEL, generator=generator).split([1, 3])
        return normal[0] / (others.square().sum(0) / 3).sqrt()

    shared = math.sqrt(CORRELATION) * student()
    return [scales * (shared + math.sqrt(1 - CORRELATION) * student()) for _ in range(ranks)]


def sparse(ranks: int, generator: torch.Generator) -> list[Tensor]:
    """Sparse gradients, as the module describes them: a tensor (NUMEL,) for each rank."""
    shared = torch.rand(NUMEL, generator=generator) < 0.08
    places = [shared | (torch.rand(NUMEL, generator=generator) < 0.02) for _ in range(ranks)]
    return [torch.randn(NUMEL, generator=generator) * place for place in places]


def network(ranks: int, generator: torch.Generator) -> list[Tensor]:
    """Gradients of a ResNet on the digits, with 16 samples per rank: a flat tensor for each rank."""
    digits = load_digits()
    images, labels = torch.from_numpy(digits.images).float()[:, None] / 8 - 1, torch.from_numpy(digits.target)
    torch.manual_seed(0)
    model = ResNet(blocks=[1, 1, 1], width=16, channels=1, num_classes=10)
    gradients = []
    for _ in range(ranks):
        chosen = torch.randint(len(labels), (16,), generator=generator)
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        gradients.append(torch.cat([gradient.flatten() for gradient in grads if gradient.numel() >= 1024]))
    return gradients


KINDS: dict[str, Callable[[int, torch.Generator], list[Tensor]]] = {
    "gaussian": gaussian,
    "heavy-tailed": heavy_tailed,
    "sparse": sparse,
    "network": network,
}


def measure(options: argparse.Namespace) -> Report:
    """Measure all combinations of the command line."""
    report = Report(
        "accuracy",
        "Relative L2 error (%) of one quantised mean, linear codes, two_shot",
        {"bits": "d", "dither": "", "block": "d", "bits on the wire": ".2f"}
        | {f"{kind}, n = {ranks}": ".2f" for kind in KINDS for ranks in options.ranks},
        notes=(
            "bits on the wire: codes and scales, per coordinate. The default of linear codes is adaptive dither in "
            "blocks of 256: subtractive dither has the smaller error except where most coordinates are zero, and "
            "adaptive takes the better one block by block. Smaller blocks are more accurate per coordinate; 256 is "
            "where codec speed (`python -m benchmarks.kernels --block-size 64 256`) and error meet.",
        ),
    )
    data = {
        (kind, ranks): make(ranks, torch.Generator().manual_seed(ranks))
        for kind, make in KINDS.items()
        for ranks in options.ranks
    }
    for bits in options.bits:
        for dither in ("stochastic", "subtractive", "adaptive"):
            for block in options.block_size:
                fields = {"bits": bits, "dither": dither, "block_size": block}
                means = [average(x, codec="linear", reducer="two_shot", **fields)[0] for x in data.values()]
                errors = [100 * relative_error(mean, x) for mean, x in zip(means, data.values(), strict=True)]
                report.rows.append([bits, dither, block, bits + 16 / block, *errors])
    return report


def main() -> None:
    """Run the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4, 2])
    parser.add_argument("--block-size", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    present(parser, measure)


if __name__ == "__main__":
    main()
