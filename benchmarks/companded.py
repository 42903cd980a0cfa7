"""Error of one quantised mean under companded codes, against linear ones and against other curves.

    python -m benchmarks.companded --save

The first rows of each number of bits are the package's codecs. The other rows are curves written out in PyTorch, with
scales that are not rounded: they are what the curve of `codecs.companded` was chosen among. Each curve is a pair of
functions: what the encoder applies to coordinates, and what the decoder applies to numbers of levels without dither.
The decoder's mean over a box of length 1 is the inverse of the encoder's function, so all of them are unbiased.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import presets
from benchmarks.report import Report, command_line, present
from lightning_gqsgd.config import GQSGDConfig


class Curve(NamedTuple):
    """A compander for K levels, with m = (K-1)/2.

    Attributes:
        encode: coordinates, as shares of the scale, to numbers from -m to m.
        decode: such numbers with an error that is uniform on [-1/2, 1/2], to coordinates without bias.
    """

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]


def sinh(middle: float, t: float) -> Curve:
    """Levels sinh(Δ k)/t with Δ = asinh(t)/m: nearly logarithmic for large t."""
    step = math.asinh(t) / middle
    shrink = step / (2 * math.sinh(step / 2)) / t
    return Curve(lambda x: torch.asinh(x * t) / step, lambda z: torch.sinh(step * z) * shrink)


def cubic(middle: float, beta: float) -> Curve:
    """Levels h(k/m), h(y) = (1 - beta) y + beta y³; the decoder takes the cube's mean over a box off again."""

    def encode(x: Tensor) -> Tensor:
        y = x.clone()
        for _ in range(20):  # Newton's method from above, where h is convex
            size = y.abs()
            y -= torch.sign(x) * ((1 - beta) * size + beta * size**3 - x.abs()) / (1 - beta + 3 * beta * size**2)
        return y * middle

    return Curve(encode, lambda z: (1 - beta - beta / (4 * middle**2)) * (z / middle) + beta * (z / middle) ** 3)


def parabola(middle: float, slope: float) -> Curve:
    """The decoder slope m z + z |z|, whose mean over a box is a cubic within half a level of zero."""
    a = slope * middle
    scale = 1 / (a * middle + middle**2 + 1 / 12)

    def encode(x: Tensor) -> Tensor:
        v = x.abs() / scale
        far = ((a * a + 4 * (v - 1 / 12)).clamp(min=0).sqrt() - a) / 2
        near = v / (a + 0.5)
        for _ in range(6):
            near = near - ((a + 0.5) * near + 2 / 3 * near**3 - v) / (a + 0.5 + 2 * near**2)
        return torch.sign(x) * torch.where(v > a / 2 + 1 / 3, far, near)

    return Curve(encode, lambda z: scale * (a * z + z * z.abs()))


def straight(middle: float, slope: float) -> Curve:
    """The curve of `codecs.companded`, whose decoder is straight between the numbers k + 1/2."""
    stretch = (1 + slope) * middle

    def encode(x: Tensor) -> Tensor:
        root = slope * middle / 2
        return torch.sign(x) * ((root * root + stretch * middle * x.abs()).sqrt() - root)

    def decode(z: Tensor) -> Tensor:
        r = torch.floor(z + 0.5)
        return (slope * middle * z + r.abs() * (2 * z - r)) / (stretch * middle)

    return Curve(encode, decode)


#: Curves by name, as functions of m.
CURVES: dict[str, Callable[[float], Curve]] = {
    "uniform": lambda m: Curve(lambda x: x * m, lambda z: z / m),
    "sinh, t = 3": lambda m: sinh(m, 3),
    "sinh, t = 10": lambda m: sinh(m, 10),
    "cubic, β = 0.7": lambda m: cubic(m, 0.7),
    "parabola, s = 0.5": lambda m: parabola(m, 0.5),
    "straight, s = 0.25": lambda m: straight(m, 0.25),
    "straight, s = 0.5": lambda m: straight(m, 0.5),
    "straight, s = 0.75": lambda m: straight(m, 0.75),
    "straight, s = 1": lambda m: straight(m, 1.0),
}
#: The package's codecs by name: the fields of a configuration.
CODECS: dict[str, dict[str, Any]] = {
    "linear": {"codec": "linear", "block_size": 256},
    "linear, blocks of 128": {"codec": "linear", "block_size": 128},
    "companded": {"codec": "companded", "block_size": 256},
    "companded, blocks of 128": {"codec": "companded", "block_size": 128},
    "companded, blocks of 128, rotated": {"codec": "companded", "block_size": 128, "rotation": True},
}
BLOCK = 128
BITS = (2, 3, 4, 8)
RANKS = 8


def lognormal(ranks: int) -> presets.Gradients:
    """Student's t with 3 degrees of freedom, times a lognormal factor; independent between ranks."""
    generator, numel = torch.Generator().manual_seed(ranks), 1 << 18

    def draw() -> Tensor:
        normal, others, factor = torch.randn(5, numel, generator=generator).split([1, 3, 1])
        return normal[0] / (others.square().sum(0) / 3).sqrt() * factor[0].exp()

    return presets.Gradients([draw() for _ in range(ranks)], [presets.Segment(0, numel, raw=False)])


def rounded(x: Tensor, curve: Curve, middle: float, generator: torch.Generator) -> Tensor:
    """Encode and decode blocks, a row each, under a dither of their own."""
    scale = x.abs().amax(1, keepdim=True)
    shares = torch.where(scale > 0, x / scale, 0)  # a block of zeros stays one
    dither = torch.rand(x.shape, generator=generator) - 0.5
    levels = torch.round(curve.encode(shares) + dither + middle).clamp(0, 2 * middle)
    return curve.decode(levels - middle - dither) * scale


def error_of(curve: Curve, middle: float, gradients: presets.Gradients) -> float:
    """Relative error of two shots: the mean of rounded gradients, rounded again. Ranks take turns at owning a block,
    and the owner of a block has its own gradient exactly."""
    generator = torch.Generator().manual_seed(1)
    blocks = [_blocks(x, gradients) for x in gradients.ranks]
    received = torch.stack([rounded(x, curve, middle, generator) for x in blocks])
    for rank, x in enumerate(blocks):
        received[rank, rank :: len(blocks)] = x[rank :: len(blocks)]
    mean = received.mean(0)
    exact = torch.stack(gradients.ranks).mean(0)
    error = rounded(mean, curve, middle, generator) - torch.stack(blocks).mean(0)
    return float(error.norm() / exact.norm())


def _blocks(x: Tensor, gradients: presets.Gradients) -> Tensor:
    """The compressed parameters of a flat gradient as rows of `BLOCK` coordinates, each parameter padded by zeros."""
    rows = []
    parts = x.split([segment.numel for segment in gradients.segments])
    for segment, part in zip(gradients.segments, parts, strict=True):
        if not segment.raw:
            rows.append(torch.nn.functional.pad(part, (0, -len(part) % BLOCK)).view(-1, BLOCK))
    return torch.cat(rows)


def measure(options: argparse.Namespace) -> Report:
    """Measure all codecs and curves on all kinds of gradients."""
    kinds = {kind: presets.KINDS[kind](RANKS) for kind in ("gaussian", "heavy-tailed", "CNN trained", "LM trained")}
    kinds = {"gaussian": kinds.pop("gaussian"), "t × lognormal": lognormal(RANKS), **kinds}
    report = Report(
        "companded",
        f"Relative L2 error (%) of one mean of {RANKS} gradients, companded codes, two_shot",
        {"bits": "d", "codec or curve": "", "bits on the wire": ".2f"} | dict.fromkeys(kinds, ".2f"),
        notes=(
            "bits on the wire: codes and scales, per coordinate. The rows without a block size in words are in blocks "
            "of 256 for codecs, and of 128 for curves.",
            "Curves have subtractive dither in all blocks; codecs have adaptive dither.",
            "t × lognormal: Student's t distribution with 3 degrees of freedom, times a lognormal factor. Other kinds "
            "are those of `python -m benchmarks.presets` (GQSGD_DATA says where CIFAR-10 is, for the CNN).",
        ),
    )
    for bits in BITS:
        for name, codec in CODECS.items():
            config = GQSGDConfig(bits=bits, reducer="two_shot", **codec)
            errors = [presets.percent_error(gradients, config) for gradients in kinds.values()]
            report.rows.append([bits, name, bits + 16 / config.block_size, *errors])
        middle = (2**bits - 1) / 2
        for name, make in CURVES.items():
            errors = [100 * error_of(make(middle), middle, gradients) for gradients in kinds.values()]
            report.rows.append([bits, name, bits + 16 / BLOCK, *errors])
    return report


if __name__ == "__main__":
    present(command_line(__doc__), measure, threads=1)
