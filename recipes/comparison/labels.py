"""Places for the labels of a scatter plot: no label covers another label or a point."""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, float]
#: Left, bottom, right and top of a rectangle.
Rectangle = tuple[float, float, float, float]

DIRECTIONS = 16
RINGS = 24


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
