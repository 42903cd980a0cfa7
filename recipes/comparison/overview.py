"""Several kinds of hardware side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from recipes.comparison.page import Overview
from recipes.comparison.results import REFERENCE, Line, target_text


def side_by_side(by_hardware: Mapping[str, Sequence[Line]], target: float) -> list[Overview]:
    """Tables with a row for each variant and a column for each kind of hardware: seconds to the target, and steps.

    There are none for one kind of hardware, whose own table says the same.
    """
    if len(by_hardware) < 2:
        return []
    metric = next(iter(by_hardware.values()))[0].metric
    beside = f"; in brackets, how many times faster than {REFERENCE} there"
    made = [Overview(f"Step (ms){beside}", _rows(by_hardware, lambda line: 1e3 * line.step_s))]
    if not math.isnan(target):
        title = f"Training seconds to {metric.label} {target_text(metric, target)}{beside}"
        made.insert(0, Overview(title, _rows(by_hardware, lambda line: line.time_to_target)))
    return made


def _rows(by_hardware: Mapping[str, Sequence[Line]], value: Callable[[Line], float]) -> list[list[str]]:
    values = {name: {line.variant: value(line) for line in lines} for name, lines in by_hardware.items()}
    variants = dict.fromkeys(line.variant for lines in by_hardware.values() for line in lines)
    rows = [[variant, *(_cell(column, variant) for column in values.values())] for variant in variants]
    return [["strategy", *values], *rows]


def _cell(column: Mapping[str, float], variant: str) -> str:
    if variant not in column:
        return "–"
    own, reference = column[variant], column.get(REFERENCE, math.nan)
    if math.isinf(own):
        return "not reached"
    faster = f" ({reference / own:.1f}×)" if variant != REFERENCE and math.isfinite(reference) else ""
    return f"{own:,.1f}{faster}"
