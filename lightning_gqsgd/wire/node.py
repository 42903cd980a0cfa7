"""Finds the name of the node on which a process runs."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from lightning_gqsgd.errors import ConfigError

#: Environment variable in which torchrun says how many processes it has started on this node.
LOCAL_RANKS = "LOCAL_WORLD_SIZE"
#: Environment variables in which launchers (torchrun, Lightning) say the number of a node. One machine may act as
#: several nodes.
NODE_NUMBERS = ("GROUP_RANK", "NODE_RANK")


def local_ranks() -> int | None:
    """Returns how many processes a launcher has started on this node; None if the environment does not say so.

    Raises:
        ConfigError: if ``LOCAL_WORLD_SIZE`` is no number of processes.
    """
    said = os.environ.get(LOCAL_RANKS)
    if said is None:
        return None
    if not said.isdecimal() or int(said) < 1:
        raise ConfigError(f"{LOCAL_RANKS}={said!r} is not a number of processes of this node; correct or unset it")
    return int(said)


def this_node(rank: int | None = None) -> str:
    """Returns a name of the node that this process runs on. Processes on other nodes get other names.

    One machine may act as several nodes: if a launcher numbers them, or if processes have their own networks, as in
    containers.

    Args:
        rank: this process's number among all processes; None uses the rank in torch.distributed.

    Raises:
        ConfigError: see `local_ranks`.
    """
    number = next((os.environ[name] for name in NODE_NUMBERS if name in os.environ), None)
    local = local_ranks()
    if number is None and local is not None:
        # Processes are numbered node by node.
        number = str((dist.get_rank() if rank is None else rank) // local)
    return f"{socket.gethostname()}/{network()}/{number or ''}"


def network() -> str:
    """Returns text that differs between machines, and between networks of containers, that have the same host name;
    empty if the system does not provide it."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return ""
