"""The ranks that reduce together, and their store: everything that the engine needs of a process group.

A group that torch.distributed knows gives them (`peers_of`). So does one that it does not know, such as that of a
framework whose groups change their size while a training runs (`peers_of_unregistered`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from threading import RLock
from typing import Any

import torch
import torch.distributed as dist

from lightning_gqsgd.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Peers:
    """The ranks that reduce together.

    Attributes:
        own: this process's number among them.
        numbers: the number that each of them has among all processes, in order.
        store: where they meet: a store that all of them reach.
        backends: name of the backend for each type of device, e.g. ``{"cpu": "gloo"}``.
        timeout: of collectives; None where the group itself says it for each device (see `communicator.timeout_of`).
        turn: what threads of this process hold while they meet these ranks; None: one for each set of numbers. Ranks
            that are threads of one process need one each.
    """

    own: int
    numbers: tuple[int, ...]
    store: dist.Store
    backends: Mapping[str, str]
    timeout: timedelta | None = None
    turn: Any = field(default=None, repr=False)
    devices: Sequence[Any] = field(default=(), repr=False)

    def size(self) -> int:
        """Returns the number of ranks, as a process group does."""
        return len(self.numbers)


def peers_of(group: dist.ProcessGroup | Peers) -> Peers:
    """Returns the ranks of a group that torch.distributed knows; they meet in its store. Peers are returned as they
    are.

    Raises:
        ConfigError: the other ranks of the group do not exist.
    """
    if isinstance(group, Peers):
        return group
    backends = backends_of(group)
    if group.size() > 1 and "fake" in backends.values():
        raise ConfigError(
            f"the process group has the backend 'fake': its {group.size()} ranks are this process alone, and nobody "
            "would answer it. Leave gqsgd out of a dry run, or use the backend 'gloo' with processes"
        )
    store = dist.distributed_c10d._get_default_store()
    return Peers(dist.get_rank(group), tuple(dist.get_process_group_ranks(group)), store, backends)


def peers_of_unregistered(group: dist.ProcessGroup, backends: Mapping[str, str]) -> Peers:
    """Returns the ranks of a group that torch.distributed does not know, with the group's own store and timeout.

    Args:
        group: a group with a store in which nobody else writes.
        backends: see `Peers`.
    """
    backend = group._get_backend(torch.device(next(iter(backends))))
    options = getattr(backend, "options", None)
    timeout = getattr(options, "_timeout", dist.constants.default_pg_timeout)
    devices = getattr(options, "_devices", ())
    numbers = tuple(range(group.size()))
    return Peers(group.rank(), numbers, group.get_group_store(), backends, timeout, RLock(), devices)


def backends_of(group: dist.ProcessGroup | Peers) -> Mapping[str, str]:
    """Returns the name of a group's backend for each type of device."""
    if isinstance(group, Peers):
        return group.backends
    pairs = (entry.partition(":") for entry in str(dist.get_backend_config(group)).split(","))
    return {device: name for device, _, name in pairs}
