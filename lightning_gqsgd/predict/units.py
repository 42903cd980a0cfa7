"""Rates and durations as people write them."""

from __future__ import annotations

import re

from lightning_gqsgd.errors import ConfigError

_RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
#: The smallest and the largest rate in bits per second, and duration in seconds, that mean anything.
_RATE_LIMITS = (1.0, 1e18)
_TIME_LIMITS = (1e-12, 1e6)
#: Characters of a text that a message shows.
_SHOWN = 40


def bytes_per_second(text: str, option: str) -> float:
    """Bytes per second of a rate such as ``"10gbit"``; ``option``: where the text is from, for messages.

    Raises:
        ConfigError: the text is no number with a unit, or the rate is out of range.
    """
    bits = _number(text, option, _RATES, "100mbit, 10gbit or 3.2tbit")
    _check_range(bits, text, option, _RATE_LIMITS, "1bit to 1000000tbit")
    return bits / 8


def seconds(text: str, option: str) -> float:
    """Seconds of a duration such as ``"50us"``; see `bytes_per_second`."""
    duration = _number(text, option, _TIMES, "50us, 120ms or 1.5s")
    _check_range(duration, text, option, _TIME_LIMITS, "0.000001us to 1000000s")
    return duration


def rate_in_words(rate: float) -> str:
    """A rate in bytes per second, as text."""
    bits = 8 * rate
    unit, factor = next(((name, size) for name, size in reversed(_RATES.items()) if bits >= size), ("bit", 1))
    return f"{bits / factor:.3g}{unit}"


def _number(text: str, option: str, units: dict[str, float] | dict[str, int], examples: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zµ]+)", text.strip().lower())
    if match is None or match[2] not in units:
        raise ConfigError(f"{option} {_quoted(text)} is not a number and a unit; write e.g. {examples}")
    value = float(match[1]) * units[match[2]]
    if value <= 0:
        raise ConfigError(f"{option} {_quoted(text)} has to be more than 0; write e.g. {examples}")
    return value


def _check_range(value: float, text: str, option: str, limits: tuple[float, float], words: str) -> None:
    """Raise ConfigError for a value beyond the limits, which infinity is as well."""
    if not limits[0] <= value <= limits[1]:
        raise ConfigError(f"{option} {_quoted(text)} is out of range: {words}; write a number in this range")


def _quoted(text: str) -> str:
    """A text in quotes, without its end if it is long."""
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
