"""The command ``gqsgd doctor --nodes``: the hosts of a launcher's ranks, and the speed of the links between them.

The ranks meet at a store. Each leaves there the name and the interfaces of its host, so that rank 0 can name the hosts
even if they cannot reach each other. Then one rank of each host, or every rank of a single host, measures its links to
the others over Gloo, which needs no GPU. The system's counters of sent bytes tell which interface has carried this.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import zip_longest
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table

from lightning_gqsgd.cli import doctor_interfaces
from lightning_gqsgd.cli.doctor_interfaces import Interface
from lightning_gqsgd.cli.places import Place, place_of
from lightning_gqsgd.cli.tables import plain_table
from lightning_gqsgd.errors import ConfigError, counted, first_line
from lightning_gqsgd.wire.agreement import ranks_in_words
from lightning_gqsgd.wire.build import this_build
from lightning_gqsgd.wire.communicator import GLOO_PATIENCE
from lightning_gqsgd.wire.node import network
from lightning_gqsgd.wire.store import EndingStore, wait_for_store

#: Seconds that a rank waits for the others; the environment variable has another number.
WAIT_S = 60
WAIT_VARIABLE = "GQSGD_DOCTOR_WAIT_S"
#: Seconds that all rounds of pairs may take together.
ROUNDS_S = 30.0
#: Most seconds that one round takes.
ROUND_S = 1.0
#: Further seconds that rank 0 waits.
LAST_S = 3
#: Round trips of one byte.
TRIPS = 20
#: Bytes of the shortest and of the longest message of the rate.
SHORTEST = 1 << 16
LONGEST = 1 << 26
#: Most pairs that are printed, the slowest first.
MOST_PAIRS = 40


class Pair(NamedTuple):
    """A measurement between two ranks.

    Attributes:
        low, high: the ranks.
        latency_s: half of a round trip of one byte, the median.
        rate: bits per second of a long message, there and back.
    """

    low: int
    high: int
    latency_s: float
    rate: float


class Host(NamedTuple):
    """The host of a rank.

    Attributes:
        rank: the rank.
        name: name of the host.
        namespace: tells hosts of one name apart.
        interface: the interface in use; None until it is known.
        present: all interfaces that are up.
        software: the build of this package, and the versions of torch and Python.
    """

    rank: int
    name: str
    namespace: str
    interface: Interface | None
    present: tuple[Interface, ...]
    software: str

    @classmethod
    def of(cls, values: Sequence[Any]) -> Host:
        """Returns the host whose values another rank has sent as JSON."""
        rank, name, namespace, used, present, software = values
        interfaces = tuple(Interface(*one) for one in present)
        return cls(rank, name, namespace, used and Interface(*used), interfaces, software)


class Findings(NamedTuple):
    """The findings of all ranks.

    Attributes:
        place: the place of rank 0.
        hosts: the host of each rank, in the order of ranks.
        pairs: the measurements.
    """

    place: Place
    hosts: list[Host]
    pairs: list[Pair]


def examine() -> Findings | None:
    """Measure as one of a launcher's ranks. Returns the findings on rank 0, and None on the others.

    Raises:
        ConfigError: the ranks do not meet, or do not reach each other; each rank says so in its own words.
    """
    place = place_of(os.environ)
    wait = timedelta(seconds=_wait_s())
    store = _meet(place, wait)
    before = doctor_interfaces.interfaces()
    host = Host(place.rank, socket.gethostname(), network(), None, tuple(before), _software())
    hosts = [Host.of(values) for values in _exchange(store, "present", host, place, wait)]
    with _connected(store, place, hosts, wait):
        pairs = _measure_all(place, _measuring(hosts))
    used = doctor_interfaces.busiest(before, doctor_interfaces.interfaces())
    measured = _exchange(store, "measured", [host._replace(interface=used), pairs], place, wait)
    if place.rank:
        return None
    found = [Pair(*values) for _, of_rank in measured for values in of_rank]
    return Findings(place, [Host.of(values) for values, _ in measured], found)


def opening(findings: Findings) -> str:
    """Returns a line on the launch."""
    names = len({(host.name, host.namespace) for host in findings.hosts})
    place = findings.place
    launched = f"{counted(place.size, 'rank')} on {counted(names, 'host')}, started by {place.launcher}"
    return f"{launched}; they met at {place.meets_at}"


def tables(findings: Findings) -> list[Table]:
    """Returns hosts and pairs as tables."""
    ranks = plain_table("interfaces in use", ["rank", "host", "interface", "address", "link"])
    for host, used in zip(findings.hosts, _used_by_host(findings.hosts), strict=True):
        shown = ("not known", "", "") if used is None else (used.name, used.address or "", used.speed)
        ranks.add_row(str(host.rank), host.name, *shown)
    slowest = sorted(findings.pairs, key=lambda pair: pair.rate)[:MOST_PAIRS]
    left_out = len(findings.pairs) - len(slowest)
    which = f"the slowest {MOST_PAIRS} of {len(findings.pairs)} pairs" if left_out else "pairs of ranks"
    links = plain_table(f"{which}, over Gloo", ["ranks", "latency", "Gbit/s"])
    for pair in slowest if left_out else findings.pairs:
        links.add_row(f"{pair.low} - {pair.high}", f"{1e6 * pair.latency_s:,.0f} µs", f"{pair.rate / 1e9:.3g}")
    return [ranks, links]


def warnings(findings: Findings) -> list[str]:
    """Returns a line for each thing that is wrong."""
    lines = _software_warnings(findings.hosts)
    by_host = {(host.name, host.namespace): place for place, host in reversed(list(enumerate(findings.hosts)))}
    used = _used_by_host(findings.hosts)
    for (name, _), place in sorted(by_host.items(), key=lambda entry: entry[1]):
        present = findings.hosts[place].present
        lines += doctor_interfaces.warnings(name, used[place], present, len(by_host) == 1)
    return lines


def _software_warnings(hosts: Sequence[Host]) -> list[str]:
    """Returns a line if ranks run different software. A training refuses different builds of this package."""
    having: dict[str, list[int]] = {}
    for host in hosts:
        having.setdefault(host.software, []).append(host.rank)
    if len(having) == 1:
        return []
    shown = "; ".join(f"{ranks_in_words(ranks)}: {software}" for software, ranks in having.items())
    return [f"ranks run different software ({shown}): install the same versions on all hosts"]


def _software() -> str:
    """Returns the build of this package, and the versions of torch and Python."""
    return f"lightning_gqsgd {this_build()}, torch {torch.__version__}, Python {platform.python_version()}"


def _used_by_host(hosts: Sequence[Host]) -> list[Interface | None]:
    """Returns the interface that each rank uses: the one that the first rank of its host has found in use."""
    leading = {(host.name, host.namespace): host.interface for host in reversed(hosts)}
    return [leading[host.name, host.namespace] for host in hosts]


def _wait_s() -> float:
    given = os.environ.get(WAIT_VARIABLE, str(WAIT_S))
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 3600:
        raise ConfigError(f"{WAIT_VARIABLE}={given!r} is out of range: 1 to 3600 seconds, e.g. {WAIT_S}")
    return seconds


def _meet(place: Place, wait: timedelta) -> Any:
    """Returns the store at which all ranks meet; raises ConfigError if this rank does not reach rank 0."""
    # torchrun's agent has the store already.
    is_server = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        if place.rank:
            wait_for_store(place.address, place.port, wait.total_seconds())
        store = dist.TCPStore(place.address, place.port, None, is_server, timeout=wait, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        raise ConfigError(_not_met(place, wait, first_line(error))) from None
    prefix = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # A request to a host that hangs would not end.
    return EndingStore(dist.PrefixStore(f"gqsgd-doctor/{prefix}", store), wait)


def _not_met(place: Place, wait: timedelta, reason: str) -> str:
    if "EADDRINUSE" in reason:
        return (
            f"{_who(place)} cannot listen at port {place.port}, which another process of this host has, e.g. that of "
            "another job; set MASTER_PORT to a free port, the same on all ranks"
        )
    return (
        f"{_who(place)} cannot reach rank 0 at {place.meets_at} within {wait.total_seconds():.0f} s "
        f"({reason}); look at the output of rank 0, let port {place.port} through the firewall of that host, and set "
        "MASTER_ADDR to an address that all hosts reach"
    )


def _exchange(store: Any, key: str, mine: object, place: Place, wait: timedelta) -> list[Any]:
    """Returns what each rank tells, as values of JSON; raises ConfigError if one has not come. A collective."""
    # Rank 0 may have the store: it waits a little longer, so that the others can still ask who is missing.
    end = time.monotonic() + wait.total_seconds() + (LAST_S if place.rank == 0 else 0)
    try:
        return _asked(store, key, mine, place, end)
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"{_who(place)} was waiting for the others, and rank 0 at {place.meets_at}, where they meet, "
            f"has ended or hangs, or another rank has ended ({first_line(error)}); look at their output"
        ) from None


def _asked(store: Any, key: str, mine: object, place: Place, end: float) -> list[Any]:
    """Exchange values through the store; see `_exchange`. ``end``: when to give up, on the monotonic clock."""
    begun = time.monotonic()
    store.set(f"{key}/{place.rank}", json.dumps(mine))
    missing = list(range(place.size))
    while missing and time.monotonic() < end:
        missing = [rank for rank in missing if not store.check([f"{key}/{rank}"])]
        time.sleep(0.05 if missing else 0)
    if missing:
        raise ConfigError(
            f"{_who(place)} has waited {time.monotonic() - begun:.0f} s for {ranks_in_words(missing)} of {place.size}; "
            f"look at the output of their hosts, and whether they reach {place.meets_at}"
        )
    found = [json.loads(store.get(f"{key}/{rank}")) for rank in range(place.size)]
    # Rank 0 may have the store, and has to be the last to leave.
    store.set(f"{key}/read/{place.rank}", "")
    if place.rank == 0:
        while time.monotonic() < end and not store.check([f"{key}/read/{rank}" for rank in range(place.size)]):
            time.sleep(0.02)
    return found


@contextmanager
def _connected(store: Any, place: Place, hosts: Sequence[Host], wait: timedelta) -> Iterator[None]:
    """Connect all ranks by Gloo, and disconnect them at the end of the context.

    Raises:
        ConfigError: they do not reach each other, or a connection breaks.
    """
    try:
        connecting = wait / GLOO_PATIENCE
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=connecting)
        try:
            group: Any = dist.group.WORLD
            group._get_backend(torch.device("cpu"))._set_default_timeout(wait)
            yield
            dist.barrier()
        finally:
            dist.destroy_process_group()
    except (RuntimeError, OSError) as error:
        names = ", ".join(dict.fromkeys(host.name for host in hosts))
        chosen = os.environ.get("GLOO_SOCKET_IFNAME", "not set")
        raise ConfigError(
            f"{_who(place)} has met the others ({names}), and has no connection to all of them "
            f"({first_line(error)}); set GLOO_SOCKET_IFNAME (here: {chosen}) to the interface that reaches them "
            "(ip -br address), and let all ports between the hosts through the firewall"
        ) from None


def _measuring(hosts: Sequence[Host]) -> list[int]:
    """Returns the ranks that measure: the first of each host, or all of a single host."""
    first = {(host.name, host.namespace): host.rank for host in reversed(hosts)}
    return sorted(first.values()) if len(first) > 1 else [host.rank for host in hosts]


def rounds(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Returns all pairs in rounds, so that no rank is in two pairs of a round (the circle method of tournaments)."""
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    made = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        sides = zip_longest(circle[:half], reversed(circle[half:]))
        made.append([(min(a, b), max(a, b)) for a, b in sides if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return made


def _measure_all(place: Place, ranks: Sequence[int]) -> list[Pair]:
    """Measure with the other ranks. Returns the pairs of which this rank is the lower one."""
    plan = rounds(ranks)
    budget_s = min(ROUND_S, ROUNDS_S / max(1, len(plan)))
    found = []
    for pairs in plan:
        for low, high in pairs:
            if place.rank == low:
                found.append(_lead(low, high, budget_s))
            elif place.rank == high:
                _follow(low)
        dist.barrier()  # pairs of the next round would share links with this one's
    return found


def _lead(low: int, high: int, budget_s: float) -> Pair:
    byte = torch.zeros(1, dtype=torch.uint8)
    trips = [_round_trip(byte, high) for _ in range(TRIPS)]
    latency_s = median(trips) / 2
    size = SHORTEST
    while True:
        dist.send(torch.tensor([size]), high)
        took = _round_trip(torch.empty(size, dtype=torch.uint8), high)
        # Long enough that the latency is a small part, and short enough for the budget.
        if size >= LONGEST or took > budget_s / 8:
            break
        size = min(LONGEST, 4 * size)
    dist.send(torch.tensor([0]), high)
    return Pair(low, high, latency_s, 8 * 2 * size / max(took - 2 * latency_s, took / 10))


def _round_trip(message: torch.Tensor, other: int) -> float:
    begun = time.perf_counter()
    dist.send(message, other)
    dist.recv(message, other)
    return time.perf_counter() - begun


def _follow(low: int) -> None:
    byte = torch.zeros(1, dtype=torch.uint8)
    for _ in range(TRIPS):
        dist.recv(byte, low)
        dist.send(byte, low)
    size = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.recv(size, low)
        if not int(size):
            return
        message = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(message, low)
        dist.send(message, low)


def _who(place: Place) -> str:
    return f"rank {place.rank} on {socket.gethostname()}"
