"""Checks of a state of local steps, before any part of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.wire import is_in_range
from lightning_gqsgd.local_steps.averages import LocalAverages
from lightning_gqsgd.reducers.memory import Keeps
from lightning_gqsgd.session.checkpoint import REMEDY, is_count, layout_of
from lightning_gqsgd.session.parameters import plain_name


def in_plain_names(state: Any) -> Any:
    """Returns a state whose tensors have the names of `fragments.Entry`. In states of earlier versions, those of a
    compiled model have other ones."""
    if isinstance(state, Mapping):
        return {in_plain_names(key): in_plain_names(one) for key, one in state.items()}
    if isinstance(state, list):
        return [in_plain_names(one) for one in state]
    return plain_name(state) if isinstance(state, str) else state


def check_kind(state: object, *, is_merged: bool) -> None:
    """Raise ConfigError for a state of the other kind of local steps than this run's."""
    if not isinstance(state, Mapping) or ("merged" in state) == is_merged:
        return
    averages = "has a number of steps between averages"
    merges = "merges by the clock or with members that come and go"
    before, now = (averages, merges) if is_merged else (merges, averages)
    raise ConfigError(
        f"the state is that of a run that {before}, and this run {now}; resume with the options that wrote it"
    )


def check_local_state(averages: LocalAverages, state: Mapping[str, Any], own: bool) -> None:
    """Check that a state fits this run.

    Args:
        averages: the averages of this run.
        state: a rank's state, whose entries have the right types.
        own: whether it is the state of this rank.

    Raises:
        ConfigError: if it is the state of another model, rule, number of fragments or, with a memory, rank; or if it
            has nested entries that `checkpoint.state_of` does not write.
    """
    here = {entry.name: anchor for fragment in averages.fragments for entry, anchor in fragment.entries()}
    check_tensors(here, state["anchors"], "trained parameters or buffers")
    if state["fragments"] != averages.options.fragments:
        raise ConfigError(
            f"the state of local steps was written with fragments={state['fragments']}, this run has "
            f"fragments={averages.options.fragments}; resume with the same number"
        )
    _check_order(averages, state)
    if own:
        _check_own(averages, state)
    same_ranks = state["world_size"] == averages.world_size
    remembers = averages.config.remembers or averages.options.averaging.remembers
    if remembers and same_ranks and not own:
        raise ConfigError(
            f"the state of local steps is that of rank {state['rank']}, this is rank {averages.rank}, and with a "
            "memory every rank needs its own: save and load a file for each rank"
        )


def check_tensors(here: Mapping[str, Tensor], saved: object, what: str) -> None:
    """Check that saved tensors have the names and shapes of this run's tensors, and fit into their dtypes.

    Args:
        here: this run's tensors by name.
        saved: the state's entry for them.
        what: a word for the tensors, for the error.

    Raises:
        ConfigError: if names or shapes differ, or if a finite value becomes infinite here.
    """
    if not isinstance(saved, Mapping):
        raise ConfigError(f"the state of local steps has {saved!r:.100}, which is not {what} by name; {REMEDY}")
    missing = sorted(set(here) ^ set(saved), key=str)
    if missing:
        raise ConfigError(
            f"the state of local steps is that of a model with other {what} ({missing[0]!r} is on one side only); "
            "resume with the model that wrote it, and with the same parameters frozen, or load the weights without the "
            "state, and local steps begin anew"
        )
    for name, tensor in here.items():
        found = saved[name]
        if not isinstance(found, Tensor) or found.shape != tensor.shape:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(
                f"the state of local steps has {shape} for {name!r}, this model {tuple(tensor.shape)}; resume with the "
                "model that wrote it"
            )
        if not is_in_range(found, tensor.dtype):
            raise ConfigError(
                f"the state of local steps has {found.dtype} for {name!r} with values beyond the largest number of "
                f"this model's {tensor.dtype}; resume with a model of the dtype that wrote it"
            )


def _check_order(averages: LocalAverages, state: Mapping[str, Any]) -> None:
    """Check the position of the saved run in its rounds."""
    settled = state["settled_after"]
    rounds = state["rounds"]
    if len(settled) != len(averages.fragments) or not all(step is None or is_count(step) for step in settled):
        raise ConfigError(f"the state of local steps has settled_after={settled!r:.100}; {REMEDY}")
    if set(rounds) != {"number", "begun_after"} or not all(map(is_count, rounds.values())):
        raise ConfigError(f"the state of local steps has rounds={rounds!r:.100}; {REMEDY}")
    for saved in state["under_way"]:
        _check_average(averages, saved)


def _check_average(averages: LocalAverages, saved: Any) -> None:
    """Check an average that was under way."""
    entries: Mapping[str, Any] = saved if isinstance(saved, Mapping) else {}
    number = entries.get("fragment")
    last = len(averages.fragments) - 1
    if not (isinstance(number, int) and 0 <= number <= last and is_count(entries.get("use_after"))):
        raise ConfigError(f"the state of local steps has an average under way that is {saved!r:.100}; {REMEDY}")
    here = {entry.name: anchor for entry, anchor in averages.fragments[number].entries()}
    check_tensors(here, saved.get("means"), "parameters or buffers under way")
    frozen = saved.get("frozen", [])  # states of earlier versions have none
    if not isinstance(frozen, list) or not all(isinstance(name, str) for name in frozen):
        raise ConfigError(f"the state of local steps has frozen={frozen!r:.100} under way; {REMEDY}")
    integers = saved.get("integers")
    if not isinstance(integers, list) or not all(isinstance(value, Tensor) for value in integers):
        raise ConfigError(f"the state of local steps has integers={integers!r:.100} under way; {REMEDY}")


def _check_own(averages: LocalAverages, state: Mapping[str, Any]) -> None:
    """Check the memories of this rank."""
    here = [averager.state() for averager in averages.averagers.values()]
    saved = state["rule"]
    if len(saved) != len(here) or any(set(one) != set(other) for one, other in zip(saved, here, strict=True)):
        raise ConfigError(
            f"the state of local steps was written with another rule of averages than {averages.options.rule}; resume "
            "with the rule that wrote it"
        )
    for part, saved_part in zip(here, saved, strict=True):
        check_tensors(part, saved_part, "parameters or buffers")
    _check_kinds(state["memory"])
    if layout_of(state, averages.store) == averages.store.layout:  # otherwise, the memory starts empty
        averages.store.check(rows_of(state["memory"]))


def _check_kinds(memory: Mapping[str, Any]) -> None:
    known = [kind.value for kind in Keeps]
    are_tensors = all(
        isinstance(rows, Mapping) and all(isinstance(row, Tensor) for row in rows.values()) for rows in memory.values()
    )
    if not are_tensors or not set(memory) <= set(known):
        raise ConfigError(
            f"the state of local steps has a memory of {', '.join(map(repr, memory))}, which is not tensors by kind "
            f"({', '.join(known)}) and parameter number; {REMEDY}"
        )


def rows_of(memory: Mapping[str, Mapping[int, Tensor]]) -> dict[str, dict[int, Tensor]]:
    """Returns one rank's memory in the format for all ranks: tensors [1, numel] by kind and parameter number."""
    return {kind: {number: row[None] for number, row in rows.items()} for kind, rows in memory.items()}
