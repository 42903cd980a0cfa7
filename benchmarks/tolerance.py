"""Mean relative difference per coordinate, by dither: which cases of a grid pass, and what the dither does to Adam on a
table of embeddings.

    python -m benchmarks.tolerance --save

torchft's tests of a quantised all-reduce bound the mean over coordinates of |estimate - mean| / |mean|, and let it be
at most 0.04. The grid here is built after that idea. A coordinate whose mean is exactly zero has a denominator of 1e-7.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import presets
from benchmarks.report import Report, command_line, present
from lightning_gqsgd.codecs.companded.codec import CompandedCodec
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.research.simulation import VirtualRanks, relative_error

LIMIT, SMALLEST = 0.04, 1e-7
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SIZES = (512, 2048, 4096)
BITS = (8, 4)
RANKS = (2, 3, 4)
MULTIPLIER = 100.0
#: Gradients of `benchmarks.presets` whose mean is rounded, too, and of how many ranks.
KINDS, AVERAGED = ("CNN trained", "LM trained"), 8

DEFAULT, ANY_ZERO = "companded, adaptive (default)", "companded, stochastic from any zero"
#: Fields of a configuration by the name of its dither. ``from_zeros`` is no field: it is the share of zeros from which
#: blocks of companded codes would be rounded stochastically, if the default changed.
DITHERS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "companded, subtractive": {"dither": "subtractive"},
    "companded, stochastic from 1/4 zeros": {"from_zeros": 0.25},
    ANY_ZERO: {"from_zeros": 0.0},
    "linear, adaptive": {"codec": "linear"},
    "linear, subtractive": {"codec": "linear", "dither": "subtractive"},
    "linear, stochastic": {"dither": "stochastic"},
    "exponential, 3 mantissa bits": {"codec": "exponential", "mantissa": 3},
}


def _uniform(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Equal on all ranks, as torchft's may be. Drawn in the dtype, so 16 bits give an exact zero now and then."""
    return torch.rand(shape[1:], dtype=dtype, generator=generator).expand(shape).clone()


def _apart(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, dtype=dtype, generator=generator)


def _ramp(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """From zero up, which the first coordinate is on all ranks."""
    return torch.linspace(0, 1, shape[1]).expand(shape).to(dtype).clone()


def _above(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Uniform, and never near zero."""
    return (0.1 + 0.9 * torch.rand(shape, generator=generator)).to(dtype)


def _normal(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def _thinned(zeros: float) -> Callable[[tuple[int, int], torch.dtype, torch.Generator], Tensor]:
    """Uniform and never near zero, with coordinates that are zero on all ranks."""

    def inputs(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        kept = torch.rand(shape[1], generator=generator) >= zeros
        return _above(shape, dtype, generator) * kept

    return inputs


INPUTS: dict[str, Callable[[tuple[int, int], torch.dtype, torch.Generator], Tensor]] = {
    "uniform, equal on all ranks": _uniform,
    "uniform": _apart,
    "uniform from 0.1 up": _above,
    "ramp from 0": _ramp,
    "normal": _normal,
    "half zeros": _thinned(0.5),
    "95 % zeros": _thinned(0.95),
}


@contextmanager
def threshold(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Fields without ``from_zeros``, which holds inside."""
    share = fields.get("from_zeros")
    rest = {name: value for name, value in fields.items() if name != "from_zeros"}
    if share is None:
        yield rest
    else:
        with patch.object(CompandedCodec, "_stochastic_from", share):
            yield rest


@dataclass(frozen=True)
class Outcome:
    """A case of the grid under a dither.

    Attributes:
        inputs, dtype: of the case.
        zeros: whether the mean of the ranks is exactly zero somewhere.
        difference: mean relative difference over all coordinates.
        elsewhere: the same over the coordinates whose mean is not zero.
    """

    inputs: str
    dtype: str
    zeros: bool
    difference: float
    elsewhere: float


def outcomes(fields: dict[str, Any]) -> list[Outcome]:
    """All cases of the grid under a dither."""
    found = []
    with threshold(fields) as rest:
        for inputs, name, numel, ranks in product(INPUTS, DTYPES, SIZES, RANKS):
            generator = torch.Generator().manual_seed(numel + ranks)
            dtype = DTYPES[name]
            xs = INPUTS[inputs]((ranks, numel), dtype, generator) * MULTIPLIER
            virtual = VirtualRanks(ranks, [Segment(0, numel, raw=False)], dtype, reducer="two_shot", **rest)
            mean = xs.double().mean(0)
            estimate = virtual.mean(list(xs), 0).double()
            off = (estimate - mean).abs() / mean.abs().clamp(min=SMALLEST)
            found.append(
                Outcome(inputs, name, bool((mean == 0).any()), float(off.mean()), float(off[mean != 0].mean()))
            )
    return found


def _passed(found: Sequence[Outcome], of: Callable[[Outcome], float] = lambda each: each.difference) -> str:
    return f"{sum(of(each) <= LIMIT for each in found)} of {len(found)}"


# --- Adam on a table of embeddings -----------------------------------------------------------------------------------

WORDS, TOUCHED, CLASSES, TOKENS = 1024, 819, 10, 8
#: Width of the rows that the table of results shows, and those of the last figures.
WIDTH, WIDTHS = 32, (8, 32, 128)
BATCH, WORKERS, SAMPLES = 16, 4, 2048
RATE_OF_LEARNING = 0.01
STEPS, SEEDS = 200, 3
EXACT = "exact mean"


class Embeddings:
    """Bags of words, whose classes a random table gives; a table and a matrix are trained.

    The first steps see all words equally often, and are averaged exactly. Later steps see four fifths of the words,
    and the most frequent of these most often. The other words are scattered over the table.
    """

    def __init__(self, width: int, seed: int) -> None:
        self.width, self.seed = width, seed
        generator = torch.Generator().manual_seed(seed)
        self.teacher = torch.randn(WORDS, CLASSES, generator=generator)
        order = torch.randperm(WORDS, generator=generator)
        self.untouched = order[TOUCHED:]
        self.often = torch.zeros(WORDS).scatter(0, order[:TOUCHED], 1 / torch.arange(1.0, TOUCHED + 1))
        self.segments = [Segment(0, WORDS * width, raw=False), Segment(1, width * CLASSES, raw=True)]
        table = 0.1 * torch.randn(WORDS, width, generator=generator)
        self.first = torch.cat([table.flatten(), torch.randn(width * CLASSES, generator=generator) / width**0.5])
        bags = torch.multinomial(self.often, SAMPLES * TOKENS, replacement=True, generator=generator)
        self.seen = bags.view(SAMPLES, TOKENS)
        drawn = torch.randint(len(self.untouched), (SAMPLES, TOKENS), generator=generator)
        self.unseen = self.untouched[drawn]

    def loss(self, x: Tensor, bags: Tensor) -> Tensor:
        """Cross entropy of bags of words."""
        table, matrix = x.split([WORDS * self.width, self.width * CLASSES])
        classes = self.teacher[bags].mean(1).argmax(1)
        logits = F.embedding(bags, table.view(WORDS, self.width)).mean(1) @ matrix.view(self.width, CLASSES)
        return F.cross_entropy(logits, classes)

    def train(self, x: Tensor, steps: int, often: Tensor, virtual: VirtualRanks | None) -> Tensor:
        """Train with Adam, from x; without virtual ranks, gradients are averaged exactly."""
        x = torch.nn.Parameter(x.clone())
        optimizer = torch.optim.Adam([x], lr=RATE_OF_LEARNING)
        for step in range(steps):
            generator = torch.Generator().manual_seed(10_007 * (self.seed + 1) + step)
            bags = torch.multinomial(often, WORKERS * BATCH * TOKENS, replacement=True, generator=generator)
            gradients = [
                torch.autograd.grad(self.loss(x, own), x)[0] for own in bags.view(WORKERS, BATCH, TOKENS).unbind()
            ]
            x.grad = torch.stack(gradients).mean(0) if virtual is None else virtual.mean(gradients, step)
            optimizer.step()
        return x.detach()


@dataclass(frozen=True)
class Ending:
    """The end of a training.

    Attributes:
        touched: loss of bags of the words that were trained on.
        untouched: loss of bags of the other words.
        moved: per cent of the other words' rows that are not what they were.
        far: root mean square of their change, in per cent of the table's.
    """

    touched: float
    untouched: float
    moved: float
    far: float


def adam(width: int, fields: dict[str, Any] | None, seeds: int = SEEDS, steps: int = STEPS) -> list[Ending]:
    """Train on four fifths of the words, once for each seed; without fields, gradients are averaged exactly."""
    endings = []
    for seed in range(seeds):
        problem = Embeddings(width, seed)
        start = problem.train(problem.first, steps, torch.ones(WORDS), None)
        with threshold(fields or {}) as rest:
            virtual = None
            if fields is not None:
                virtual = VirtualRanks(WORKERS, problem.segments, torch.float32, seed=seed, **rest)
            end = problem.train(start, steps, problem.often, virtual)
        before, after = (x[: WORDS * width].view(WORDS, width) for x in (start, end))
        moved = (after - before)[problem.untouched]
        endings.append(
            Ending(
                float(problem.loss(end, problem.seen)),
                float(problem.loss(end, problem.unseen)),
                100 * float((moved != 0).any(1).double().mean()),
                100 * float(moved.square().mean().sqrt() / before.square().mean().sqrt()),
            )
        )
    return endings


def errors(fields: dict[str, Any], kinds: dict[str, presets.Gradients]) -> list[float]:
    """Relative L2 error, in per cent, of one mean of gradients of each kind."""
    found = []
    with threshold(fields) as rest:
        for gradients in kinds.values():
            virtual = VirtualRanks(AVERAGED, gradients.segments, torch.float32, **rest)
            found.append(100 * relative_error(virtual.mean(gradients.ranks[:AVERAGED], 0), gradients.ranks[:AVERAGED]))
    return found


def price(bits: int, zeros: float) -> tuple[float, float]:
    """Relative L2 error, in per cent, of the mean of Gaussian gradients of which a share is zero, by today's default
    and if any zero made a block stochastic."""
    generator = torch.Generator().manual_seed(0)
    shape = (AVERAGED, 1 << 16)
    xs = list(torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) >= zeros))
    gradients = {"zeros": presets.Gradients(xs, [Segment(0, shape[1], raw=False)])}
    today, other = ({"bits": bits, **DITHERS[name]} for name in (DEFAULT, ANY_ZERO))
    return errors(today, gradients)[0], errors(other, gradients)[0]


def how_to_read(by_inputs: dict[str, dict[str, str]], moved: dict[int, float]) -> tuple[str, ...]:
    """The paragraphs under the table."""
    return (
        f"The grid: inputs {', '.join(INPUTS)}; {', '.join(DTYPES)}; {', '.join(map(str, SIZES))} coordinates; "
        f"{RANKS[0]} to {RANKS[-1]} ranks; `two_shot`. Inputs of 16 bits are drawn in their dtype, so a uniform one is "
        "exactly zero now and then. pass: cases in which the mean over coordinates of |estimate - mean| / |mean| is at "
        f"most {LIMIT}; the denominator is at least {SMALLEST}. a mean is zero: those of the cases in which some "
        "coordinate is exactly zero on average. zeros left out: the same cases, without these coordinates.",
        f"{', '.join(KINDS)}: relative L2 error of one mean of {AVERAGED} gradients of networks, trained as for the "
        "table of presets. They have hardly any zeros. Companded codes that are "
        "stochastic from 1/4 zeros, or from any zero, are no choice of a configuration: they show what another default "
        "would do. Today's default rounds a block stochastically where about nine tenths of it are zero.",
        "What any zero would cost, as relative L2 errors of one mean of Gaussian gradients of which a share is zero, "
        "by today's default and by the other rule: "
        + "; ".join(
            "{} bits, {:.0%} zeros: {:.2f} % and {:.2f} %".format(each, share, *price(each, share))
            for each in BITS
            for share in (0.01, 0.1, 0.5)
        )
        + ".",
        f"By inputs, {DEFAULT} at {BITS[0]} bits: "
        + "; ".join(f"{inputs} {passed}" for inputs, passed in by_inputs[f"{DEFAULT}, {BITS[0]} bits"].items())
        + ".",
        f"Adam: a table of {WORDS} words and {WIDTH} numbers each, whose gradients are dense, and a matrix; "
        f"{WORKERS} virtual ranks with {BATCH} bags of {TOKENS} words each, rate {RATE_OF_LEARNING}. {STEPS} "
        f"steps on all words are averaged exactly. Then {STEPS} steps on {TOUCHED} of the words follow, under "
        f"each dither. {SEEDS} seeds. loss: of bags of these words, at the end. by seed: its difference to "
        "the exact mean's, in units of 0.0001. rows moved: of the other words' rows, whose gradient is zero on all "
        "ranks in every step. moved by: root mean square of their change over the table's. untouched loss: of bags "
        "of the other words.",
        f"Rows moved by {DEFAULT} at {BITS[0]} bits, by the width of a row: "
        + ", ".join(f"{width}: {share:.1f} %" for width, share in moved.items())
        + ".",
    )


def measure(options: argparse.Namespace) -> Report:
    """The grid, and Adam."""
    report = Report(
        "tolerance",
        f"Cases with a mean relative difference of at most {LIMIT}, and Adam on a table of embeddings, by dither",
        {
            "dither": "",
            "bits": "d",
            "pass": "",
            "a mean is zero": "",
            "no mean is zero": "",
            "zeros left out": "",
            **dict.fromkeys(DTYPES, ""),
            **{f"{kind} (%)": ".2f" for kind in KINDS},
            "loss": ".4f",
            "less exact's": "+.4f",
            "by seed": "",
            "rows moved (%)": ".1f",
            "moved by (%)": ".1f",
            "untouched loss": ".4f",
            "untouched loss, less exact's": "+.4f",
        },
    )
    kinds = {kind: presets.KINDS[kind](AVERAGED) for kind in KINDS}
    exact = adam(WIDTH, None)
    report.rows.append(
        [EXACT, 32, *[None] * 7, *[0.0] * len(KINDS), fmean(each.touched for each in exact), None, None, 0.0, 0.0]
        + [fmean(each.untouched for each in exact), None],
    )
    by_inputs: dict[str, dict[str, str]] = {}
    for bits in BITS:
        for name, fields in DITHERS.items():
            found = outcomes({"bits": bits, **fields})
            by_inputs[f"{name}, {bits} bits"] = {
                inputs: _passed([each for each in found if each.inputs == inputs]) for inputs in INPUTS
            }
            ends = adam(WIDTH, {"bits": bits, **fields})
            apart = [each.touched - plain.touched for each, plain in zip(ends, exact, strict=True)]
            unseen = [each.untouched - plain.untouched for each, plain in zip(ends, exact, strict=True)]
            report.rows.append(
                [
                    name,
                    bits,
                    _passed(found),
                    _passed([each for each in found if each.zeros]),
                    _passed([each for each in found if not each.zeros]),
                    _passed([each for each in found if each.zeros], lambda each: each.elsewhere),
                    *(_passed([each for each in found if each.dtype == dtype]) for dtype in DTYPES),
                    *errors({"bits": bits, **fields}, kinds),
                    fmean(each.touched for each in ends),
                    fmean(apart),
                    ", ".join(f"{round(1e4 * value):+d}" for value in apart),
                    fmean(each.moved for each in ends),
                    fmean(each.far for each in ends),
                    fmean(each.untouched for each in ends),
                    fmean(unseen),
                ]
            )
    moved = {width: fmean(each.moved for each in adam(width, {"bits": BITS[0]})) for width in WIDTHS}
    report.raw = {"passed by inputs": by_inputs, "rows moved by width": moved}
    report.notes = how_to_read(by_inputs, moved)
    return report


if __name__ == "__main__":
    present(command_line(__doc__), measure, threads=1)
