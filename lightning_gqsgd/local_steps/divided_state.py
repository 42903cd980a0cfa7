"""The state of local steps for torch.distributed.checkpoint (DCP), of a model that is divided among ranks.

All ranks of a replica save under the same names, and each of them has other parts of the parameters. So tensors that
belong to a parameter are taken out of the state: its anchor, the outer optimizer's tensors, and the mean change if its
average is under way. They are stored as DTensors beside the inner optimizer's state of the parameter. DCP puts their
parts together, and divides them among the ranks that load them, which may be more or fewer. Everything else is the same
on all ranks of a replica, or made so.

DCP loads only what the run that loads has a name for. So the names depend on the options alone, and zeros are stored in
place of tensors that are not there yet.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES
from lightning_gqsgd.local_steps.averages import LocalAverages
from lightning_gqsgd.local_steps.distributed_checkpoint import PARTS, package_that_calls_it
from lightning_gqsgd.local_steps.fragments import Entry
from lightning_gqsgd.local_steps.outer import make_outer
from lightning_gqsgd.local_steps.sharding import divided_like, own_part
from lightning_gqsgd.session.parameters import parameters_of

logger = logging.getLogger(__name__)

#: Stands in a state for a tensor that is in the entry `PARTS`.
_ELSEWHERE = "beside the inner optimizer's state"

#: Packages that save checkpoints for their users.
_FRAMEWORKS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")

#: What to do with a state that DCP cannot store.
_INSTEAD = "save model.state_dict() and optimizer.state_dict() on every rank, in a file of its own"


def names_of(averages: LocalAverages, optimizer: Optimizer) -> list[str | None]:
    """Returns the names of an inner optimizer's parameters, in order; None for those that are not averaged."""
    names = {id(entry.whole): entry.name for entry, _ in _parameters_of(averages)}
    return [names.get(id(parameter)) for parameter in parameters_of([optimizer])]


@torch.no_grad()
def divided(averages: LocalAverages, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state with an entry `PARTS`, which has the tensors of parameters: DTensors by kind, by parameter name.

    A collective on the ranks of the replica.

    Args:
        averages: the averages that ``state`` is of.
        state: the result of `checkpoint.state_of`.

    Raises:
        ConfigError: if the rule of averages or the outer optimizer remembers tensors of other shapes than parameters.
    """
    if averages.options.averaging.remembers:
        raise ConfigError(
            f"rule={averages.options.rule!r} has a memory that torch.distributed.checkpoint cannot divide among the "
            f"ranks of a replica; {_INSTEAD}"
        )
    _say_if_replicas_mix(averages)
    own = _with_own_dictionaries(state)
    numbers = _numbers_of(averages)
    expected = _outer_tensors(averages)
    parts: dict[str, dict[str, Tensor]] = {}
    for entry, anchor in _parameters_of(averages):
        dtypes = {"anchor": anchor.dtype, **expected[entry.name]}
        if averages.options.delay:
            dtypes["mean"] = COMPUTE_DTYPES[entry.tensor.dtype]
        tensors = {kind: torch.zeros_like(anchor, dtype=dtype) for kind, dtype in dtypes.items()}
        for kind, (owner, key) in _places_of(own, entry.name, numbers[entry.name]).items():
            value = owner[key]
            if isinstance(value, Tensor) and (kind in tensors or _is_part(averages, anchor, key, value)):
                tensors[kind] = value
                owner[key] = _ELSEWHERE
        parts[entry.name] = {kind: divided_like(entry.whole, tensor) for kind, tensor in tensors.items()}
    # Buffers may differ between the ranks of a replica, of which DCP keeps one. All replicas have to keep the same.
    shared = tree_leaves([own["anchors"], own["under_way"]])
    averages.sharding.take_from_first(leaf for leaf in shared if isinstance(leaf, Tensor))
    return {**own, PARTS: parts}


def _say_if_replicas_mix(averages: LocalAverages) -> None:
    """Warn if a framework asks for the state, which saves all replicas under one name, and replicas have different
    weights."""
    framework = package_that_calls_it()
    is_first = averages.rank == averages.sharding.place == 0
    if framework not in _FRAMEWORKS or averages.world_size == 1 or not is_first or not averages.step:
        return  # before the first step, it asks for what to load into
    if not averages.is_at_anchor():
        logger.warning(
            "gqsgd: %s saves all replicas under the same names, and they have different weights until the next "
            "average. If it saves shards (a folder), some are of one replica and some of another: a resumed "
            "training goes on from the anchor, but these weights are those of no model. Save right after an average "
            "without a delay, inside of averages.at_anchor(), or after finish()",
            framework,
        )


def joined(averages: LocalAverages, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state of which `divided` has made this one, with this rank's parts of all tensors.

    Raises:
        ConfigError: if a tensor is missing.
    """
    own = _with_own_dictionaries(state)
    parts = own.pop(PARTS, {})
    numbers = _numbers_of(averages)
    for entry, _ in _parameters_of(averages):
        for kind, (owner, key) in _places_of(own, entry.name, numbers[entry.name]).items():
            if isinstance(owner[key], Tensor) or owner[key] != _ELSEWHERE:
                continue
            found = parts.get(entry.name, {}).get(kind)
            if not isinstance(found, Tensor):
                raise ConfigError(
                    f"the state of local steps was saved by torch.distributed.checkpoint, and its {kind!r} of "
                    f"{entry.name!r} was not loaded: load it by get_state_dict, dcp.load and set_state_dict, with the "
                    "outer optimizer and the delay that wrote it, into a model that fully_shard has divided, be it "
                    "among one rank"
                )
            owner[key] = own_part(found)
    return own


def _with_own_dictionaries(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a state with the same tensors."""
    own: dict[str, Any] = tree_map_only(Tensor, Tensor.detach, dict(state))
    return own


def _parameters_of(averages: LocalAverages) -> Iterator[tuple[Entry, Tensor]]:
    """Returns the averaged parameters with their anchors."""
    entries = (pair for fragment in averages.fragments for pair in fragment.entries())
    return ((entry, anchor) for entry, anchor in entries if not entry.is_buffer)


def _numbers_of(averages: LocalAverages) -> dict[str, int]:
    """Returns the numbers of the parameters' anchors in the outer optimizer, by the parameters' names."""
    numbers = {id(anchor): number for number, anchor in enumerate(parameters_of([averages.outer]))}
    return {entry.name: numbers[id(anchor)] for entry, anchor in _parameters_of(averages)}


def _places_of(state: Mapping[str, Any], name: str, number: int) -> dict[str, tuple[dict[Any, Any], Any]]:
    """Returns the places of a parameter's values in a state, by kind: dictionaries and keys.

    Args:
        state: the state of local steps.
        name: name of the parameter.
        number: number of its anchor in the outer optimizer.
    """
    owners = [("anchor", state["anchors"]), *(("mean", average["means"]) for average in state["under_way"])]
    places = {kind: (owner, name) for kind, owner in owners if name in owner}
    of_outer = state["outer"]["state"].get(number, {})
    return {**places, **{f"outer.{key}": (of_outer, key) for key in of_outer}}


def _outer_tensors(averages: LocalAverages) -> dict[str, dict[str, torch.dtype]]:
    """Returns the outer optimizer's tensors that have the shapes of anchors: dtypes by kind, by the parameters' names.

    The outer optimizer creates them in its first step, so another one makes a step of small tensors.
    """
    pairs = list(_parameters_of(averages))
    small = [torch.zeros([2] * anchor.ndim, dtype=anchor.dtype, device=anchor.device) for _, anchor in pairs]
    outer = make_outer(averages.options.outer, small)
    for tensor in small:
        tensor.grad = torch.zeros_like(tensor)
    outer.step()
    return {
        entry.name: {
            f"outer.{key}": value.dtype
            for key, value in outer.state[tensor].items()
            if _is_part(averages, tensor, key, value)
        }
        for (entry, _), tensor in zip(pairs, small, strict=True)
    }


def _is_part(averages: LocalAverages, anchor: Tensor, key: object, value: object) -> bool:
    """Returns whether a value of the outer optimizer's state for an anchor is divided as the anchor is. Others, such as
    a count of steps, are the same on all ranks.

    Raises:
        ConfigError: if it is a tensor of another shape.
    """
    if not isinstance(value, Tensor) or (value.ndim == 0 and anchor.ndim):
        return False
    if value.shape != anchor.shape:
        raise ConfigError(
            f"the outer optimizer {type(averages.outer).__name__} keeps {key!r} in another shape than that of its "
            f"parameter, so torch.distributed.checkpoint cannot divide it among the ranks of a replica; {_INSTEAD}"
        )
    return True
