"""Functions that torch.compile leaves alone.

Dynamo runs whatever a compiled train step calls, and also the hook that DDP calls from its backward pass. It cannot
trace threads, process groups and compiled kernels, and fails instead of leaving them out.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


def untraced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function, whose calls torch.compile does not trace, nor what they call.

    `torch.compiler.disable` would import Dynamo at once, which takes seconds. So it is called when Dynamo is there.
    """

    disabled: list[Callable[_P, _T]] = []  # once it was needed; Dynamo would warn of a function that is cached

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not torch.compiler.is_compiling() and "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call
