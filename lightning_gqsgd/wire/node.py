"""Finds the name of the node on which a process runs."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from lightning_gqsgd.errors import ConfigError

#: Where torchrun says how many processes it has started on this node.
LOCAL_RANKS = "LOCAL_WORLD_SIZE"
#: Where launchers say the number of a node: torchrun, and Lightning. A machine may stand for several nodes.
NODE_NUMBERS = ("GROUP_RANK", "NODE_RANK")


def this_node(rank: int | None = None) -> str:
    """Returns a name of the node that this process runs on, which no process on another node has.

    A machine may stand for several nodes: where a launcher numbers them, and where processes have networks of their
    own, as in containers.

    Args:
        rank: this process's number among all processes; None takes that of torch.distributed.

    Raises:
        ConfigError: ``LOCAL_WORLD_SIZE`` is no number of processes.
    """
    number = next((os.environ[name] for name in NODE_NUMBERS if name in os.environ), None)
    local = os.environ.get(LOCAL_RANKS)
    if local is not None and (not local.isdecimal() or int(local) < 1):
        raise ConfigError(f"{LOCAL_RANKS}={local!r} is no number of processes of this node; correct or unset it")
    if number is None and local is not None:
        # Processes are numbered node by node.
        number = str((dist.get_rank() if rank is None else rank) // int(local))
    return f"{socket.gethostname()}/{network()}/{number or ''}"


def network() -> str:
    """Returns what tells machines, and networks of containers, apart that have the same host name; empty where the
    system does not say it."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return ""
