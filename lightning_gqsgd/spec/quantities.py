"""Reads and writes times, rates and bandwidths of memory as a number and a unit."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lightning_gqsgd.errors import ConfigError

#: Units of times, in seconds.
TIMES: dict[str, float] = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
#: Units of rates, in bits per second.
RATES: dict[str, float] = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
#: Units of the bandwidths of memory, in bytes per second.
BANDWIDTHS: dict[str, float] = {"gb/s": 1e9, "tb/s": 1e12}
#: The smallest and the largest meaningful rate in bits per second, bandwidth in bytes per second, and duration in
#: seconds.
_RATE_LIMITS = (1.0, 1e18)
_BANDWIDTH_LIMITS = (1e9, 1e15)
_TIME_LIMITS = (1e-12, 1e6)
#: Characters of a text that an error message shows at most.
_SHOWN = 40


def quantity(text: str, units: Mapping[str, float]) -> float | None:
    """Returns the value of a number with a unit, such as ``"20s"`` or ``"2.5 Gbit"``, or None if the text has another
    form.

    Args:
        text: decimal digits with at most one point, and a unit; spaces and the case of letters do not matter.
        units: the value of each unit.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zµ/]+)\s*", text.lower())
    return float(found[1]) * units[found[2]] if found is not None and found[2] in units else None


def bytes_per_second(text: str, option: str) -> float:
    """Returns the bytes per second of a rate such as ``"10gbit"``; ``option`` is the source of the text, for errors.

    Raises:
        ConfigError: if the text is no number with a unit, or if the rate is out of range.
    """
    return _read(text, option, RATES, "100mbit, 10gbit or 3.2tbit", _RATE_LIMITS, "1bit to 1000000tbit") / 8


def bandwidth(text: str, option: str) -> float:
    """Returns the bytes per second of a bandwidth of memory such as ``"600GB/s"``; see `bytes_per_second`."""
    return _read(text, option, BANDWIDTHS, "600GB/s or 3.35TB/s", _BANDWIDTH_LIMITS, "1GB/s to 1000TB/s")


def seconds(text: str, option: str) -> float:
    """Returns the seconds of a duration such as ``"50us"``; see `bytes_per_second`."""
    return _read(text, option, TIMES, "50us, 120ms or 1.5s", _TIME_LIMITS, "0.000001us to 1000000s")


def rate_in_words(rate: float) -> str:
    """Returns a rate in bytes per second as text, e.g. ``"10gbit"``."""
    bits = 8 * rate
    unit, factor = next(((name, size) for name, size in reversed(RATES.items()) if bits >= size), ("bit", 1))
    return f"{bits / factor:.3g}{unit}"


def duration(seconds: float) -> str:
    """Returns a duration as text: ``12.3 ms``, and from a second on ``1.23 s``."""
    seconds = seconds if seconds > 1e-12 else 0.0  # exposed time is a difference; rounding may make it negative
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _read(
    text: str, option: str, units: Mapping[str, float], examples: str, limits: tuple[float, float], in_words: str
) -> float:
    """Returns the value of a text; raises ConfigError if it has none, or one outside of the limits."""
    value = quantity(text, units)
    quoted = repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
    if value is None:
        raise ConfigError(f"{option} {quoted} is not a number and a unit; write e.g. {examples}")
    if value <= 0:
        raise ConfigError(f"{option} {quoted} has to be more than 0; write e.g. {examples}")
    if not limits[0] <= value <= limits[1]:
        raise ConfigError(f"{option} {quoted} is out of range: {in_words}; write a number in this range")
    return value
