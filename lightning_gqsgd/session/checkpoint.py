"""The states of hooks in checkpoints: the entries that all of them share, and the gathered memories of all ranks."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import MAX_INTEGER, ConfigError, describe_difference, listed
from lightning_gqsgd.reducers.memory import MemoryStore
from lightning_gqsgd.session.parameters import Parameter
from lightning_gqsgd.wire.communicator import Communicator

logger = logging.getLogger(__name__)

STATE_SCHEMA = 1

#: Entries of states that `distributed_checkpoint` has read: a name for the memory of all ranks, because each rank reads
#: only its own, and the result of `memory_of` for the saved memory.
MEMORY_NAME = "memory_name"
MEMORY_OF = "memory_of"
#: The entry of a state that says which coordinates of a memory each rank has (see `MemoryStore.layout`).
MEMORY_LAYOUT = "memory_layout"

#: What to do with a state that has entries which ``state_dict`` does not write.
REMEDY = "load what state_dict has written"

#: Coordinates of all ranks that are exchanged at once for a checkpoint, beside a model that may fill its GPU.
COORDINATES_AT_ONCE = 1 << 26
#: Why the memory of all ranks is gathered, for errors.
_GATHERING = "gathering what ranks remember (every rank calls state_dict)"
#: Entries of every state.
_ENTRIES = {"seed": int, "step": int, "config": Mapping}
#: Entries that some states have.
_OPTIONAL_ENTRIES = {"post_local_iter": int, "weights": int}


def check_state(state: Any, now: GQSGDConfig, entries: Mapping[str, type] | None = None) -> None:
    """Check a hook's state from a checkpoint, and log in which fields its configuration differs from this run's.

    Args:
        state: the state that ``state_dict`` returned.
        now: the configuration of this run.
        entries: entries that the state needs in addition to the usual ones, and their types.

    Raises:
        ConfigError: if ``state`` is no state of a hook, or has another schema.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"a state is a dictionary, not {type(state).__name__}; give what state_dict() has returned")
    if "schema" not in state:
        raise ConfigError(
            "this is no gqsgd state, because it has no entry 'schema'; give what state_dict() has returned, not the "
            f"checkpoint that has it (entries: {', '.join(map(str, state))[:200]})"
        )
    if not (is_count(state["schema"]) and state["schema"] == STATE_SCHEMA):
        raise ConfigError(
            f"gqsgd state of schema {state['schema']!r:.200}; this version reads {STATE_SCHEMA}: "
            "resume with the version that wrote it, or drop the entry to start the dither anew"
        )
    if entries is None and is_of_local_steps(state):
        raise ConfigError(
            "this is the state of local steps, whose steps are counted in another way; give it to the LocalSteps, or "
            "to the strategy with local_steps, that continues, and leave it out for a hook of gradients"
        )
    optional = {name: kind for name, kind in _OPTIONAL_ENTRIES.items() if name in state}
    for name, kind in {**_ENTRIES, **optional, **(entries or {})}.items():
        value = state.get(name)
        if not (is_count(value) if kind is int else isinstance(value, kind)):
            raise ConfigError(
                f"the gqsgd state's entry {name!r} is {value!r:.200}; {REMEDY} "
                f"(its entries: {', '.join(map(str, state))})"
            )
    layout = state.get(MEMORY_LAYOUT, [1, 0])
    if not (isinstance(layout, list) and len(layout) == 2 and all(map(is_count, layout))):
        raise ConfigError(
            f"the gqsgd state's entry {MEMORY_LAYOUT!r} is {layout!r:.200}, and not the numbers of owners and of "
            f"coordinates in a block; {REMEDY}"
        )
    _check_plain(state["config"])
    _log_difference(state["config"], now)


def is_of_local_steps(state: object) -> bool:
    """Returns True for a state that local steps have written, with or without members that come and go."""
    return isinstance(state, Mapping) and ("anchors" in state or "merged" in state)


def is_count(value: object) -> bool:
    """Returns True for an integer from 0 to `MAX_INTEGER`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INTEGER


def _check_plain(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if a state's configuration has values that are not plain, or keys that are not strings."""
    try:
        json.dumps(dict(config))
        is_plain = all(isinstance(name, str) for name in config)
    except (TypeError, ValueError):
        is_plain = False
    if not is_plain:
        raise ConfigError(
            f"the gqsgd state's entry 'config' is {config!r:.200}, which is not plain values by name; {REMEDY}"
        )


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
    """Returns the memory of all ranks, on the CPU: tensors [ranks, numel] by kind and parameter number. All ranks
    except the first return None.

    A collective. Only a part of one parameter is gathered at a time, see `parts_of_row`, because all ranks get it, on
    the device of the gradients. Only the first rank holds more.
    """
    numbers = sorted(parameters)
    gathered: dict[str, dict[int, Tensor]] = {kind.value: {} for kind in store.kinds} if numbers else {}
    for kind in store.kinds:
        for number in numbers:
            row = store.row(kind, number)
            length = row.numel() if communicator.rank == 0 else 0
            whole = torch.empty(communicator.size, length, dtype=row.dtype, device="cpu")
            for part in parts_of_row(row.numel(), communicator.size):
                rows = communicator.gather(row[part], _GATHERING)
                if communicator.rank == 0:
                    whole[:, part] = rows
            gathered[kind.value][number] = whole
    return gathered if communicator.rank == 0 else None


def parts_of_row(numel: int, ranks: int) -> list[slice]:
    """Returns the parts of a parameter's memory, of ``numel`` coordinates on each rank, that ranks exchange one after
    the other: those of all ranks have at most `COORDINATES_AT_ONCE` coordinates together."""
    length = max(1, COORDINATES_AT_ONCE // ranks)
    return [slice(start, min(numel, start + length)) for start in range(0, numel, length)]


def take_memory(store: MemoryStore, state: Mapping[str, Any], rank: int, world_size: int) -> set[int] | None:
    """Load the memories from a hook's state. Returns the numbers of the parameters in it.

    If the state has another number of ranks, or no memory, or if its ranks have other coordinates than they would have
    here, the memory starts empty, and the result is None. A warning says so, except for a state of step 0, before which
    nothing was remembered.

    Raises:
        ConfigError: if the state is not rank 0's, if it belongs to a model with other parameters, or if ``state_dict``
            cannot have written its memory.
    """
    saved = state.get("memory")
    if "memory" in state and saved is None:
        raise ConfigError(
            "this gqsgd state has no memory because it is not rank 0's; load what rank 0 has saved (with "
            "torch.distributed.checkpoint, give DCPState(state) to both save and load)"
        )
    if saved is not None:
        check_memory(saved)
    if saved is None or not fits(store, state, saved, world_size):
        ranks, kinds = state.get(MEMORY_OF) or memory_of(saved or {})
        if state.get("step") != 0:
            logger.warning(
                "gqsgd: the memory starts empty: the checkpoint has that of %s ranks (%s), this run has %s ranks (%s)",
                ranks or "no",
                ", ".join([kinds, *in_words(layout_of(state, store))] if kinds else ["nothing"]),
                world_size,
                ", ".join([*(kind.value for kind in store.kinds), *in_words(store.layout)]),
            )
        store.forget()
        return None
    store.take(saved, rank)
    return {number for tensors in saved.values() for number in tensors}


def memory_of(saved: Mapping[str, Mapping[int, Tensor]]) -> tuple[str, str]:
    """Returns the number of ranks and the kinds of a memory, as texts; empty texts for an empty memory."""
    counts = {rows.shape[0] for tensors in saved.values() for rows in tensors.values()}
    return ", ".join(map(str, sorted(counts))), ", ".join(map(str, saved))


def fits(
    store: MemoryStore, state: Mapping[str, Any], saved: Mapping[str, Mapping[int, Tensor]], world_size: int
) -> bool:
    """Returns True if the memory ``saved`` of a state has ``world_size`` ranks and the kinds that are stored here, and
    if each of its ranks has the coordinates that it needs here."""
    same_kinds = bool(saved) and set(saved) == {kind.value for kind in store.kinds}
    return same_kinds and memory_of(saved)[0] == str(world_size) and layout_of(state, store) == store.layout


def layout_of(state: Mapping[str, Any], store: MemoryStore) -> list[int]:
    """Returns the layout of a state's memory; that of ``store`` if the state has no such entry, which states of earlier
    versions did not have."""
    return list(state.get(MEMORY_LAYOUT, store.layout))


def in_words(layout: Sequence[int]) -> list[str]:
    """Returns the layout of a memory as one text; none if every rank keeps all coordinates."""
    owners, block_size = layout
    return [f"{owners} owners of blocks of {block_size}"] if owners > 1 else []


def memory_digest(state: Mapping[str, Any]) -> str:
    """Returns a digest of all ranks' memory in a state that `take_memory` has loaded; the state may have no memory."""
    if MEMORY_NAME in state:
        return str(state[MEMORY_NAME])
    hashed = hashlib.blake2b(digest_size=8)
    for kind, tensors in sorted((state.get("memory") or {}).items()):
        for number, rows in sorted(tensors.items()):
            hashed.update(f"{kind} {number} {rows.dtype} {tuple(rows.shape)}".encode())
            hashed.update(rows.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return hashed.hexdigest()


def check_memory(saved: object) -> None:
    """Raise ConfigError if a memory is not finite tensors [ranks, numel] by kind and parameter number, with the same
    parameters in every kind."""
    kinds: Mapping[str, Any] = saved if isinstance(saved, Mapping) else {"memory": saved}
    for kind, tensors in kinds.items():
        if not isinstance(tensors, Mapping):
            raise ConfigError(f"the gqsgd state's memory {kind!r} is {tensors!r:.200}; {REMEDY}")
        for number, rows in tensors.items():
            if not _is_table(rows):
                raise ConfigError(
                    f"the gqsgd state's memory {kind!r} of parameter {number} is {rows!r:.200}, and no floating-point "
                    f"tensor [ranks, numel] with values in memory; {REMEDY}"
                )
            # A memory never takes in what is not finite, and would keep it for the rest of the training.
            if not _is_finite(rows):
                raise ConfigError(
                    f"the gqsgd state's memory {kind!r} of parameter {number} has values that are not finite, which "
                    "state_dict does not write; load another checkpoint, or drop the state's entry 'memory' to start "
                    "with an empty one"
                )
    if len({frozenset(tensors) for tensors in kinds.values()}) > 1:
        raise ConfigError(
            f"the gqsgd state's memories {', '.join(map(repr, kinds))} are of different parameters; {REMEDY}"
        )


def _is_table(rows: object) -> bool:
    """Returns True for a floating-point matrix that is neither sparse nor on the meta device."""
    if not isinstance(rows, Tensor) or rows.ndim != 2 or not rows.is_floating_point():
        return False
    return rows.layout == torch.strided and not rows.is_meta


def _is_finite(rows: Tensor) -> bool:
    """Returns whether all values are finite. Looks at one row at a time, and once at a row that stands for all ranks,
    as `distributed_checkpoint` gives it."""
    different = rows if rows.stride(0) else rows[:1]
    return all(bool(row.isfinite().all()) for row in different)


def say_what_is_missing(trained: Iterable[Parameter], saved: set[int]) -> None:
    """Log the compressed parameters that have no memory in a checkpoint; ``saved`` are the numbers of the others."""
    names = [entry.name for entry in trained if not entry.raw and entry.number not in saved]
    if names:
        logger.warning("gqsgd: the memory of parameter %s starts empty: the checkpoint has none", listed(names))
