"""Sets the hooks that FSDP2 calls for each module, and checks that they are still set."""

from __future__ import annotations

from collections.abc import Sequence
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

    def gather(self, group: ShardedGroup, weights: Tensor, own: Tensor, ranks: dist.ProcessGroup) -> None:
        """Write all ranks' shards of a module's weights."""


class _Hook:
    """What FSDP calls for one module: its all-reduce hook, or, behind torch's `Comm` interface, another collective."""

    def __init__(self, state: Reduces, group: ShardedGroup) -> None:
        self.state = state
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for a flat tensor."""
        return torch.empty(tuple(size), dtype=dtype, device=device)


class _AllReduce(_Hook):
    def __call__(self, reduced: Tensor) -> None:
        self.state.average(self._group, reduced)


class _ReduceScatter(_Hook):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert not async_op  # FSDP never asks for it
        self.state.scatter(self._group, output_tensor, input_tensor, op)


class _AllGather(_Hook):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        # With ``async_op``, FSDP also accepts that nothing is left to wait for.
        self.state.gather(self._group, output_tensor, input_tensor, group)


#: The hooks in the order of `ShardedGroup.hooks`, each with its name, and the method of torch that replaces it.
_KINDS = (
    (_AllReduce, "all-reduce hook", "set_all_reduce_hook"),
    (_ReduceScatter, "custom reduce-scatter", "set_custom_reduce_scatter"),
    (_AllGather, "custom all-gather", "set_custom_all_gather"),
)


def set_hooks(state: Reduces, groups: Sequence[ShardedGroup], wanted: Sequence[bool]) -> None:
    """Set the hooks of all modules, which call ``state``.

    Args:
        state: the state.
        groups: the modules.
        wanted: whether there is an all-reduce hook, a reduce-scatter and an all-gather.
    """
    for group in groups:
        kinds = zip(_KINDS, wanted, strict=True)
        group.set_hooks([kind(state, group) if is_wanted else None for (kind, *_), is_wanted in kinds])


def check_hooks(state: Reduces, groups: Sequence[ShardedGroup], wanted: Sequence[bool]) -> None:
    """Raise ConfigError if a module has lost a hook to a later one; the arguments are those of `set_hooks`."""
    for group in groups:
        for (_, name, setter), hook, is_wanted in zip(_KINDS, group.hooks, wanted, strict=True):
            if is_wanted and getattr(hook, "state", None) is not state:
                raise ConfigError(
                    f"module {group.name!r} no longer has the {name} of register_gqsgd_fsdp, and FSDP calls one only, "
                    "so nobody would reduce its gradients, or gather its weights, as agreed: do not call "
                    f"{setter} afterwards, and do what that hook is for after the backward pass; to let the other hook "
                    "do it, close the state of register_gqsgd_fsdp first"
                )
