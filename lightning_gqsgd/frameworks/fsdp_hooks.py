"""Sets the hooks that FSDP2 calls for each module, and checks that they are still set."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.frameworks.fsdp_modules import ShardedGroup


class Reduces(Protocol):
    """The object that the hooks call: `fsdp.GQSGDFSDPState`."""

    def average(self, group: ShardedGroup, reduced: Tensor) -> None:
        """Replace a module's gradient by its mean over replicas."""

    def scatter(self, group: ShardedGroup, output: Tensor, gradients: Tensor, op: Any) -> None:
        """Write this rank's shard of a module's reduced gradient."""


class _ReduceScatter:
    """Stands in for the backend's reduce-scatter, behind torch's `ReduceScatter` interface."""

    def __init__(self, state: Reduces, group: ShardedGroup) -> None:
        self.state = state
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for a flat tensor."""
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce by `GQSGDFSDPState.scatter`. FSDP never asks for ``async_op``."""
        assert not async_op
        self.state.scatter(self._group, output_tensor, input_tensor, op)


def set_hooks(state: Reduces, groups: Sequence[ShardedGroup], *, averages: bool, scatters: bool) -> None:
    """Set the hooks of all modules.

    Args:
        state: the object that the hooks call.
        groups: the modules.
        averages: whether there is an all-reduce hook.
        scatters: whether there is a reduce-scatter.
    """
    for group in groups:
        if averages:
            group.module.set_all_reduce_hook(partial(state.average, group))
        if scatters:
            group.module.set_custom_reduce_scatter(_ReduceScatter(state, group))


def check_hooks(state: Reduces, groups: Sequence[ShardedGroup], *, averages: bool, scatters: bool) -> None:
    """Raise ConfigError if a module has lost a hook to a later one; the arguments are those of `set_hooks`."""
    for group in groups:
        all_reduce, reduce_scatter = group.hooks
        if averages and getattr(getattr(all_reduce, "func", None), "__self__", None) is not state:
            raise ConfigError(_lost(group, "all-reduce hook", "set_all_reduce_hook"))
        if scatters and getattr(reduce_scatter, "state", None) is not state:
            raise ConfigError(_lost(group, "custom reduce-scatter", "set_custom_reduce_scatter"))


def _lost(group: ShardedGroup, kind: str, setter: str) -> str:
    return (
        f"module {group.name!r} no longer has the {kind} of register_gqsgd_fsdp, and FSDP calls one only, so nobody "
        f"would reduce its gradients as agreed: do not call {setter} afterwards, and do what that hook is for after "
        "the backward pass; to let the other hook reduce them, close the state of register_gqsgd_fsdp first"
    )
