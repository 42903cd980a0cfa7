"""Rates and durations as people write them."""

from __future__ import annotations

import re

from lightning_gqsgd.errors import ConfigError

_RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def bytes_per_second(text: str, option: str) -> float:
    """Bytes per second of a rate such as ``"10gbit"``; ``option``: where the text is from, for messages.

    Raises:
        ConfigError: the text is no number with a unit, or the rate is 0.
    """
    return _number(text, option, _RATES, "100mbit, 10gbit or 3.2tbit") / 8


def seconds(text: str, option: str) -> float:
    """Seconds of a duration such as ``"50us"``; see `bytes_per_second`."""
    return _number(text, option, _TIMES, "50us, 120ms or 1.5s")


def rate_in_words(rate: float) -> str:
    """A rate in bytes per second, as text."""
    bits = 8 * rate
    unit, factor = next(((name, size) for name, size in reversed(_RATES.items()) if bits >= size), ("bit", 1))
    return f"{bits / factor:.3g}{unit}"


def _number(text: str, option: str, units: dict[str, float] | dict[str, int], examples: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zµ]+)", text.strip().lower())
    if match is None or match[2] not in units:
        raise ConfigError(f"{option} {text!r} is not a number and a unit; write e.g. {examples}")
    value = float(match[1]) * units[match[2]]
    if value <= 0:
        raise ConfigError(f"{option} {text!r} has to be more than 0; write e.g. {examples}")
    return value
