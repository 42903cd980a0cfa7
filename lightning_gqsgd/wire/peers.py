"""The ranks that reduce together, and their store: everything that the engine needs of a process group.

`peers_of` reads them from a group that torch.distributed knows. `peers_of_unregistered` reads them from a group that it
does not know, for example of a framework whose groups change their size during a training.
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
        numbers: the number of each of these ranks among all processes, in order.
        store: the store in which they meet. All of them can reach it.
        backends: name of the backend for each type of device, e.g. ``{"cpu": "gloo"}``.
        timeout: timeout of collectives; None if the group has its own for each device (see `communicator.timeout_of`).
        turn: lock that a thread of this process holds while it meets these ranks. None means one lock for each set of
            numbers. Ranks that are threads of one process need a lock each.
        devices: Gloo's devices, with which the package's own groups are created first; empty: new devices are created.
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
    """Returns the ranks of a group that torch.distributed knows. They meet in its default store. Peers are returned
    unchanged.

    Raises:
        ConfigError: if the other ranks of the group do not exist.
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
        group: a group with a store in which no one else writes.
        backends: see `Peers`.
    """
    backend = group._get_backend(torch.device(next(iter(backends))))
    options = getattr(backend, "options", None)
    timeout = getattr(options, "_timeout", dist.constants.default_pg_timeout)
    devices = getattr(options, "_devices", ())
    numbers = tuple(range(group.size()))
    return Peers(group.rank(), numbers, group.get_group_store(), backends, timeout, RLock(), devices)


def is_alive(group: dist.ProcessGroup) -> bool:
    """Returns whether a group exists: False once it has been destroyed."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def check_alive(group: dist.ProcessGroup) -> None:
    """Raise ConfigError if a group has been destroyed."""
    if not is_alive(group):
        raise ConfigError(
            "the process group was destroyed (destroy_process_group); make a new one, and wrap the model in a new "
            "DistributedDataParallel if it was that of a model"
        )


def backends_of(group: dist.ProcessGroup | Peers) -> Mapping[str, str]:
    """Returns the name of a group's backend for each type of device."""
    if isinstance(group, Peers):
        return group.backends
    pairs = (entry.partition(":") for entry in str(dist.get_backend_config(group)).split(","))
    return {device: name for device, _, name in pairs}
