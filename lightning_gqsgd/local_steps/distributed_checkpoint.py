"""The state of `LocalSteps` under torch.distributed.checkpoint, whose functions expect an optimizer of torch.optim.

``get_state_dict`` and ``set_state_dict`` of `torch.distributed.checkpoint.state_dict` first let an optimizer without
state make a step with gradients and learning rates of zero. Of its state they keep two entries, ``"state"`` and
``"param_groups"``, and of a group everything. So the state of local steps travels in the first group, as bytes. They
are a single value in a checkpoint, and so need not have the shape that they have in the run that loads them.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from typing import Any

import torch

#: Where a state has what local steps need, beside the entries of the inner optimizer's state.
STATE_KEY = "local_steps"

_MODULE = "torch.distributed.checkpoint.state_dict"

#: Frames between that module and this one: the optimizer's, and what profilers and schedulers put around its methods.
_MOST_FRAMES = 8


def is_called_by_it() -> bool:
    """Whether a function of torch.distributed.checkpoint.state_dict is what calls the optimizer."""
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame.f_globals.get("__name__") == _MODULE:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def packed(inner: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """An inner optimizer's state, with that of local steps in its first group.

    Args:
        inner: the inner optimizer's.
        own: that of local steps.
    """
    file = io.BytesIO()
    torch.save(dict(own), file)
    first, *others = inner["param_groups"]
    return {**inner, "param_groups": [{**first, STATE_KEY: file.getvalue()}, *others]}


def unpacked(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state in the form of `LocalSteps.state_dict`; one that `packed` has not made is returned as it is."""
    groups = state.get("param_groups") or [{}]
    if STATE_KEY in state or not isinstance(groups[0].get(STATE_KEY), bytes):
        return state
    first = {name: value for name, value in groups[0].items() if name != STATE_KEY}
    own = torch.load(io.BytesIO(groups[0][STATE_KEY]), map_location="cpu", weights_only=True)
    return {**state, "param_groups": [first, *groups[1:]], STATE_KEY: own}
