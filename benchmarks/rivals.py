"""Error of one averaged gradient under the codecs of other tools, written out from their formulas, beside this
package's.

    python -m benchmarks.rivals --save

The gradients are those of `benchmarks.presets`. A rival is described by what happens to a gradient on its way, and not
by its kernels: its time is not measured here. Each rival is as its tool has it by default:

* torch's ``fp16_compress_hook`` and ``bf16_compress_hook``: each gradient over n, rounded to nearest, added up in that
  dtype.
* torch's ``quantization_pertensor_hook`` and ``quantization_perchannel_hook``: affine codes of 8 bits between the
  smallest and the largest number (of the bucket; of 512 coordinates), rounded to nearest, gathered.
* FP8 in blocks, as torchft's quantised all-reduce sends it: the largest magnitude of 1,024 coordinates is 448, rounded
  to nearest e4m3, both ways.
* max-min, as CGX has it (Markov et al. 2022, arXiv 2210.17357): 2^b - 1 steps between the smallest and the largest
  number of 512 coordinates, rounded to nearest, both ways.
* THC (Li et al. 2024, arXiv 2302.08545): 4 bits, a random Hadamard rotation of all coordinates in rows, one range of
  all ranks that 1/32 of them exceed (they are clipped), stochastic rounding to the 16 of 31 grid points that have the
  least variance for normal numbers. Sums travel back whole. The paper's error feedback is left out: its first step has
  none.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from torch import Tensor

from benchmarks import presets
from benchmarks.report import Report, command_line, present
from benchmarks.rival_hooks import RowCodes, max_min_codes, rows_of
from lightning_gqsgd.reducers.base import ring_bytes
from lightning_gqsgd.research.simulation import VirtualRanks, relative_error
from pictures.style import COLOURS, drawn

#: What one gradient becomes on its way.
Rounding = Callable[[Tensor], Tensor]
#: What the mean of all ranks' gradients becomes: flat gradients and random numbers to a flat mean.
Mean = Callable[[list[Tensor], torch.Generator], Tensor]

THC_BITS, THC_GRID, THC_BEYOND, THC_ROW = 4, 30, 1 / 32, 4096


@dataclass(frozen=True)
class Rival:
    """A tool's way to average.

    Attributes:
        name: of the tool and its codec.
        bits: of one rank's message per coordinate, scales included.
        sent: bytes that a rank sends over those of an fp32 ring all-reduce, for n ranks.
        mean: what the mean becomes.
    """

    name: str
    bits: float
    sent: Callable[[int], float]
    mean: Mean


def in_dtype(xs: list[Tensor], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Gradients over n, added up in a narrow dtype."""
    total = torch.zeros_like(xs[0], dtype=dtype)
    for x in xs:
        total += (x / len(xs)).to(dtype)
    return total.float()


def gathered(xs: list[Tensor], generator: torch.Generator, rounding: Rounding) -> Tensor:
    """Each gradient is rounded once; every rank gets all of them."""
    return torch.stack([rounding(x) for x in xs]).mean(0)


def both_ways(xs: list[Tensor], generator: torch.Generator, rounding: Rounding) -> Tensor:
    """Each gradient is rounded, and their mean again."""
    return rounding(gathered(xs, generator, rounding))


def affine(x: Tensor, block: int | None) -> Tensor:
    """Codes from 0 to 255 between the smallest and the largest number of each block, and 0; torch's observers."""
    rows = rows_of(x, block or x.numel())
    low, high = rows.amin(1, keepdim=True).clamp(max=0), rows.amax(1, keepdim=True).clamp(min=0)
    step = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).eps)
    zero = (-torch.round(low / step)).clamp(0, 255)
    codes = (torch.round(rows / step) + zero).clamp(0, 255)
    return ((codes - zero) * step).flatten()[: x.numel()]


def max_min(x: Tensor, block: int, bits: int) -> Tensor:
    """2^bits - 1 equal steps between the smallest and the largest number of each block."""
    codes, low, step = max_min_codes(x, block, bits)
    return (low + codes * step).flatten()[: x.numel()]


def fp8(x: Tensor) -> Tensor:
    """e4m3 numbers, with the largest magnitude of each block of 1024 at e4m3's largest."""
    codes = RowCodes(torch.float8_e4m3fn)
    return codes.decode(codes.encode(x), x.numel())


def thc(xs: list[Tensor], generator: torch.Generator) -> Tensor:
    """THC's mean: rotated, clipped, and rounded at random to common grid points, whose sums are exact."""
    signs = torch.randint(0, 2, (THC_ROW,), generator=generator) * 2.0 - 1
    rotated = [_hadamard(rows_of(x, THC_ROW) * signs) for x in xs]
    norm = torch.stack([rows.norm(dim=1, keepdim=True) for rows in rotated]).amax(0)
    reach = _normal_quantile(1 - THC_BEYOND / 2)
    largest = reach * norm / math.sqrt(THC_ROW)
    total = torch.zeros_like(rotated[0])
    levels = torch.tensor(thc_levels()) / THC_GRID * 2 - 1
    for rows in rotated:
        shares = torch.where(largest > 0, rows / largest, 0).clamp(-1, 1)
        above = torch.searchsorted(levels, shares).clamp(1, len(levels) - 1)
        low, high = levels[above - 1], levels[above]
        up = torch.rand(shares.shape, generator=generator) < (shares - low) / (high - low)
        total += torch.where(up, high, low)
    return (_hadamard(total / len(xs) * largest) * signs).flatten()[: xs[0].numel()]


@cache
def thc_levels() -> list[int]:
    """The 2^b of g + 1 equidistant points over the range, both ends included, with the least variance of stochastic
    rounding for a clipped normal number.

    Between two neighbours a < b, the variance at z is (z - a)(b - z). A dynamic programme over the points finds the
    least sum.
    """
    reach = _normal_quantile(1 - THC_BEYOND / 2)
    z = torch.linspace(-reach, reach, 6001, dtype=torch.float64)
    density = torch.exp(-z * z / 2)
    place = (z / reach + 1) / 2 * THC_GRID
    points = range(THC_GRID + 1)
    cost = {
        (a, b): float((density * ((place - a) * (b - place)).clamp(min=0) * ((place >= a) & (place <= b))).sum())
        for a in points
        for b in points
        if a < b
    }
    best: dict[tuple[int, int], tuple[float, list[int]]] = {(1, 0): (0.0, [0])}
    for count in range(2, 2**THC_BITS + 1):
        for b in points:
            options = [
                (best[count - 1, a][0] + cost[a, b], [*best[count - 1, a][1], b])
                for a in range(b)
                if (count - 1, a) in best
            ]
            if options:
                best[count, b] = min(options)
    return best[2**THC_BITS, THC_GRID][1]


RIVALS = [
    Rival("torch fp16 hook", 16, lambda n: 0.5, partial(in_dtype, dtype=torch.float16)),
    Rival("torch bf16 hook", 16, lambda n: 0.5, partial(in_dtype, dtype=torch.bfloat16)),
    Rival("torch per-tensor hook", 8, lambda n: n * 8 / 64, partial(gathered, rounding=partial(affine, block=None))),
    Rival(
        "torch per-channel hook",
        8 + 64 / 512,
        lambda n: n * (8 + 64 / 512) / 64,
        partial(gathered, rounding=partial(affine, block=512)),
    ),
    Rival(
        "FP8, blocks of 1024",
        8 + 32 / 1024,
        lambda n: (8 + 32 / 1024) / 32,
        partial(both_ways, rounding=fp8),
    ),
    *(
        Rival(
            f"max-min {bits} bit",
            bits + 64 / 512,
            lambda n, bits=bits: (bits + 64 / 512) / 32,  # type: ignore[misc]
            partial(both_ways, rounding=partial(max_min, block=512, bits=bits)),
        )
        for bits in (8, 4, 3, 2)
    ),
    # 4 bits to the one who adds up, and a byte per sum of up to 8 ranks back; a star, in place of a ring.
    Rival("THC", THC_BITS, lambda n: (THC_BITS + 8) / 64, thc),
]
#: This package's presets of the picture, most bits first.
OURS = ("gqsgd", "gqsgd_4bit", "gqsgd_3bit", "gqsgd_2bit")
KINDS = ("gaussian", "heavy-tailed", "CNN trained", "LM trained")
REPEATS = 16
RANKS, SHOWN_RANKS = (2, 8, 32), 8
#: Bits by which messages may differ and still count as equally long.
SAME_BITS = 0.5


@dataclass(frozen=True)
class Point:
    """One way to average one kind of gradients.

    Attributes:
        name: of the rival, or of the preset.
        bits: per coordinate of one rank's message.
        sent: over fp32.
        error: relative L2 error of one mean.
        kept: the error of the mean of several means of the same gradients, over ``error``: 1 if the error is always the
            same, and one over the root of their number without bias.
    """

    name: str
    bits: float
    sent: float
    error: float
    kept: float


def points(gradients: presets.Gradients, ranks: int, repeats: int) -> list[Point]:
    """All presets and rivals on the first ranks of some gradients, each repeated."""
    xs, found = gradients.ranks[:ranks], []
    for preset in OURS:
        virtual = VirtualRanks(ranks, gradients.segments, torch.float32, preset)
        means = [virtual.mean(xs, step).float() for step in range(repeats)]
        sent = virtual.bytes_sent / repeats / ring_bytes(xs[0].nbytes, ranks)
        found.append(_point(preset, virtual.wire_bits, sent, means, xs))
    for rival in RIVALS:
        generator = torch.Generator().manual_seed(ranks)
        means = [rival.mean(xs, generator) for _ in range(repeats)]
        found.append(_point(rival.name, rival.bits, rival.sent(ranks), means, xs))
    return found


def _point(name: str, bits: float, sent: float, means: list[Tensor], xs: list[Tensor]) -> Point:
    error = relative_error(means[0].double(), xs)
    return Point(name, bits, sent, error, relative_error(torch.stack(means).double().mean(0), xs) / error)


def _hadamard(rows: Tensor) -> Tensor:
    """Rows times the orthonormal Hadamard matrix, which is its own inverse."""
    count, length = rows.shape
    size = 1
    while size < length:
        pairs = rows.view(count, length // (2 * size), 2, size)
        rows = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).view(count, length)
        size *= 2
    return rows / math.sqrt(length)


def _normal_quantile(share: float) -> float:
    return float(torch.special.ndtri(torch.tensor(share, dtype=torch.float64)))


def measure(options: argparse.Namespace) -> Report:
    """Measure everything on all kinds of gradients."""
    kinds = {kind: presets.KINDS[kind](max(RANKS)) for kind in KINDS}
    report = Report(
        "rivals",
        "Relative L2 error (%) of one averaged gradient, beside the codecs of other tools",
        {"codec": "", "n": "d", "bits": ".2f", "sent / fp32": ".3f", **dict.fromkeys(KINDS, ".2f"), "kept": ".2f"},
        notes=(
            "bits: of one rank's message per coordinate, scales included, in the column gaussian. sent / fp32: bytes "
            "that a rank sends over those of an fp32 ring all-reduce; hooks that gather send n - 1 messages.",
            f"kept: the error that is left when {REPEATS} means of the same Gaussian gradients are averaged, over the "
            "error of one. Without bias it is 0.25; what rounds to nearest makes the same error each time and keeps 1.",
            "The rivals are written out from their formulas (see the module): their time and their memory are not "
            "measured here, and THC and max-min train with error feedback or tuned widths per layer where their papers "
            "say so. PowerSGD is not in the table, because its error without its memory says nothing.",
        ),
    )
    for ranks in RANKS:
        by_kind = [points(data, ranks, REPEATS if kind == KINDS[0] else 1) for kind, data in kinds.items()]
        for row in zip(*by_kind, strict=True):
            first = row[0]
            errors = [100 * point.error for point in row]
            report.rows.append([first.name, ranks, first.bits, first.sent, *errors, first.kept])
    report.notes = (*report.notes, *(in_words(report.rows, ranks) for ranks in RANKS))
    report.draw = lambda file: save_figure(report.rows, SHOWN_RANKS, file)
    return report


def in_words(rows: Sequence[Sequence[Any]], ranks: int) -> str:
    """Returns where a rival has a smaller error than this package's codecs at about as many bits, from the rows of one
    number of ranks.

    A row of the package stands for all rivals with as many bits, give or take half a bit. What a rival sends for its
    error is named, because hooks that gather, and THC on its way back, send more than the bits of one message say.
    """
    own = [row for row in rows if row[1] == ranks]
    ours = [row for row in own if row[0] in OURS]
    said = []
    for mine in ours:
        for rival in own:
            if rival in ours or abs(rival[2] - mine[2]) > SAME_BITS:
                continue
            ahead = [
                f"{kind} {theirs:.2f} % against {our:.2f} %"
                for kind, theirs, our in zip(KINDS, rival[4:], mine[4:], strict=False)
                if theirs < our
            ]
            if ahead:
                said.append(
                    f"`{rival[0]}` beats `{mine[0]}` on {', '.join(ahead)}, and sends {rival[3] / mine[3]:.1f} times "
                    "as much"
                )
    wins = "; ".join(said) or "at as many bits, no rival has a smaller error than this package"
    return f"Where a rival wins, n = {ranks}: {wins}."


def save_figure(rows: Sequence[Sequence[Any]], ranks: int, file: Path) -> None:
    """Draw error against bits, a panel for each kind of gradients and a line or a point for each tool."""
    chosen = [row for row in rows if row[1] == ranks]
    with drawn(file, figsize=(11, 8), layout="constrained") as figure:
        grid = figure.subplots(2, 2, sharex=True, sharey=True)
        for number, (axes, kind) in enumerate(zip(grid.flat, KINDS, strict=True)):
            _draw(axes, [(row[0], row[2], row[4 + number] / 100) for row in chosen])
            axes.set_title(kind)
        for axes in grid[-1]:
            axes.set_xlabel("bits per coordinate of one rank's message")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.supylabel(f"relative L2 error of one averaged gradient, n = {ranks}", fontsize=9, color="#333333")


#: Label, colour and marker of the points whose names begin so.
LOOKS = {
    "gqsgd": ("gqsgd, _4bit, _3bit, _2bit: unbiased", COLOURS["gqsgd"], "o"),
    "max-min": ("max-min as in CGX, nearest", "#0072b2", "s"),
    "THC": ("THC: 4 bits there, 8 back", "#009e73", "D"),
    "FP8": ("FP8, blocks of 1024", "#cc79a7", "P"),
    "torch per-tensor": ("torch per-tensor hook (gathers)", "#56b4e9", "v"),
    "torch per-channel": ("torch per-channel hook (gathers)", "#7b3294", "^"),
    "torch bf16": ("torch bf16 hook", "#8c564b", "X"),
    "torch fp16": ("torch fp16 hook", "#4d4d4d", "X"),
}


def _draw(axes: Axes, found: list[tuple[str, float, float]]) -> None:
    """Draw names, bits and errors."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([2, 3, 4, 8, 16], ["2", "3", "4", "8", "16"])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    widths = torch.linspace(1.8, 18, 200)
    axes.plot(widths, 2.0**-widths, color="#999999", linewidth=1, label="bound for normal numbers, 2^-bits")
    axes.set(xlim=(1.8, 19), ylim=(2e-4, 3))
    for start, (label, colour, marker) in LOOKS.items():
        own = [row for row in found if row[0].startswith(start)]
        bits, errors = [row[1] for row in own], [row[2] for row in own]
        axes.plot(bits, errors, marker=marker, color=colour, markeredgecolor="white", markersize=8, label=label)


if __name__ == "__main__":
    present(command_line(__doc__), measure, threads=1)
