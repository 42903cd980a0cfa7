"""Bits that the noise of gradients allows, with one width for all parameters, and with a width for each of them.

    GQSGD_DATA=FOLDER python -m benchmarks.noise_layers --save

Virtual ranks train by the exact mean of their gradients. Every tenth step is measured as ``bits="auto"`` measures, once
for all parameters together and once for each parameter that is compressed, and the same rule takes the fewest bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor

from benchmarks.gradient_sequences import TASKS, gradients, segments_of
from benchmarks.report import Report, command_line, present
from lightning_gqsgd.adaptive.noise import EVERY, LEAST, NoiseGauge, NoiseSums, Way
from lightning_gqsgd.adaptive.sampling import GradientSampler
from lightning_gqsgd.config import MAX_SLOWDOWN, GQSGDConfig
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.kernels.layout import Segment

#: Every width that companded codes have: the more there are, the more a width for each parameter can save.
WIDTHS = (32, 8, 7, 6, 5, 4, 3, 2)
#: The width whose ratios R/V the table has.
SHOWN = 4
#: Ranks, and samples of a rank in a step.
CASES = ((2, 8), (8, 8), (8, 64))


class Layer(NamedTuple):
    """A parameter that is compressed, and where it is in a flat gradient."""

    segment: Segment
    part: slice


@dataclass
class Course:
    """What was chosen in one training, from the first decision on.

    Attributes:
        together: bits after each measurement, with one width.
        each: bits of each layer after each measurement, with a width for each.
        ratios: R/V of each layer at `SHOWN` bits, over that of all layers together, after each measurement.
    """

    together: list[int] = field(default_factory=list)
    each: list[list[int]] = field(default_factory=list)
    ratios: list[list[float]] = field(default_factory=list)


def layers_of(segments: Sequence[Segment]) -> list[Layer]:
    """The parameters that are compressed."""
    ends = np.cumsum([segment.numel for segment in segments])
    parts = (slice(int(end) - segment.numel, int(end)) for end, segment in zip(ends, segments, strict=True))
    return [Layer(segment, part) for segment, part in zip(segments, parts, strict=True) if not segment.raw]


def measured(sampler: GradientSampler, gradient: Tensor, mean: Tensor, layer: Layer, step: int) -> NoiseSums:
    """What one rank measures of one layer."""
    taken = sampler.take(gradient[layer.part], [layer.segment], step, 0)
    assert taken is not None
    sampler.watch(taken)(mean[layer.part])
    sampler.measure(taken)
    sums = sampler.collect()
    assert sums is not None
    return sums


def added(several: Sequence[NoiseSums]) -> NoiseSums:
    """The sums of several layers together."""
    return tuple(map(sum, zip(*several, strict=True)))


def follow(task: str, ranks: int, batch: int, steps: int) -> tuple[Course, list[int]]:
    """Train, and choose; returns what was chosen, and the number of coordinates of each layer."""
    torch.manual_seed(0)
    model = TASKS[task].make()
    layers = layers_of(segments_of(model))
    config = GQSGDConfig(bits="auto", allow=WIDTHS, sample_every=0)
    candidates = {bits: resolve(candidate, ranks) for bits, candidate in config.candidates().items()}
    ways = {bits: Way.of(candidate, ranks) for bits, candidate in candidates.items()}
    together, *each = (NoiseGauge(ways, ranks, MAX_SLOWDOWN) for _ in range(1 + len(layers)))
    sampler, course = GradientSampler(candidates), Course()
    for step, of_ranks in enumerate(gradients(TASKS[task], model, ranks, batch, steps)):
        if step % EVERY:
            continue
        mean = torch.stack(of_ranks).mean(0)
        sums = [[measured(sampler, gradient, mean, layer, step) for layer in layers] for gradient in of_ranks]
        together.observe([added(rank) for rank in sums])
        for gauge, column in zip(each, zip(*sums, strict=True), strict=True):
            gauge.observe(column)
        if together.count >= LEAST:
            course.together.append(together.floor)
            course.each.append([gauge.floor for gauge in each])
            course.ratios.append([gauge.ratio(SHOWN) / together.ratio(SHOWN) for gauge in each])
    return course, [layer.segment.numel for layer in layers]


def measure(options: argparse.Namespace) -> Report:
    """Follow all trainings."""
    report = Report(
        "noise_layers",
        "Bits that the noise of gradients allows: one width, or a width for each parameter",
        {
            "task": "",
            "ranks": "d",
            "batch": "d",
            "bits, one width": ".2f",
            "bits, a width each": ".2f",
            "difference": "+.2f",
            "R/V, least layer": ".2f",
            "R/V, largest layer": ".2f",
        },
        notes=(
            f"Bits: mean over compressed coordinates and {options.steps} steps, from the fifth measurement on, with "
            f"max_slowdown={MAX_SLOWDOWN:g} and allow={WIDTHS}. One more bit makes R/V about 4 to 5 times smaller.",
            f"R/V: of one parameter at {SHOWN} bits, over that of all together; medians over measurements of the "
            "parameter with the least and of that with the largest.",
        ),
    )
    cases = [(task, *case) for task in TASKS for case in CASES]
    with Progress(transient=True) as progress:
        for task, ranks, batch in progress.track(cases, description="trainings"):
            course, numels = follow(task, ranks, batch, options.steps)
            one, each = np.mean(course.together), np.average(np.mean(course.each, axis=0), weights=numels)
            ratios = np.array(course.ratios)
            extremes = [float(np.median(values)) for values in (ratios.min(axis=1), ratios.max(axis=1))]
            report.rows.append([task, ranks, batch, float(one), float(each), float(each - one), *extremes])
    return report


def enough(text: str) -> int:
    """A number of steps in which bits are chosen at least once."""
    steps, first = int(text), EVERY * (LEAST - 1)
    if steps <= first:
        raise argparse.ArgumentTypeError(
            f"{steps} must be above {first}: bits are chosen from the fifth measurement on"
        )
    return steps


def main() -> None:
    """Run the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=enough, default=200, help="of each training (default 200)")
    present(parser, measure)


if __name__ == "__main__":
    main()
