"""Sets the hooks that FSDP2 calls for each module, and checks that they are still set."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

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

    def gather(self, group: ShardedGroup, weights: Tensor, own: Tensor, ranks: dist.ProcessGroup) -> None:
        """Write all ranks' shards of a module's weights."""


class _Comm:
    """Stands in for a collective of the backend, behind torch's `Comm` interface."""

    def __init__(self, state: Reduces, group: ShardedGroup) -> None:
        self.state = state
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for a flat tensor."""
        return torch.empty(tuple(size), dtype=dtype, device=device)


class _AllGather(_Comm):
    """Stands in for the backend's all-gather."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather by `GQSGDFSDPState.gather`. With ``async_op``, FSDP also accepts that nothing is left to wait for."""
        self.state.gather(self._group, output_tensor, input_tensor, group)


class _ReduceScatter(_Comm):
    """Stands in for the backend's reduce-scatter."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce by `GQSGDFSDPState.scatter`. FSDP never asks for ``async_op``."""
        assert not async_op
        self.state.scatter(self._group, output_tensor, input_tensor, op)


class Hooks(NamedTuple):
    """The collectives of FSDP that a state stands in for.

    Attributes:
        averages: whether there is an all-reduce hook.
        scatters: whether there is a reduce-scatter.
        gathers: whether there is an all-gather.
    """

    averages: bool
    scatters: bool
    gathers: bool


def set_hooks(state: Reduces, groups: Sequence[ShardedGroup], hooks: Hooks) -> None:
    """Set the hooks of all modules, which call ``state``."""
    for group in groups:
        group.set_hooks(
            partial(state.average, group) if hooks.averages else None,
            _ReduceScatter(state, group) if hooks.scatters else None,
            _AllGather(state, group) if hooks.gathers else None,
        )


def check_hooks(state: Reduces, groups: Sequence[ShardedGroup], hooks: Hooks) -> None:
    """Raise ConfigError if a module has lost a hook to a later one; the arguments are those of `set_hooks`."""
    for group in groups:
        all_reduce, reduce_scatter, all_gather = group.hooks
        if hooks.averages and getattr(getattr(all_reduce, "func", None), "__self__", None) is not state:
            raise ConfigError(_lost(group, "all-reduce hook", "set_all_reduce_hook"))
        if hooks.scatters and getattr(reduce_scatter, "state", None) is not state:
            raise ConfigError(_lost(group, "custom reduce-scatter", "set_custom_reduce_scatter"))
        if hooks.gathers and getattr(all_gather, "state", None) is not state:
            raise ConfigError(_lost(group, "custom all-gather", "set_custom_all_gather"))


def _lost(group: ShardedGroup, kind: str, setter: str) -> str:
    return (
        f"module {group.name!r} no longer has the {kind} of register_gqsgd_fsdp, and FSDP calls one only, so nobody "
        f"would reduce its gradients, or gather its weights, as agreed: do not call {setter} afterwards, and do what "
        "that hook is for after the backward pass; to let the other hook do it, close the state of register_gqsgd_fsdp "
        "first"
    )
