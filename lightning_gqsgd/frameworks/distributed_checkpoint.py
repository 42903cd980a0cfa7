"""Saves and loads the states of hooks with torch.distributed.checkpoint (DCP), on all ranks.

DCP flattens dictionaries, and loads into existing values: it asks for each entry of a checkpoint by its name, and
refuses tensors of another size. The size of a hook's memory depends on the number of ranks, and its entries depend on
the configuration. So a state is saved as two opaque entries: one that is the same on all ranks, and the memory of all
ranks, which only rank 0 of the hook's process group saves and loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_gqsgd.ddp.hook import GQSGDState
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.frameworks.fsdp import GQSGDFSDPState
from lightning_gqsgd.reducers.memory import MemoryStore
from lightning_gqsgd.session import checkpoint
from lightning_gqsgd.wire.communicator import Communicator


class DCPState:
    """Lets torch.distributed.checkpoint save and load a hook's state; this is one of its `Stateful` objects.

    It has to be at the top level of what is saved. Saving and loading are collectives over the hook's process group,
    and DCP calls both on all ranks::

        dcp.save({"model": model.state_dict(), "gqsgd": DCPState(state)}, checkpoint_id=folder)
        dcp.load({"model": weights, "gqsgd": DCPState(state)}, checkpoint_id=folder)

    `async_save` copies the state before it returns. If a checkpoint comes from a different number of ranks, the memory
    starts empty, with a warning, as in `GQSGDState.load_state_dict`.

    Args:
        state: the state that `register_gqsgd` or `register_gqsgd_fsdp` has returned.

    Raises:
        ConfigError: if ``state`` is not a state of a hook.
    """

    def __init__(self, state: GQSGDState | GQSGDFSDPState) -> None:
        if not isinstance(state, (GQSGDState, GQSGDFSDPState)):
            raise ConfigError(
                f"DCPState takes what register_gqsgd or register_gqsgd_fsdp has returned, not {type(state).__name__}; "
                "a LocalSteps is saved as an optimizer, as docs/local_steps.md shows"
            )
        self._state = state

    def __reduce__(self) -> Any:
        """Refuse to be pickled, which is what DCP does with objects that are not at the top level."""
        raise ConfigError(
            "DCPState(state) has to be at the top level of what torch.distributed.checkpoint saves, as in {'model': "
            "weights, 'gqsgd': DCPState(state)}; inside of another Stateful, save DCPState(state).state_dict(), and "
            "give it to DCPState(state).load_state_dict"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as entries that DCP does not change. This is a collective if the hook has a memory."""
        saved = self._state.state_dict()
        memory = saved.pop("memory", None)
        if not isinstance(self._state, GQSGDState):  # there is no memory with FSDP2
            return {"state": (saved,)}
        hook = self._state
        if hook.config.remembers:
            kinds = ", ".join(kind.value for kind in hook._store.kinds)
            saved[checkpoint.MEMORY_OF] = (str(hook._engine.world_size), kinds)
        # DCP looks into dictionaries and lists, but not into tuples.
        entries: dict[str, Any] = {"state": (saved,)}
        return {**entries, "memory": (memory,)} if hook._engine.rank == 0 else entries

    def load_state_dict(self, entries: Mapping[str, Any]) -> None:
        """Load the entries of a `state_dict`. This is a collective if the hook has a memory.

        Raises:
            ConfigError: on all ranks, if ``entries`` do not come from `state_dict`, or see
                `GQSGDState.load_state_dict`.
        """
        hook = self._state
        if not isinstance(hook, GQSGDState) or not hook.config.remembers:
            hook.load_state_dict(_entry(entries, "state"))
            return
        store = hook._store
        rank = hook._engine.rank
        ranks = hook._engine.world_size
        with hook._meeting("loading a distributed checkpoint") as meeting:
            hook._engine.check_open()
            state = dict(_entry(entries, "state"))
            checkpoint.check_state(state, hook.requested)
            saved = _entry(entries, "memory") if rank == 0 else None
            numbers = _numbers_of(store, state, saved, ranks)
            (key,) = meeting.agree([{"step": state["step"], "seed": state["seed"]}])
        communicator = hook._engine.communicator
        numbers = _from_first_rank(communicator, numbers)
        # All ranks have what rank 0 has read, and the key of this meeting is a name for it.
        state[checkpoint.MEMORY_NAME] = key
        if numbers:
            state["memory"] = {kind.value: {} for kind in store.kinds}
        for kind in store.kinds:
            for number in numbers:
                rows = None if saved is None else saved[kind.value][number]
                own = torch.empty_like(store.row(kind, number))
                for part in checkpoint.parts_of_row(own.numel(), ranks):
                    own[part] = communicator.scatter(None if rows is None else rows[:, part], own[part])
                state["memory"][kind.value][number] = own.expand(ranks, -1)
        hook.load_state_dict(state)


def _entry(entries: Mapping[str, Any], name: str) -> Any:
    """Returns the value that `DCPState.state_dict` has put into an entry."""
    value = entries.get(name) if isinstance(entries, Mapping) else None
    if not (isinstance(value, tuple) and len(value) == 1):
        raise ConfigError(
            f"the entry {name!r} of a checkpoint's gqsgd state is {value!r:.200}; load what DCPState has saved: give "
            "DCPState(state) to both dcp.save and dcp.load"
        )
    return value[0]


def _numbers_of(store: MemoryStore, state: Mapping[str, Any], saved: Any, ranks: int) -> list[int]:
    """Returns the parameters whose memory can be taken; none if it is that of other ranks or of another configuration.

    Raises:
        ConfigError: it is no memory, or that of a model with other parameters.
    """
    if not saved:
        return []
    checkpoint.check_memory(saved)
    if not checkpoint.fits(store, state, saved, ranks):
        return []
    store.check(saved)
    return sorted({number for tensors in saved.values() for number in tensors})


def _from_first_rank(communicator: Communicator, numbers: list[int]) -> list[int]:
    """Returns rank 0's numbers on all ranks. A collective."""
    device = communicator.control_device
    purpose = "telling the ranks what rank 0 has read of a checkpoint"
    count = int(communicator.gather(torch.tensor([len(numbers)], device=device), purpose)[0])
    mine = torch.tensor(numbers or [0] * count, dtype=torch.int64, device=device)
    return communicator.gather(mine, purpose)[0].tolist() if count else []
