"""Ports of this machine for rendezvous of tests."""

from __future__ import annotations

import random
import socket

#: Below the ports that systems give to outgoing connections: those of tests that run beside this one may take any of
#: them between the choice of a port and its use.
_PORTS = range(15_000, 32_000)


def free_port() -> int:
    """A port that nothing listens on; tests that run at the same time choose another one, but for 1 in 17,000."""
    chance = random.SystemRandom()  # tests set the seed of the usual one
    while True:
        port = chance.choice(_PORTS)
        with socket.socket() as candidate:
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
