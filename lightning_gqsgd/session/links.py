"""Finds the rate of this machine's link to others."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lightning_gqsgd.spec.quantities import bytes_per_second

#: Environment variable with the rate of the nodes' links, such as ``25gbit``, instead of what the kernel says. The
#: cards of most virtual machines do not say theirs.
VARIABLE = "GQSGD_LINK"


def given_rate() -> float:
    """Returns the bytes per second in ``GQSGD_LINK``; 0 if it is not set.

    Raises:
        ConfigError: if it is no rate.
    """
    given = os.environ.get(VARIABLE, "").strip()
    return bytes_per_second(given, VARIABLE) if given else 0.0


def link_rate(backend: str, root: Path = Path("/sys/class")) -> float:
    """Returns the bytes per second that this machine can send to others, according to its kernel; 0 if unknown.

    NCCL uses InfiniBand, unless ``NCCL_IB_DISABLE`` is set: the rates of the ports that ``NCCL_IB_HCA`` allows are
    added. If there are none, and over Gloo, it is the rate of the fastest network card that ``NCCL_SOCKET_IFNAME`` or
    ``GLOO_SOCKET_IFNAME`` allows. The rates of virtual cards, such as those of containers, mean nothing. A bond or a
    VLAN has the rate of the fastest card below it.

    Args:
        backend: ``"nccl"`` or ``"gloo"``.
        root: where Linux describes devices.
    """
    if backend != "nccl":
        # Gloo takes whole names.
        return max(_cards(root / "net", f"={os.environ.get('GLOO_SOCKET_IFNAME', '')}"), default=0.0)
    has_infiniband = os.environ.get("NCCL_IB_DISABLE", "").strip() in ("", "0")
    ports = _ports(root / "infiniband", os.environ.get("NCCL_IB_HCA", "")) if has_infiniband else ()
    return sum(ports) or max(_cards(root / "net", os.environ.get("NCCL_SOCKET_IFNAME", "")), default=0.0)


def _is_allowed(name: str, given: str) -> bool:
    """Returns whether one of NCCL's lists of interfaces allows an interface.

    ``eth,ib0`` allows names that begin so, ``=eth0`` whole names, ``^docker`` and ``^=eth0`` all others. An empty list
    allows all. A port after a colon is ignored.
    """
    excludes = given.startswith("^")
    listed = given.removeprefix("^")
    names = [one.strip().partition(":")[0] for one in listed.removeprefix("=").split(",") if one.strip()]
    if not names:
        return True
    is_listed = name in names if listed.startswith("=") else name.startswith(tuple(names))
    return is_listed != excludes


def _ports(folder: Path, given: str) -> Iterator[float]:
    for port in sorted(folder.glob("*/ports/*")):
        with suppress(OSError):
            rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec", (port / "rate").read_text())
            if rate and "ACTIVE" in (port / "state").read_text() and _is_allowed(port.parts[-3], given):
                yield float(rate[1]) * 1e9 / 8


def _cards(folder: Path, given: str) -> Iterator[float]:
    return (_rate_of(card) for card in sorted(folder.glob("*")) if _is_allowed(card.name, given))


def _rate_of(card: Path) -> float:
    if (card / "device").exists():
        return (card_rate(card) or 0) * 1e6 / 8
    return max(map(_rate_of, card.glob("lower_*")), default=0.0)


def card_rate(card: Path) -> int | None:
    """Returns the rate of a network card in Mbit/s, according to its driver; None if the driver does not say it, or if
    no cable is connected.

    Args:
        card: the card's folder below ``/sys/class/net``.
    """
    with suppress(OSError, ValueError):
        megabits = int((card / "speed").read_text())
        return megabits if megabits > 0 else None
    return None
