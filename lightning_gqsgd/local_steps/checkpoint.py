"""Local steps in checkpoints: the state of one rank, and the gathered states of all ranks.

The anchor, the outer optimizer and the averages under way are the same on all ranks. Parameters, buffers, the inner
optimizers' state and the memory differ from rank to rank. So an exact continuation needs the state of every rank:
either each rank saves its own file, or the first rank gathers the states (`gathered_state`).
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.local_steps.averages import Average, LocalAverages
from lightning_gqsgd.local_steps.checking import (
    check_kind,
    check_local_state,
    check_tensors,
    in_plain_names,
    rows_of,
)
from lightning_gqsgd.local_steps.divided_state import divided, joined
from lightning_gqsgd.local_steps.fragments import Fragment
from lightning_gqsgd.local_steps.inner_state import all_or_nothing
from lightning_gqsgd.local_steps.outer import load_outer
from lightning_gqsgd.local_steps.sharding import WHOLE
from lightning_gqsgd.local_steps.watching import digest_of_tensors
from lightning_gqsgd.reducers.memory import MemoryStore
from lightning_gqsgd.session.checkpoint import MEMORY_LAYOUT, STATE_SCHEMA, check_state, in_words, layout_of

logger = logging.getLogger(__name__)

#: Entries of every state of local steps, in addition to those of all hooks' states.
_ENTRIES: dict[str, type] = {"rank": int, "world_size": int, "anchors": Mapping, "outer": Mapping, "under_way": list}
_ENTRIES |= {"averages": int, "skipped": int, "fragments": int, "rounds": Mapping, "settled_after": list}
_ENTRIES |= {"memory": Mapping, "rule": list}
#: The digest of this rank's parameters, which are saved separately. States of earlier versions have none.
_WEIGHTS = "weights"
#: Which shard of a model that is divided among ranks the state is of; no entry if the model is not divided.
_SHARD = "shard"
#: The sum of `LocalAverages.sum_of_weights`, in the state of a replica that is divided among ranks.
_REPLICA_WEIGHTS = "replica_weights"
#: Entries of each rank in the result of `gathered_state`.
_OWN_ENTRIES = ("memory", "rule", "model", "optimizers")
#: Bytes of all ranks that the first rank has on the device of the messages at once.
BYTES_AT_ONCE = 1 << 28


def state_of(averages: LocalAverages, *, in_parts: bool = False) -> dict[str, Any]:
    """Returns the state that this rank needs to continue, in addition to models and optimizers: plain values and
    tensors.

    Not a collective; waits for the averages under way, whose means are part of the state. If an average has failed,
    e.g. because a rank has died, the state has the anchor without it, and a warning says so.

    Args:
        averages: the averages.
        in_parts: return the state of the replica, of whose tensors this rank has a part (see `divided_state`). This is
            a collective on the ranks of the replica.
    """
    saved = [_saved(average, averages.fragments[average.fragment]) for average in averages.succeeded()]
    weights = {_REPLICA_WEIGHTS: averages.sum_of_weights()} if in_parts else {_WEIGHTS: averages.watched.digest()}
    shard = {_SHARD: averages.sharding.shard} if averages.sharding.size > 1 and not in_parts else {}
    state = {
        "schema": STATE_SCHEMA,
        "seed": averages.config.seed,
        "step": averages.step,
        "config": averages.requested.to_dict(),
        "rank": averages.rank,
        "world_size": averages.world_size,
        "averages": averages.averages,
        "skipped": averages.skipped,
        "fragments": averages.options.fragments,
        "rounds": averages.rounds.state_dict(),
        "settled_after": [fragment.settled_after for fragment in averages.fragments],
        "anchors": {entry.name: anchor.clone() for part in averages.fragments for entry, anchor in part.entries()},
        **weights,
        **shard,
        "outer": averages.outer.state_dict(),
        "under_way": saved,
        MEMORY_LAYOUT: averages.store.layout,
        "memory": {
            kind.value: {number: averages.store.row(kind, number).clone() for number in averages.compressed_numbers}
            for kind in averages.store.kinds
        },
        "rule": tree_map_only(Tensor, Tensor.clone, [averager.state() for averager in averages.averagers.values()]),
    }
    return divided(averages, state) if in_parts else state


@torch.inference_mode(False)  # training changes tensors that are created here
@torch.no_grad()
def load_state(averages: LocalAverages, state: Mapping[str, Any], load_beside: Callable[[], object]) -> None:
    """Continue from a rank's state. Not a collective, but it waits for the averages under way, which are lost.

    With the state of another rank, or of another number of ranks, this rank starts from the anchor, and its memory
    starts empty. A warning says so.

    Args:
        averages: the averages of this run.
        state: the result of `state_of`.
        load_beside: function that loads the rest of the checkpoint, such as the optimizers' states, or raises and
            changes nothing; called after the state was checked.

    Raises:
        ConfigError: if ``state`` is no state, or does not fit this run (see `checking.check_local_state`). Nothing is
            changed then.
        CollectiveError: if an average under way has failed. Nothing is changed then.
    """
    check_kind(state, is_merged=False)
    check_state(state, averages.requested, _ENTRIES)
    state = in_plain_names(state)
    if _REPLICA_WEIGHTS in state:
        state = joined(averages, state)
    else:
        _check_shard(averages, state)
    own = (state["rank"], state["world_size"]) == (averages.rank, averages.world_size)
    check_local_state(averages, state, own)
    averages.wait_for_all()  # their jobs would write error memories, and those of the rule, after the state was loaded
    with all_or_nothing([averages.outer]):
        load_outer(averages.outer, state["outer"])
        load_beside()
    for fragment, settled in zip(averages.fragments, state["settled_after"], strict=True):
        fragment.settled_after = settled  # also true for a rank that starts from the anchor
        for entry, anchor in fragment.entries():
            anchor.copy_(state["anchors"][entry.name])
    averages.take_counters(state)
    averages.under_way[:] = [_loaded(averages, saved) for saved in state["under_way"]]
    # Ranks that load different states would keep different anchors for ever, so ranks also compare this.
    averages.mix_into_digest(digest_of_tensors(state["anchors"]))
    averages.watched.forget_others()
    averages.expected_digest = state.get(_WEIGHTS) if own else None
    averages.expected_sum = state.get(_REPLICA_WEIGHTS) if own else None
    if own:
        _take_memory(averages.store, state)
        for averager, saved in zip(averages.averagers.values(), state["rule"], strict=True):
            averager.take(saved)
        return
    for averager in averages.averagers.values():
        averager.take({})
    averages.start_from_anchors()
    logger.warning(
        "gqsgd: the state is that of rank %d of %d, and this is rank %d of %d: this rank starts from the anchor, which "
        "all ranks have in common, and what it had learnt since the last average is lost",
        state["rank"],
        state["world_size"],
        averages.rank,
        averages.world_size,
    )


def _check_shard(averages: LocalAverages, state: Mapping[str, Any]) -> None:
    """Raise ConfigError if a state is that of other parts of the parameters than this rank has."""
    own = averages.sharding.shard
    found = state.get(_SHARD, WHOLE.shard)
    if found != own:
        raise ConfigError(
            f"the state is that of {found!r:.50} of the parameters, and this rank has {own!r}: load the file that a "
            "rank with this shard has saved, in a run with as many shards"
        )


def _take_memory(store: MemoryStore, state: Mapping[str, Any]) -> None:
    """Load this rank's memory, or let it start empty if the rank had other coordinates when the state was written."""
    if layout_of(state, store) == store.layout:
        store.take(rows_of(state["memory"]), 0)
        return
    store.forget()
    alone = ["no owners, because every rank keeps all coordinates"]
    logger.warning(
        "gqsgd: the memory starts empty: that of the state has %s, and this run's has %s",
        *(in_words(layout_of(state, store)) or alone),
        *(in_words(store.layout) or alone),
    )


def gathered_state(averages: LocalAverages, optimizers: Sequence[Optimizer]) -> dict[str, Any] | None:
    """Returns the states of all ranks, on the CPU: the shared entries, and each rank's own entries. All ranks except
    rank 0 return None.

    A collective on the process group. The first rank receives every other rank's parameters, buffers, optimizer state
    and memory.
    """
    state = state_of(averages)
    del state[_WEIGHTS]  # the state itself has the parameters
    own = {
        "memory": state.pop("memory"),
        "rule": state.pop("rule"),
        "model": averages.watched.tensors(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    everyone = gathered(_on_cpu(own), averages.group, averages.device)
    return None if everyone is None else {**_on_cpu(state), "ranks": everyone}


def gathered(value: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any] | None:
    """Returns the values of all ranks, by rank, on the first rank of a group, without pickles that could run code; None
    on the others.

    A collective on the group. The first rank holds the values of all ranks at once, in host memory.

    Args:
        value: plain values and tensors on the CPU, as ``torch.load(..., weights_only=True)`` reads them.
        group: process group.
        device: device of the messages.

    Raises:
        pickle.UnpicklingError: if a rank sent something else.
    """
    own = io.BytesIO()
    torch.save(value, own)
    mine = torch.frombuffer(bytearray(own.getbuffer()), dtype=torch.uint8)
    length = torch.tensor([mine.numel()], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    numbers = [int(number) for number in lengths]
    mine = F.pad(mine, (0, max(numbers) - mine.numel()))  # a gather needs messages of one size
    files = [io.BytesIO() for _ in numbers] if dist.get_rank(group) == 0 else []
    for some in mine.split(max(1, BYTES_AT_ONCE // len(numbers))):
        part = some.to(device)
        rows = [torch.empty_like(part) for _ in files] or None
        dist.gather(part, rows, dist.get_global_rank(group, 0), group=group)
        for file, row in zip(files, rows or (), strict=True):
            file.write(row.cpu().numpy().tobytes())
    for file, number in zip(files, numbers, strict=False):
        file.truncate(number)
        file.seek(0)
    return [torch.load(file, map_location="cpu", weights_only=True) for file in files] or None


@torch.no_grad()
def load_gathered(averages: LocalAverages, state: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> None:
    """Load the result of `gathered_state` on rank 0: this rank's parameters, buffers, optimizers and memory.

    Not a collective; every rank loads it. If the number of ranks differs, all ranks start from the anchor, with the
    first rank's buffers and optimizer state; a warning says so.

    Raises:
        ConfigError: for the reasons of `load_state`.
    """
    check_kind(state, is_merged=False)
    if not isinstance(state, Mapping) or not isinstance(state.get("ranks"), list):
        raise ConfigError("this is not a state of local steps of all ranks; load what rank 0 has saved")
    common = {name: value for name, value in state.items() if name != "ranks"}
    same = len(state["ranks"]) == averages.world_size
    rank = averages.rank if same else 0
    own = state["ranks"][rank] if state["ranks"] else None
    if common.get("world_size") != len(state["ranks"]) or not isinstance(own, Mapping) or set(own) != set(_OWN_ENTRIES):
        raise ConfigError(
            f"the state of local steps does not have {', '.join(_OWN_ENTRIES)} of each of "
            f"{common.get('world_size')!r:.50} ranks; load what rank 0 has saved"
        )
    tensors = averages.watched.tensors()
    model_tensors = in_plain_names(own["model"])
    check_tensors(tensors, model_tensors, "parameters or buffers")
    if not isinstance(own["optimizers"], list) or len(own["optimizers"]) != len(optimizers):
        raise ConfigError("the checkpoint is that of another number of optimizers; resume with those that wrote it")

    def load_own() -> None:
        with all_or_nothing(optimizers):
            for optimizer, saved in zip(optimizers, own["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        for name, tensor in tensors.items():
            # With another number of ranks, trained parameters start from their anchors. Those of another optimizer may
            # have been loaded already.
            if same or not tensor.requires_grad:
                tensor.copy_(model_tensors[name])

    load_state(averages, {**common, "rank": rank, "memory": own["memory"], "rule": own["rule"]}, load_own)


def _saved(average: Average, fragment: Fragment) -> dict[str, Any]:
    """Returns a complete average as plain values and tensors."""
    means: dict[str, Tensor] = {}
    for bundle, change in zip(fragment.bundles, average.changes, strict=True):
        parts = zip(bundle.entries, bundle.split(change), strict=True)
        means.update({entry.name: part.clone() for entry, part in parts})
    return {
        "fragment": average.fragment,
        "use_after": average.use_after,
        "frozen": list(average.frozen),
        "means": means,
        "integers": [value.clone() for value in average.integers],
    }


def _loaded(averages: LocalAverages, saved: Mapping[str, Any]) -> Average:
    """Returns the average from the result of `_saved`."""
    fragment = averages.fragments[saved["fragment"]]
    # States of earlier versions do not say which parameters were frozen.
    frozen = tuple(saved.get("frozen", averages.watched.frozen()))
    changes = [torch.cat([saved["means"][entry.name].flatten() for entry in part.entries]) for part in fragment.bundles]
    changes = [change.to(part.entries[0].tensor.device) for change, part in zip(changes, fragment.bundles, strict=True)]
    return Average(saved["fragment"], saved["use_after"], frozen, changes, integers=list(saved["integers"]))


def _on_cpu(value: Any) -> Any:
    """Returns the same value with all tensors on the CPU."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)
