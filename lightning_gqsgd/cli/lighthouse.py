"""The command ``gqsgd lighthouse``: a lighthouse, at which the members of an elastic training meet."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torchft.coordination import LighthouseServer

from lightning_gqsgd.errors import ConfigError, check_integer, counted
from lightning_gqsgd.local_steps.options import parse_time
from lightning_gqsgd.membership.door import HEARTBEAT_MS, LIGHTHOUSE, host_and_port, members_at

#: Seconds between two looks at the members.
_LOOK_S = 1.0

#: The least milliseconds without a sign of life after which a member counts as gone: two of those signs.
_LEAST_HEARTBEAT_MS = 2 * HEARTBEAT_MS

#: Where this machine reaches a lighthouse that listens at all of its addresses.
_LOOPBACKS = {"[::]": "[::1]", "0.0.0.0": "127.0.0.1"}  # noqa: S104


def serve(bind: str, min_replicas: int, join_timeout: str, heartbeat_timeout: str, say: Callable[[str], None]) -> None:
    """Run a lighthouse until an interrupt or SIGTERM, and say when members have come or gone.

    Args:
        bind: host and port to listen at; port 0 takes a free one.
        min_replicas: the least number of members for a merge.
        join_timeout: how long members that are there wait for one that is alive and does not come.
        heartbeat_timeout: after how long without a sign of life a member counts as gone.
        say: is called with each line.

    Raises:
        ConfigError: a value that cannot work, or the address is taken.
    """
    check_integer("--min-replicas", min_replicas, 1, 2**31 - 1)
    join_ms = _milliseconds("--join-timeout", join_timeout, 1, "it counts in milliseconds")
    heartbeat_ms = _milliseconds(
        "--heartbeat-timeout",
        heartbeat_timeout,
        _LEAST_HEARTBEAT_MS,
        f"members give a sign of life every {HEARTBEAT_MS} ms",
    )
    found = host_and_port(bind)
    if found is None:
        raise ConfigError(
            f"--bind={bind!r:.100} is not an address; write host:port, e.g. 0.0.0.0:29510 or [::]:29510, with port 0 "
            "for a free one"
        )
    host, port = found
    try:
        server = LighthouseServer(
            bind=f"{host}:{port}",
            min_replicas=min_replicas,
            join_timeout_ms=join_ms,
            heartbeat_timeout_ms=heartbeat_ms,
        )
    except Exception as error:  # torchft's Rust raises several kinds
        raise ConfigError(
            f"--bind={bind!r:.100}: a lighthouse cannot listen there ({error}); give an address of this machine, and a "
            "port that is free (0 takes one)"
        ) from error
    ended = threading.Event()
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        of_machine, _, given = server.address().removeprefix("http://").rpartition(":")
        # The machine's name may lead elsewhere than to the one address that the lighthouse listens at.
        address = f"{of_machine if host in _LOOPBACKS else host}:{given}"
        say(f"lighthouse at http://{address}; start each process with {LIGHTHOUSE}={address}")
        _watch(f"http://{_LOOPBACKS.get(host, host)}:{given}", ended, say, heartbeat_ms / 1000)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        server.shutdown()


def _milliseconds(option: str, value: str, least: int, reason: str) -> int:
    """Returns a time in milliseconds; raises ConfigError if it is none, or too short."""
    found = round(parse_time(option, value).total_seconds() * 1000)
    if found < least:
        raise ConfigError(f"{option}={value} is too short: {least} ms is the least, because {reason}")
    return found


def _watch(address: str, ended: threading.Event, say: Callable[[str], None], alive_s: float) -> None:
    known: list[str] = []
    while not ended.wait(_LOOK_S):
        members = known
        # On a busy machine, an answer may take too long. Members come and go all the same.
        with suppress(ConfigError):
            members = members_at(address, 5.0, alive_s)
        if members != known:
            come = len(set(members) - set(known))
            gone = len(set(known) - set(members))
            say(f"{time.strftime('%H:%M:%S')} {counted(len(members), 'member')}: {come} came, {gone} went")
            known = members
