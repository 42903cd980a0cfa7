"""States of hooks in checkpoints: the entries that all of them have, and the memories of all ranks in one place."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError, describe_difference
from lightning_gqsgd.memory import MemoryStore
from lightning_gqsgd.transport.communicator import Communicator

logger = logging.getLogger(__name__)

STATE_SCHEMA = 1

#: Entries of every state.
_ENTRIES = {"seed": int, "step": int, "config": Mapping}


def check_state(state: Any, now: GQSGDConfig, entries: Mapping[str, type] | None = None) -> None:
    """Check a hook's state from a checkpoint, and log in which fields its configuration differs from this run's.

    Args:
        state: the state, as ``state_dict`` has given it.
        now: the configuration of this run.
        entries: entries that the state needs beside the usual ones, and their types.

    Raises:
        ConfigError: ``state`` is no state of a hook, or a state of another schema.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"a state is a dictionary, as state_dict gives it, not {type(state).__name__}")
    if state.get("schema") != STATE_SCHEMA:
        raise ConfigError(
            f"gqsgd state of schema {state.get('schema')!r}; this version reads {STATE_SCHEMA}: "
            "resume with the version that wrote it, or drop the entry to start the dither anew"
        )
    for name, kind in {**_ENTRIES, **(entries or {})}.items():
        if not isinstance(state.get(name), kind) or (kind is int and state[name] < 0):
            raise ConfigError(
                f"the gqsgd state's entry {name!r} is {state.get(name)!r}; load what state_dict has written "
                f"(its entries: {', '.join(map(str, state))})"
            )
    _log_difference(state["config"], now)


def _log_difference(written: Mapping[str, Any], now: GQSGDConfig) -> None:
    unknown = sorted(set(written) - set(now.field_names()))
    if unknown:
        logger.warning(
            "gqsgd: the checkpoint's configuration has fields that this version does not know (%s); they are ignored",
            ", ".join(unknown),
        )
    mine = now.to_dict()
    theirs = {name: written.get(name, mine[name]) for name in mine}
    difference = describe_difference(theirs, mine)
    if difference:
        logger.warning("gqsgd: the checkpoint was written under another configuration (%s)", difference)


def gathered_memory(
    communicator: Communicator, store: MemoryStore, parameters: Iterable[int]
) -> dict[str, dict[int, Tensor]] | None:
    """The memory of all ranks, on the CPU: tensors [ranks, numel] by kind and parameter number; None on all ranks but
    the first.

    A collective. Parameters are gathered one at a time, so that no rank but the first holds more than one of them.
    """
    numbers = sorted(parameters)
    gathered: dict[str, dict[int, Tensor]] = {kind.value: {} for kind in store.kinds} if numbers else {}
    for kind in store.kinds:
        for number in numbers:
            rows = communicator.gather(store.row(kind, number))
            if communicator.rank == 0:
                gathered[kind.value][number] = rows.cpu()
    return gathered if communicator.rank == 0 else None


def take_memory(store: MemoryStore, state: Mapping[str, Any], rank: int, world_size: int) -> set[int] | None:
    """Take the memories from a hook's state; returns the numbers of the parameters in it.

    A state of another number of ranks, or without memory, leaves the memory empty. A warning says so, and the result is
    None.

    Raises:
        ConfigError: the state is not rank 0's, or is that of a model with other parameters.
    """
    saved = state.get("memory")
    if "memory" in state and saved is None:
        raise ConfigError("this gqsgd state has no memory because it is not rank 0's; load what rank 0 has saved")
    counts = {rows.shape[0] for tensors in (saved or {}).values() for rows in tensors.values()}
    kinds = [kind.value for kind in store.kinds]
    if not saved or set(saved) != set(kinds) or counts != {world_size}:
        logger.warning(
            "gqsgd: the memory starts empty: the checkpoint has that of %s ranks (%s), this run has %s ranks (%s)",
            ", ".join(map(str, counts)) or "no",
            ", ".join(saved or {}) or "nothing",
            world_size,
            ", ".join(kinds),
        )
        return None
    store.take(saved, rank)
    return {number for tensors in saved.values() for number in tensors}
