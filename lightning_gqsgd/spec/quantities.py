"""Reads times and rates as users write them: a number and a unit."""

from __future__ import annotations

import re
from collections.abc import Mapping

#: Units of times, in seconds.
TIMES: dict[str, float] = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
#: Units of rates, in bits per second.
RATES: dict[str, float] = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}


def quantity(text: str, units: Mapping[str, float]) -> float | None:
    """Returns the value of a number with a unit, such as ``"20s"`` or ``"2.5 Gbit"``, or None if the text has another
    form.

    Args:
        text: decimal digits with at most one point, and a unit; spaces and the case of letters do not matter.
        units: the value of each unit.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zµ]+)\s*", text.lower())
    return float(found[1]) * units[found[2]] if found is not None and found[2] in units else None
