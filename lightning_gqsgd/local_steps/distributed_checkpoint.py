"""The state of `LocalSteps` under torch.distributed.checkpoint, whose functions expect an optimizer of torch.optim.

If an optimizer has no state, ``get_state_dict`` and ``set_state_dict`` of `torch.distributed.checkpoint.state_dict`
first make it do a step with gradients and learning rates of zero. They keep only two entries of its state, ``"state"``
and ``"param_groups"``, but they keep all entries of a group. So the state of local steps is stored in the first group,
as bytes. Bytes are a single value in a checkpoint, so their length may differ from that in the run that loads them.
Tensors that are divided among ranks are stored beside the inner optimizer's state of their parameter; see
`divided_state`.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile, islice
from types import FrameType
from typing import Any

import torch

from lightning_gqsgd.session.parameters import keys_in

#: Entry of a state that holds the state of local steps, next to the entries of the inner optimizer's state.
STATE_KEY = "local_steps"

#: Entry of the state of local steps that has tensors by parameter, see `divided_state`.
PARTS = "parts"

_MODULE = "torch.distributed.checkpoint.state_dict"

#: Frames between that module and this one at most: the optimizer's, and those of profilers and schedulers that wrap its
#: methods.
_MOST_FRAMES = 8


def is_called_by_it() -> bool:
    """Returns True if a function of torch.distributed.checkpoint.state_dict calls the optimizer."""
    return _MODULE in islice(_modules_above(), _MOST_FRAMES)


def package_that_calls_it() -> str:
    """Returns the package whose function calls torch.distributed.checkpoint.state_dict, such as ``"accelerate"``; empty
    if none does."""
    above = dropwhile(lambda module: module != _MODULE, _modules_above())
    packages = (module.partition(".")[0] for module in above)
    return next((package for package in packages if package != "torch"), "")


def _modules_above() -> Iterator[str]:
    """Yields the modules of the calling functions, from the caller of the caller on."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame.f_globals.get("__name__", "")
        frame = frame.f_back


def packed(inner: Mapping[str, Any], own: Mapping[str, Any], names: Sequence[str | None]) -> dict[str, Any]:
    """Returns an inner optimizer's state that has the state of local steps in its first group.

    Args:
        inner: the inner optimizer's state.
        own: the state of local steps. Its parts, if it has some, are stored beside the inner state of their parameters.
        names: the names of the inner optimizer's parameters, in order; None for one that has no part.
    """
    parts = own.get(PARTS, {})
    state = dict(inner["state"])
    for key, name in zip(keys_in(inner), names, strict=False):
        if name in parts:
            state[key] = {**state.get(key, {}), STATE_KEY: parts[name]}
    file = io.BytesIO()
    torch.save({name: value for name, value in own.items() if name != PARTS}, file)
    first, *others = inner["param_groups"]
    return {**inner, "state": state, "param_groups": [{**first, STATE_KEY: file.getvalue()}, *others]}


def unpacked(state: Mapping[str, Any], names: Sequence[str | None]) -> Mapping[str, Any]:
    """Returns a state in the form of `LocalSteps.state_dict`. If `packed` has not made the state, it is returned
    unchanged.

    Args:
        state: the state.
        names: see `packed`.
    """
    groups = state.get("param_groups") or [{}]
    if STATE_KEY in state or not isinstance(groups[0].get(STATE_KEY), bytes):
        return state
    first = {name: value for name, value in groups[0].items() if name != STATE_KEY}
    own = torch.load(io.BytesIO(groups[0][STATE_KEY]), map_location="cpu", weights_only=True)
    loaded = {**state, "param_groups": [first, *groups[1:]], STATE_KEY: own}
    entries: Mapping[Any, Mapping[str, Any]] = state.get("state", {})
    parts = {key: values[STATE_KEY] for key, values in entries.items() if STATE_KEY in values}
    if parts:
        name_of = dict(zip(keys_in(state), names, strict=False))
        own[PARTS] = {name_of.get(key, key): values for key, values in parts.items()}
        rests = {key: {name: values[name] for name in values if name != STATE_KEY} for key, values in entries.items()}
        loaded["state"] = {key: rest for key, rest in rests.items() if rest}
    return loaded
