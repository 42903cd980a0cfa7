"""Error of one quantised mean under trellis codes, against EDEN and companded codes; and the levels of the trellis.

    python -m benchmarks.trellis --save
    python -m benchmarks.trellis --levels --save

With ``--levels``, Lloyd's algorithm finds the levels anew: each becomes the mean of the normal numbers that the best
sequences have there.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch

from benchmarks import presets
from benchmarks.companded import lognormal
from benchmarks.report import Report, command_line, present
from lightning_gqsgd.codecs.trellis.codec import (
    FARTHEST,
    LANES,
    MAGNITUDES,
    alphabets,
    best_windows,
    thresholds_of,
)
from lightning_gqsgd.config import GQSGDConfig

#: The codecs that are compared, with the sizes of their blocks.
CODECS = (
    ("companded", 128),
    ("eden", 256),
    ("eden", 1024),
    ("trellis", 128),
    ("trellis", 256),
    ("trellis", 1024),
    ("trellis", 4096),
)
RANKS = (1, 4, 8)
#: Iterations of Lloyd's algorithm.
ITERATIONS = 8
_NUMEL = 1 << 18


def measure(options: argparse.Namespace) -> Report:
    """Measure errors, or find levels."""
    return levels() if options.levels else errors()


def errors() -> Report:
    """Measure all codecs on all kinds of gradients."""
    kinds = {
        **{f"gaussian, {ranks} ranks": presets.KINDS["gaussian"](ranks) for ranks in RANKS},
        "heavy-tailed, 8 ranks": presets.KINDS["heavy-tailed"](8),
        "t × lognormal, 8 ranks": lognormal(8),
        "90 % zeros, 8 ranks": presets.KINDS["sparse"](8),
    }
    report = Report(
        "trellis",
        "Relative L2 error (%) of one mean, trellis codes beside EDEN and companded codes, two_shot",
        {"bits": "d", "codec": "", "bits on the wire": ".2f"} | dict.fromkeys(kinds, ".2f"),
        notes=(
            "With 1 rank, the error is that of one message, by `gather` at 2 ranks with the same gradient. Other kinds "
            "are those of `python -m benchmarks.presets` and `python -m benchmarks.companded`.",
            "Shannon's bound for independent Gaussian gradients, at which one message has the squared error "
            "1/(4^b - 1), gives 85.0, 35.9, 17.3 and 8.6 % for 8 ranks at 1, 2, 3 and 4 bits.",
        ),
    )
    for bits in MAGNITUDES:
        for codec, block_size in CODECS:
            if bits == 1 and codec == "companded":
                continue
            config = GQSGDConfig(codec=codec, bits=bits, block_size=block_size, reducer="two_shot")
            measured = [_error(config, gradients) for gradients in kinds.values()]
            report.rows.append([bits, f"{codec}, blocks of {block_size}", bits + 16 / block_size, *measured])
    return report


def _error(config: GQSGDConfig, gradients: presets.Gradients) -> float:
    """The error of a configuration in per cent."""
    if len(gradients.ranks) > 1:
        return presets.percent_error(gradients, config)
    twice = presets.Gradients(gradients.ranks * 2, gradients.segments)
    # Errors of two messages are independent, so their mean has half the squared error.
    return math.sqrt(2) * presets.percent_error(twice, config.replaced(reducer="gather"))


def levels() -> Report:
    """Find the levels of sequences of 64 steps, and how their error depends on the number of steps."""
    report = Report(
        "trellis_levels",
        "Levels of the trellis for normal numbers, and the mean square error D + a/T of T steps",
        {"bits": "d", "magnitudes": "", "D": ".5f", "a": ".4f"},
        notes=("Magnitudes are in units of the root mean square. The last one is the outermost in two windows.",),
    )
    for bits in MAGNITUDES:
        magnitudes = trained(bits)
        # Of 64 steps and of 512: the two equations give D and a.
        short, long = (distortion(magnitudes, steps) for steps in (64, 512))
        start = (short - long) / (1 / 64 - 1 / 512)
        text = ", ".join(f"{magnitude:.4f}" for magnitude in magnitudes)
        report.rows.append([bits, text, long - start / 512, start])
    return report


def trained(bits: int) -> np.ndarray:
    """Returns the magnitudes after `ITERATIONS` of Lloyd's algorithm that begins at those of the codec."""
    magnitudes = np.array(MAGNITUDES[bits])
    generator = torch.Generator().manual_seed(bits)
    for _ in range(ITERATIONS):
        x, windows, numbers = _rounded(magnitudes, 64, generator)
        rows = alphabets(magnitudes)
        places = np.searchsorted(magnitudes, np.abs(rows)).flatten()
        cell = (windows * rows.shape[1] + numbers).flatten().numpy()
        sums = np.bincount(cell, x.flatten().double().numpy(), minlength=rows.size) * np.sign(rows).flatten()
        counts = np.bincount(cell, minlength=rows.size)
        magnitudes = np.bincount(places, sums) / np.bincount(places, counts)
    return magnitudes


def distortion(magnitudes: np.ndarray, steps: int) -> float:
    """Returns the mean square error of normal numbers at the levels of the best sequences of so many steps."""
    x, windows, numbers = _rounded(magnitudes, steps, torch.Generator().manual_seed(steps))
    rounded = torch.from_numpy(alphabets(magnitudes))[windows, numbers]
    return float((x - rounded).square().mean())


def _rounded(magnitudes: np.ndarray, steps: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Returns normal numbers, the windows of the best sequences, and the numbers of levels in the windows'
    alphabets."""
    x = torch.randn(_NUMEL // (steps * LANES), steps, LANES, generator=generator)
    limited, rows = x.clamp(-FARTHEST, FARTHEST), alphabets(magnitudes)
    windows = best_windows(limited, torch.full((len(x),), steps), rows)
    thresholds = torch.from_numpy(thresholds_of(rows))[windows]
    return x, windows, (limited[..., None] >= thresholds).sum(-1)


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--levels", action="store_true", help="find the levels, and measure no gradients")
    present(parser, measure, threads=1)
