"""Rates, delays and shares of processors, as texts of the command line write them."""

from __future__ import annotations

import re

from lightning_gqsgd.spec.quantities import RATES, TIMES, quantity
from netlab.errors import NetLabError

#: The longest delay, in seconds.
_MOST_DELAY_S = 10.0
#: The shortest latency that the switch keeps, in seconds: its own work takes a part of that.
_LEAST_LATENCY_S = 500e-6
#: The smallest share of a processor: one millisecond of every period, the least that Linux takes.
_LEAST_CPUS = 0.05


def parse_rate(text: str) -> int | None:
    """The rate that a text names.

    Args:
        text: a number and a unit, e.g. ``"100mbit"`` or ``"2.5gbit"``, or ``"none"`` for an unshaped link.

    Returns:
        Bits per second, 10^6 to 10^11; None for ``"none"``.

    Raises:
        NetLabError: the text is no rate, or the rate is out of range.
    """
    if text == "none":
        return None
    rate = quantity(text, RATES)
    if rate is None:
        raise NetLabError(f"rate {text!r} is not a number and a unit; write e.g. 100mbit, 1gbit, 2.5gbit or none")
    if not 10**6 <= rate <= 10**11:
        raise NetLabError(f"rate {text!r} is out of range: 1mbit to 100gbit")
    return int(rate)


def parse_delays(latency: str, jitter: str) -> tuple[float, float]:
    """The one-way latency between two hosts and its jitter that two texts name.

    Args:
        latency: a number and a unit, e.g. ``"40ms"`` or ``"500us"``, or ``"none"`` for what the kernel itself takes.
        jitter: as ``latency``, and at most as long.

    Returns:
        Both in seconds; 0 for ``"none"``.

    Raises:
        NetLabError: a text is no time, or it is out of range.
    """
    latency_s, jitter_s = _seconds("latency", latency), _seconds("jitter", jitter)
    if latency_s and not _LEAST_LATENCY_S <= latency_s <= _MOST_DELAY_S:
        raise NetLabError(f"latency {latency!r} is out of range: 500us to 10s, or none")
    if jitter_s > latency_s:
        raise NetLabError(
            f"jitter {jitter!r} is longer than latency {latency!r}, and no packet arrives before it is sent; give at "
            "most the latency"
        )
    return latency_s, jitter_s


def _seconds(name: str, text: str) -> float:
    if text == "none":
        return 0.0
    seconds = quantity(text, TIMES)
    if seconds is None:
        raise NetLabError(f"{name} {text!r} is not a number and a unit; write e.g. 40ms, 500us, 0.1s or none")
    return seconds


def parse_cpus(text: str, cores: int) -> float | None:
    """The processor time of a host that a text names.

    Args:
        text: processors, e.g. ``"0.25"`` for a quarter of one, or ``"none"`` for no limit.
        cores: number of processors of this machine.

    Returns:
        Seconds of processor time in each second; None for ``"none"``.

    Raises:
        NetLabError: the text is no number, or it is out of range.
    """
    if text == "none":
        return None
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise NetLabError(f"cpus {text!r} is not a number of processors; write e.g. 1, 0.25 or none")
    if not _LEAST_CPUS <= float(text) <= cores:
        raise NetLabError(
            f"cpus {text!r} is out of range: {_LEAST_CPUS} to {cores}, the processors of this machine, or none"
        )
    return float(text)
