"""The state of `LocalSteps` under torch.distributed.checkpoint, whose functions expect an optimizer of torch.optim.

If an optimizer has no state, ``get_state_dict`` and ``set_state_dict`` of `torch.distributed.checkpoint.state_dict`
first make it do a step with gradients and learning rates of zero. They keep only two entries of its state, ``"state"``
and ``"param_groups"``, but they keep all entries of a group. So the state of local steps is stored in the first group,
as bytes. Bytes are a single value in a checkpoint, so their length may differ from that in the run that loads them.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from typing import Any

import torch

#: Entry of a state that holds the state of local steps, next to the entries of the inner optimizer's state.
STATE_KEY = "local_steps"

_MODULE = "torch.distributed.checkpoint.state_dict"

#: Frames between that module and this one at most: the optimizer's, and those of profilers and schedulers that wrap its
#: methods.
_MOST_FRAMES = 8


def is_called_by_it() -> bool:
    """Returns True if a function of torch.distributed.checkpoint.state_dict calls the optimizer."""
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame.f_globals.get("__name__") == _MODULE:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def packed(inner: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an inner optimizer's state that has the state of local steps in its first group.

    Args:
        inner: the inner optimizer's state.
        own: the state of local steps.
    """
    file = io.BytesIO()
    torch.save(dict(own), file)
    first, *others = inner["param_groups"]
    return {**inner, "param_groups": [{**first, STATE_KEY: file.getvalue()}, *others]}


def unpacked(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a state in the form of `LocalSteps.state_dict`. If `packed` has not made the state, it is returned
    unchanged."""
    groups = state.get("param_groups") or [{}]
    if STATE_KEY in state or not isinstance(groups[0].get(STATE_KEY), bytes):
        return state
    first = {name: value for name, value in groups[0].items() if name != STATE_KEY}
    own = torch.load(io.BytesIO(groups[0][STATE_KEY]), map_location="cpu", weights_only=True)
    return {**state, "param_groups": [first, *groups[1:]], STATE_KEY: own}
