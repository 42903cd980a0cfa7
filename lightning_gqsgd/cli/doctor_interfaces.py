"""Finds the network interfaces of a host and warns of slow ones that traffic uses; for ``gqsgd doctor --nodes``."""

from __future__ import annotations

import contextlib
import fcntl
import re
import socket
import struct
from collections.abc import Sequence
from ipaddress import IPv6Address
from pathlib import Path
from typing import NamedTuple

from lightning_gqsgd.session.links import card_rate

#: Linux's request for an interface's IPv4 address.
_SIOCGIFADDR = 0x8915
#: Linux's scope of IPv6 addresses that are not only for the network of one switch.
_GLOBAL = 0
#: Interfaces between the containers and virtual machines of one host, which reach no other host.
_OF_ONE_HOST = re.compile(r"docker|br-|virbr|veth|cni|flannel|lxc|lxd|podman")
LOOPBACK = "lo"


class Interface(NamedTuple):
    """A network interface that is up.

    Attributes:
        name: its name.
        address: its IPv4 address, or else an IPv6 address; None: it has none, or cannot be asked.
        mbit: rate of its link in Mbit/s, as the driver says; None: it does not say.
        sent: bytes that have left the host through it.
        of_one_host: whether it only reaches other containers of this host, or the host itself.
    """

    name: str
    address: str | None
    mbit: int | None
    sent: int
    of_one_host: bool

    @property
    def speed(self) -> str:
        """The rate of the link in words."""
        return "not known" if self.mbit is None else f"{self.mbit / 1000:g} Gbit/s"


def interfaces(sys_net: Path = Path("/sys/class/net"), counters: Path = Path("/proc/self/net/dev")) -> list[Interface]:
    """Returns the interfaces of this host that are up, the loopback among them.

    Args:
        sys_net: where Linux describes interfaces.
        counters: where Linux counts bytes; that of this process's network namespace.
    """
    sent = _sent(counters)
    found = []
    for name in sent or [name for _, name in socket.if_nameindex()]:
        state = _read(sys_net / name / "operstate")
        if state == "down":
            continue
        is_bridge = (sys_net / name / "bridge").is_dir()
        alone = name == LOOPBACK or is_bridge or _OF_ONE_HOST.match(name) is not None
        found.append(Interface(name, address_of(name), card_rate(sys_net / name), sent.get(name, 0), alone))
    return found


def busiest(before: Sequence[Interface], after: Sequence[Interface]) -> Interface | None:
    """Returns the interface through which most bytes left between two looks; None if none sent any."""
    earlier = {interface.name: interface.sent for interface in before}
    grown = {interface: interface.sent - earlier.get(interface.name, interface.sent) for interface in after}
    most = max(grown, key=lambda interface: grown[interface], default=None)
    return most if most is not None and grown[most] > 0 else None


def warnings(host: str, used: Interface | None, present: Sequence[Interface], is_alone: bool) -> list[str]:
    """Returns warnings about the interface that traffic takes, each with its remedy.

    Args:
        host: name of the host.
        used: the interface in use; None if it is not known.
        present: all interfaces of the host.
        is_alone: whether all ranks are on this host.
    """
    if used is None or is_alone:
        return []
    others = [other for other in present if other.address is not None and not other.of_one_host and other != used]
    best = max(others, key=lambda other: other.mbit or 0, default=None)
    if used.of_one_host:
        remedy = _remedy(best.name) if best else "give the host an interface that reaches the others"
        return [f"{host}: traffic takes {used.name}, which is for containers of one host; {remedy}"]
    if best is not None and best.mbit and used.mbit and best.mbit > used.mbit:
        return [
            f"{host}: traffic takes {used.name} ({used.speed}), and {best.name} ({best.speed}) is up, too; if it "
            f"reaches the other hosts, {_remedy(best.name)}"
        ]
    return []


def _remedy(name: str) -> str:
    return f"set GLOO_SOCKET_IFNAME={name} and NCCL_SOCKET_IFNAME={name}"


def _sent(counters: Path) -> dict[str, int]:
    """Returns the bytes sent, by name of the interface; empty where the system does not count like Linux."""
    text = _read(counters)
    rows = [line.partition(":") for line in (text or "").splitlines() if ":" in line]
    return {name.strip(): int(numbers.split()[8]) for name, _, numbers in rows}


def address_of(name: str, ipv6: Path = Path("/proc/self/net/if_inet6")) -> str | None:
    """Returns the address of an interface by which other hosts reach it; None if it has none.

    Args:
        name: name of the interface.
        ipv6: where Linux lists addresses of IPv6.
    """
    request = struct.pack("256s", name.encode()[:15])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return socket.inet_ntoa(fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)[20:24])
    rows = [line.split() for line in (_read(ipv6) or "").splitlines()]
    return next(
        (str(IPv6Address(int(row[0], 16))) for row in rows if row[5] == name and int(row[3], 16) == _GLOBAL), None
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
