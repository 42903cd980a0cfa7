"""The checks of a member before it joins: whether the lighthouse has an address, and whether the other members fit.

A lighthouse has one list of all members, even if they train different models. So each member's name has a digest of the
facts that it must have in common with the others, and a new member reads their names first. Otherwise it would break
the merges of the existing members.
"""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from lightning_gqsgd.errors import ConfigError, counted
from lightning_gqsgd.spec.quantities import TIMES

#: The environment variable with the lighthouse's address.
LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"

#: Milliseconds between two signs of life of a member. Without them, the lighthouse considers it dead.
HEARTBEAT_MS = 500

#: Seconds without a sign of life after which a member is considered gone.
_ALIVE_S = 5.0

#: Seconds that a member waits for a lighthouse that may be starting at the same time.
_PATIENCE_S = 30.0

_MOST_PORT = 2**16 - 1

#: Host and port; an IPv6 address is in brackets. torchft's clients take no zone, as in ``[fe80::1%eth0]``.
_ADDRESS = re.compile(r"(?:http://)?(\[[0-9a-fA-F:.]+\]|[^\s\[\]:/@?#%]+):(\d{1,5})/?")

#: The heading of the list of members on the lighthouse's page, by which the page is recognised.
_HEADING = "Heartbeats"

#: How the page says that there are too few members.
_TOO_FEW = re.compile(r"only have (\d+) participants, need min_replicas (\d+)")

#: How the lighthouse's page lists members.
_SEEN = re.compile(r"^\s*(\S.*?): seen ([\d.]+)(ns|µs|us|ms|s) ago\s*$", re.MULTILINE)
_UNITS = {"ns": 1e-9, **TIMES}

#: How the page lists the members of the latest merge: name, number of merges before it, address.
_MERGED = re.compile(r"<b>([^<]+)</b> <br/>\s*Step: (\d+) <br/>\s*Manager: (\S+) <br/>")


def host_and_port(text: str) -> tuple[str, int] | None:
    """Returns the host and the port of an address, ``host:port`` or ``[IPv6 address]:port``; None if it is no address.

    The host of an IPv6 address includes its brackets.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[2]) > _MOST_PORT:
        return None
    return match[1], int(match[2])


def in_brackets(host: str) -> str:
    """Returns a host as it is written before a colon and a port: an IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host else host


def lighthouse_address(environment: Mapping[str, str]) -> str:
    """Returns the lighthouse's address, ``http://host:port``.

    Raises:
        ConfigError: if the environment variable is unset, or is no address.
    """
    value = environment.get(LIGHTHOUSE, "").strip()
    if not value:
        raise ConfigError(
            f"elastic=True needs a lighthouse: start one with `gqsgd lighthouse`, and set {LIGHTHOUSE}=host:port for "
            "each process"
        )
    found = host_and_port(value)
    if found is None or found[1] == 0:
        raise ConfigError(
            f"{LIGHTHOUSE}={value!r:.100} is not an address; write host:port, e.g. 10.0.0.1:29510 or [fd00::1]:29510"
        )
    return f"http://{found[0]}:{found[1]}"


def check_resolves(lighthouse: str) -> None:
    """Raise ConfigError if the lighthouse's host has no address."""
    host, port = _socket_address(lighthouse)
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError for an invalid name, e.g. with a label of 64 letters
        raise _not_reached(lighthouse, error) from error


def own_host(lighthouse: str, timeout_s: float, others: Sequence[str] = ()) -> str:
    """Returns the address of this machine in connections to the lighthouse. Other members can also reach it there.

    A host name may have several addresses, and the lighthouse may listen at only one of them.

    Args:
        lighthouse: address of a lighthouse that answers.
        timeout_s: how long to wait for it.
        others: the addresses of other members, see `check_others`.

    Raises:
        ConfigError: if the lighthouse cannot be reached, or if this machine and that of another member reach each other
            by no address: one of them finds the lighthouse at localhost, and the other one is another machine.
    """
    try:
        with socket.create_connection(_socket_address(lighthouse), timeout_s) as connection:
            own = str(connection.getsockname()[0])
            is_here = own == connection.getpeername()[0]
    except OSError as error:
        raise _not_reached(lighthouse, error) from error
    for other in filter(None, map(host_and_port, others)):
        host = other[0].strip("[]")
        if _is_loopback(own) and not _is_of_this_machine(host):
            raise ConfigError(
                f"this member finds the lighthouse {lighthouse} at {own}, where the member at {host} cannot reach it; "
                f"set {LIGHTHOUSE} to the address at which other machines find the lighthouse"
            )
        if _is_loopback(host) and not is_here:
            raise ConfigError(
                f"the lighthouse {lighthouse} has a member at {host}, where this machine cannot reach it; start that "
                f"one again with the {LIGHTHOUSE} of this one, which is on another machine"
            )
    return own


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False  # a name


def _is_of_this_machine(host: str) -> bool:
    """Returns whether a host is an address of this machine, so that one can listen there."""
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError:
        return False
    return True


def _socket_address(lighthouse: str) -> tuple[str, int]:
    found = host_and_port(lighthouse)
    assert found is not None  # `lighthouse_address` has built it
    return found[0].strip("[]"), found[1]


def _not_reached(lighthouse: str, error: Exception) -> ConfigError:
    return ConfigError(f"the lighthouse {lighthouse:.100} cannot be reached ({error}); see `gqsgd lighthouse`")


def name_for(facts: Mapping[str, Any]) -> str:
    """Returns the name of members with these facts. It consists of letters, digits, dots and hyphens."""
    # They need torch, and recipes check addresses before.
    from lightning_gqsgd.session.opening import digest_of_facts
    from lightning_gqsgd.wire.build import this_build

    return f"gqsgd-{this_build()}-{digest_of_facts(facts) % 2**64:016x}"


def check_others(lighthouse: str, name: str, timeout_s: float) -> list[str]:
    """Check that the members that a lighthouse knows have the same name.

    If the lighthouse does not answer, it may still be starting. So this asks again for up to 30 seconds.

    Args:
        lighthouse: its address.
        name: name of this member, see `name_for`.
        timeout_s: how long to wait for it.

    Returns:
        The addresses of the managers of members that have merged. Members with the most merges come first.

    Raises:
        ConfigError: if no lighthouse answers, if something else answers, or if members train something else.
    """
    deadline = time.monotonic() + min(timeout_s, _PATIENCE_S)
    while True:
        try:
            page = _page_of(lighthouse, max(1.0, deadline - time.monotonic()))
            break
        except _NotThere:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    alive = _alive_on(page, _ALIVE_S)
    for member in alive:
        other = member.partition(":")[0]
        if other != name:
            raise ConfigError(f"the lighthouse {lighthouse} has members that do not fit: {_difference(other, name)}")
    return [address for _, address in sorted(_merged_on(page, alive), key=lambda entry: -entry[0])]


def merges_at(lighthouse: str, timeout_s: float) -> int:
    """Returns the number of merges before the latest merge that a lighthouse knows; 0 if no member has merged.

    Args:
        lighthouse: its address.
        timeout_s: how long to wait for it.

    Raises:
        ConfigError: if no lighthouse answers at this address.
    """
    page = _page_of(lighthouse, timeout_s)
    return max((merges for merges, _ in _merged_on(page, _alive_on(page, _ALIVE_S))), default=0)


def latest_merge_of(lighthouse: str, name: str, timeout_s: float) -> tuple[set[str], int]:
    """Returns the members with a name (see `name_for`) that made the latest merge, also those that are gone, and the
    number of merges with this one. Other arguments and errors are those of `merges_at`."""
    merged = _MERGED.findall(_page_of(lighthouse, timeout_s))
    counts = {member: int(merges) + 1 for member, merges, _ in merged if member.partition(":")[0] == name}
    return set(counts), max(counts.values(), default=0)


def members_at(lighthouse: str, timeout_s: float, alive_s: float = _ALIVE_S) -> list[str]:
    """Returns the members that have given a lighthouse a sign of life within ``alive_s`` seconds, sorted: the name, a
    colon, and a unique suffix. Other arguments and errors are those of `merges_at`."""
    return _alive_on(_page_of(lighthouse, timeout_s), alive_s)


def shortage_at(lighthouse: str, timeout_s: float) -> str | None:
    """Returns a line if a lighthouse waits for more members than there are; None if it does not. Arguments and errors
    are those of `merges_at`."""
    match = _TOO_FEW.search(_page_of(lighthouse, timeout_s))
    if match is None:
        return None
    return (
        f"{counted(int(match[1]), 'member')} came to the lighthouse {lighthouse}, and it was started with "
        f"--min-replicas {match[2]}; start more members, or a lighthouse that needs fewer"
    )


class _NotThere(ConfigError):
    """No lighthouse answers, or none answers yet."""


def _page_of(lighthouse: str, timeout_s: float) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{lighthouse}/status", timeout=timeout_s) as answer:
            page: str = answer.read().decode(errors="replace")
    except OSError as error:
        raise _NotThere(
            f"no lighthouse answers at {lighthouse} ({error}); start one with `gqsgd lighthouse`, and see that "
            f"{LIGHTHOUSE} has its address"
        ) from error
    except http.client.HTTPException as error:
        raise _is_none(lighthouse) from error
    if _HEADING not in page:
        raise _is_none(lighthouse)
    return page


def _is_none(lighthouse: str) -> ConfigError:
    return ConfigError(
        f"what answers at {lighthouse} is not a lighthouse; start one with `gqsgd lighthouse` at a port that is free, "
        f"and see that {LIGHTHOUSE} has its address"
    )


def _alive_on(page: str, alive_s: float) -> list[str]:
    seen = _SEEN.findall(page)
    return sorted(member for member, number, unit in seen if float(number) * _UNITS[unit] <= alive_s)


def _merged_on(page: str, alive: list[str]) -> list[tuple[int, str]]:
    """For each member of the latest merge, returns the number of merges before it and the address of its manager."""
    return [(int(merges), address) for member, merges, address in _MERGED.findall(page) if member in alive]


def _difference(other: str, own: str) -> str:
    if not other.startswith("gqsgd-"):
        return f"{other[:80]!r} is not a training of this package; start a lighthouse for each training"
    theirs, mine = (name.removeprefix("gqsgd-").rpartition("-")[0] for name in (other, own))
    if theirs != mine:
        return f"they run another build of lightning-gqsgd ({theirs}) than this one ({mine}); install the same on all"
    return (
        "they have another model, other options or another compression than this one, other values of parameters that "
        "are not trained, or devices of another kind (CPU or GPU); start all with the same, or a lighthouse for each "
        "training"
    )
