"""What a member checks at the lighthouse before it joins: an address, and others that fit.

A lighthouse has one list of members, whatever they train. So each member's name says what it needs in common with the
others, and a newcomer reads their names first. Otherwise it would break the merges of those that are there.
"""

from __future__ import annotations

import re
import socket
import time
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.session.opening import digest_of_facts
from lightning_gqsgd.spec.quantities import TIMES
from lightning_gqsgd.version import __version__

#: The environment variable with the lighthouse's address.
LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"

#: Seconds without a sign of life after which a member is taken for gone.
_ALIVE_S = 5.0

#: Seconds for which a member waits for a lighthouse that is started at the same time.
_PATIENCE_S = 30.0

#: How the lighthouse's page lists members.
_SEEN = re.compile(r"^\s*(\S.*?): seen ([\d.]+)(ns|µs|us|ms|s) ago\s*$", re.MULTILINE)
_UNITS = {"ns": 1e-9, **TIMES}

#: How it lists those that took part in the latest merge: name, number of merges before it, address.
_MERGED = re.compile(r"<b>([^<]+)</b> <br/>\s*Step: (\d+) <br/>\s*Manager: (\S+) <br/>")


def lighthouse_address(environment: Mapping[str, str]) -> str:
    """Returns the lighthouse's address, ``http://host:port``.

    Raises:
        ConfigError: the environment has none, or one that is no address.
    """
    value = environment.get(LIGHTHOUSE, "").strip()
    if not value:
        raise ConfigError(
            f"elastic=True needs a lighthouse: start one with `gqsgd lighthouse`, and set {LIGHTHOUSE}=host:port for "
            "each process"
        )
    address = value if "//" in value else f"http://{value}"
    parts = urlsplit(address)
    try:
        is_address = bool(parts.hostname) and parts.port is not None
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(f"{LIGHTHOUSE}={value!r} is no address; write host:port, e.g. 10.0.0.1:29510")
    return address


def own_host(lighthouse: str) -> str:
    """Returns the address of this machine on the way to the lighthouse, where other members reach it too.

    Raises:
        ConfigError: there is no such host.
    """
    parts = urlsplit(lighthouse)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"the lighthouse {lighthouse} cannot be reached ({error}); see `gqsgd lighthouse`") from error


def name_for(facts: Mapping[str, Any]) -> str:
    """Returns the name of members with these facts, of letters, digits, dots and hyphens."""
    return f"gqsgd-{__version__}-{digest_of_facts(facts) % 2**64:016x}"


def check_others(lighthouse: str, name: str, timeout_s: float) -> list[str]:
    """Check that the members that a lighthouse knows have the same name.

    A lighthouse that does not answer may be starting, as the members are. So this asks again for up to 30 seconds.

    Args:
        lighthouse: its address.
        name: of this member, see `name_for`.
        timeout_s: how long to wait for it.

    Returns:
        The addresses of the managers of those that have merged; those with the most merges first.

    Raises:
        ConfigError: no lighthouse answers there, or members train something else.
    """
    deadline = time.monotonic() + min(timeout_s, _PATIENCE_S)
    while True:
        try:
            page = _page_of(lighthouse, timeout_s)
            break
        except ConfigError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    alive = _alive_on(page, _ALIVE_S)
    for member in alive:
        other = member.partition(":")[0]
        if other != name:
            raise ConfigError(f"the lighthouse {lighthouse} has members that do not fit: {_difference(other, name)}")
    merged = [(int(merges), address) for member, merges, address in _MERGED.findall(page) if member in alive]
    return [address for _, address in sorted(merged, key=lambda entry: -entry[0])]


def members_at(lighthouse: str, timeout_s: float, alive_s: float = _ALIVE_S) -> list[str]:
    """Returns the members that have given a lighthouse a sign of life: name, colon, and what no other has; sorted.

    Args:
        lighthouse: its address.
        timeout_s: how long to wait for it.
        alive_s: seconds since the sign of life.

    Raises:
        ConfigError: no lighthouse answers there.
    """
    return _alive_on(_page_of(lighthouse, timeout_s), alive_s)


def _page_of(lighthouse: str, timeout_s: float) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{lighthouse}/status", timeout=timeout_s) as answer:
            page: str = answer.read().decode(errors="replace")
    except OSError as error:
        raise ConfigError(
            f"no lighthouse answers at {lighthouse} ({error}); start one with `gqsgd lighthouse`, and see that "
            f"{LIGHTHOUSE} has its address"
        ) from error
    return page


def _alive_on(page: str, alive_s: float) -> list[str]:
    seen = _SEEN.findall(page)
    return sorted(member for member, number, unit in seen if float(number) * _UNITS[unit] <= alive_s)


def _difference(other: str, own: str) -> str:
    if not other.startswith("gqsgd-"):
        return f"{other[:80]!r} is no training of this package; start a lighthouse for each training"
    version = other.removeprefix("gqsgd-").rpartition("-")[0]
    if version != __version__:
        return f"they have version {version} of lightning_gqsgd, and this one {__version__}; install the same on all"
    return (
        "they have another model, other options or another compression than this one; start all with the same, or a "
        "lighthouse for each training"
    )
