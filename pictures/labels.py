"""Labels of a scatter plot, at places where none covers another label or a point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]
#: Left, bottom, right and top of a rectangle.
Rectangle = tuple[float, float, float, float]

DIRECTIONS = 16
RINGS = 24
#: Distances in points: from a point to its label, and that from which on a line leads from one to the other.
GAP, FAR = 7, 9


def label_points(
    figure: Figure,
    axes: Axes,
    points: Sequence[Point],
    names: Sequence[str],
    colours: Sequence[str],
    *,
    size: float = 8.5,
    taken: Sequence[Artist] = (),
) -> None:
    """Write names next to their points; a name that finds no room near its point gets a line to it.

    Everything else has to be drawn, because the layout of the figure stays as it is from here on.

    Args:
        figure: the whole picture.
        axes: where the points are.
        points: in the units of the axes.
        names: of the points.
        colours: of the names.
        size: of the text, in points.
        taken: what names have to leave free, e.g. a legend.
    """
    from matplotlib.patheffects import withStroke

    labels = [
        axes.annotate(name, point, color=colour, fontsize=size, zorder=5)
        for name, point, colour in zip(names, points, colours, strict=True)
    ]
    for label in labels:
        label.set_in_layout(False)
        label.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
    figure.draw_without_rendering()  # the layout decides where the points are
    figure.set_layout_engine("none")
    to_pixels = axes.transData
    places = [tuple(to_pixels.transform(point)) for point in points]
    frames = [label.get_window_extent() for label in labels]
    found = place_labels(
        places,
        [(frame.width + 4, frame.height + 2) for frame in frames],
        axes.get_window_extent().extents,
        gap=figure.dpi / 72 * GAP,
        taken=[one.get_window_extent().extents for one in taken],
    )
    to_points = 72 / figure.dpi
    for label, place, (left, bottom, right, top), colour in zip(labels, places, found, colours, strict=True):
        middle = (left + right) / 2, (bottom + top) / 2
        label.set_position(((middle[0] - place[0]) * to_points, (middle[1] - place[1]) * to_points))
        label.set_anncoords("offset points")
        label.set_horizontalalignment("center")
        label.set_verticalalignment("center")
        edge = min(max(place[0], left), right), min(max(place[1], bottom), top)
        if math.dist(edge, place) * to_points > FAR:
            axes.plot(*to_pixels.inverted().transform([place, edge]).T, color=colour, lw=0.6, alpha=0.8, zorder=3)


def place_labels(
    points: Sequence[Point], sizes: Sequence[Point], bounds: Rectangle, gap: float, taken: Sequence[Rectangle] = ()
) -> list[Rectangle]:
    """One rectangle for each label, as near to its point as there is room.

    A rectangle lies inside ``bounds`` and off all points and other labels. Points in a crowd choose first. A label that
    finds no free place takes the place with the least overlap.

    Args:
        points: x and y of each point, in pixels or in any unit that is the same on both axes.
        sizes: width and height of each label.
        bounds: the rectangle that holds all labels.
        gap: distance from a point's middle to its label, and the step of the search; a point counts as a square of this
            size.
        taken: further rectangles that labels have to leave free.
    """
    dots = [_around(point, gap, gap) for point in points]
    reach = 2 * max((width for width, _ in sizes), default=0.0)
    crowd = [sum(math.dist(point, other) < reach for other in points) for point in points]
    placed: dict[int, Rectangle] = {}
    for number in sorted(range(len(points)), key=lambda index: -crowd[index]):
        fixed = [*dots, *taken, *placed.values()]
        best, least = dots[number], math.inf
        for candidate in _candidates(points[number], sizes[number], gap):
            overlap = sum(_common(candidate, other) for other in fixed) + _outside(candidate, bounds)
            if overlap < least:
                best, least = candidate, overlap
            if not overlap:
                break
        placed[number] = best
    return [placed[number] for number in range(len(points))]


def _candidates(point: Point, size: Point, gap: float) -> list[Rectangle]:
    """Places around a point, near places first; at equal distance, right and left before above and below."""
    places = []
    angles = sorted((2 * math.pi * turn / DIRECTIONS for turn in range(DIRECTIONS)), key=lambda angle: -math.cos(angle))
    for ring in range(RINGS):
        for angle in angles:
            across, up = math.cos(angle), math.sin(angle)
            distance = gap * (1 + ring)
            # The distance is measured to the label's nearest edge or corner.
            middle = (point[0] + across * (distance + size[0] / 2), point[1] + up * (distance + size[1] / 2))
            places.append(_around(middle, *size))
    return places


def _around(middle: Point, width: float, height: float) -> Rectangle:
    return middle[0] - width / 2, middle[1] - height / 2, middle[0] + width / 2, middle[1] + height / 2


def _common(first: Rectangle, second: Rectangle) -> float:
    """Area of the intersection of two rectangles."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    return width * height if width > 0 and height > 0 else 0.0


def _outside(rectangle: Rectangle, bounds: Rectangle) -> float:
    """Area of the part of a rectangle that is not in ``bounds``."""
    return (rectangle[2] - rectangle[0]) * (rectangle[3] - rectangle[1]) - _common(rectangle, bounds)
