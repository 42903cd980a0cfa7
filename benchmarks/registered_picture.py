"""The picture of `benchmarks.registered`: where measured steps lie in their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pictures.style import drawn

#: Colours of steps inside and outside of their intervals.
INSIDE, OUTSIDE = "#2a6fbb", "#c0392b"


@dataclass(frozen=True)
class Point:
    """A setting's measured step and its interval, over the predicted step."""

    measured: float
    shortest: float
    longest: float

    @property
    def is_inside(self) -> bool:
        """Whether the interval holds."""
        return self.shortest <= self.measured <= self.longest


def draw(sets: Mapping[int, Sequence[Point]], file: Path) -> None:
    """Write the picture of the measured settings of some sets, in their order."""
    with drawn(file, figsize=(7.2, 1.3 * len(sets) + 0.6), layout="constrained") as figure:
        several = figure.subplots(len(sets), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, (number, points) in zip(several, sets.items(), strict=True):
            places = range(1, len(points) + 1)
            lowest, highest = [point.shortest for point in points], [point.longest for point in points]
            axes.vlines(places, lowest, highest, color="#c8d3df", linewidth=3.5)
            colours = [INSIDE if point.is_inside else OUTSIDE for point in points]
            axes.scatter(places, [point.measured for point in points], c=colours, s=12, zorder=3)
            axes.axhline(1.0, color="#888888", linewidth=0.8)
            inside = sum(point.is_inside for point in points)
            axes.set_title(f"set {number}: {inside} of {len(points)} inside", fontsize=9)
        several[-1].set_xlabel("setting", fontsize=9)
        figure.supylabel("measured / predicted step", fontsize=9)
