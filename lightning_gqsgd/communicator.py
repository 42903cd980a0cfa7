"""Process groups of our own, the agreement of all ranks before the first collective, and their end.

Own groups, one for each stage of a piece's way: the order of our collectives then depends on nothing but ours (DDP
broadcasts buffers, and users reduce metrics, on theirs), and stages need no order between them. Stage 0 is agreement:
its group waits long, because other ranks may still be compiling kernels.

The groups are backends made directly, under keys of the store that no other group has had. `new_group` gives names
again once a group is destroyed (torch 2.5), or by how many groups a process has made (2.15), which may differ among the
ranks of a subgroup; a group under a used or a different name waits for ever.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gqsgd.config import ConfigError, describe_difference
from lightning_gqsgd.reducers.base import ALL, Exchange, Scope

#: How long ranks wait for each other to agree, at least, whatever the timeout of collectives.
AGREEMENT_TIMEOUT = timedelta(minutes=10)

#: Bytes of what is compared: JSON, padded.
AGREEMENT_BYTES = 2048


class CollectiveError(RuntimeError):
    """A collective failed: the message names the rank, the collective and the remedy."""


class Communicator:
    """The ranks of a process group, over groups of our own.

    Creating one is a collective: every rank of ``group`` must do it, in the same order.

    Args:
        group: process group; None is the default group.
        device: device of the tensors to come: CPU over Gloo or CUDA over NCCL.
        timeout: of collectives; None takes that of ``group``.
        stages: between whom the exchanges of a piece are, stage by stage after stage 0 (see `reducers.stages`).

    Attributes:
        rank: this process's rank in the group.
        size: number of ranks.

    Raises:
        ConfigError: there is no process group, or its backend does not go with the device.
    """

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        *,
        stages: Sequence[Sequence[Scope]] = (),
    ) -> None:
        parent = parent_group(group)
        self.rank, self.size = dist.get_rank(parent), dist.get_world_size(parent)
        self._ranks = dist.get_process_group_ranks(parent)
        self._backend = _backend_for(parent, device)
        self._device = device
        self._groups: dict[tuple[int, Scope], Any] = {}  # backends; torch's type stubs lack their collectives
        if self.size > 1:
            timeout = timeout or _timeout_of(parent, device)
            key = self._unused_key(parent)
            for stage, scopes in enumerate([(ALL,), *stages]):
                long_enough = timeout if stage else max(timeout, AGREEMENT_TIMEOUT)
                for scope in scopes:
                    self._groups[stage, scope] = self._new_group(f"{key}/{stage}", scope, long_enough)

    def start(self, exchange: Exchange, stage: int) -> Any:
        """Start a collective of a stage: 0 is agreement, the others are a reducer's. Returns torch's `Work`."""
        kind, output, source, splits, scope = exchange
        group = self._groups[stage, scope]
        if kind == "all_to_all":
            return group.alltoall_base(output, source, *(splits or ([], [])))
        if kind == "all_gather":
            return group._allgather_base(output.view(-1), source)
        return group.allreduce([output], dist.ReduceOp.MAX if kind == "max" else dist.ReduceOp.SUM)

    def describe(self, error: BaseException, what: str) -> Exception:
        """An error of this rank with where it happened and what to do; a ConfigError says so itself."""
        if isinstance(error, ConfigError):
            return error
        return CollectiveError(
            f"gqsgd: {what} failed on rank {self.rank} of {self.size} (global rank {self._ranks[self.rank]}, "
            f"{self._backend}): {type(error).__name__}: {error}. Look for the first error among all ranks' logs: "
            "a rank that died or fell behind the process group's timeout fails its peers. The result is NaN."
        )

    def close(self) -> None:
        """Destroy the groups. Not a collective."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            if self._backend == "nccl":  # Gloo's end with their last reference
                (getattr(group, "shutdown", None) or group._shutdown)()  # torch 2.5 has the latter

    def _unused_key(self, parent: dist.ProcessGroup) -> str:
        """A key that this parent's communicators have not used yet, the same on all its ranks.

        Numbered by the store, where every rank counts itself once per communicator: a process's own count would go on
        after the default group is made anew, with processes that start at zero.
        """
        key = f"gqsgd/{parent.group_name}/{'_'.join(map(str, self._ranks))}"
        count = dist.distributed_c10d._get_default_store().add(key, 1)
        return f"{key}/{(count - 1) // self.size}"

    def _new_group(self, key: str, scope: Scope, timeout: timedelta) -> Any:
        make: Any = dist.ProcessGroupGloo if self._backend == "gloo" else dist.ProcessGroupNCCL
        members = scope.members(self.rank, self.size)
        key = f"{key}/{scope.kind}/{members[0]}"
        store = dist.PrefixStore(key, dist.distributed_c10d._get_default_store())
        return make(store, members.index(self.rank), len(members), timeout)

    def agree(self, facts: dict[str, Any]) -> None:
        """Compare a flat dictionary of plain values over all ranks. A collective, outside any job.

        Raises:
            ConfigError: they differ; raised on every rank.
        """
        if self.size > 1:
            steps = agreement(facts, self.size, self._device)
            for exchanges in steps:
                for exchange in exchanges:
                    self.start(exchange, stage=0).wait()

    def gather(self, tensor: Tensor) -> Tensor:
        """Every rank's tensor, [ranks, ...]. A collective, outside any job."""
        everyone = torch.empty(self.size, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if self.size == 1 or not tensor.numel():
            return everyone.copy_(tensor)
        self.start(Exchange("all_gather", everyone, tensor.contiguous().view(-1)), stage=0).wait()
        return everyone


def agreement(facts: dict[str, Any], ranks: int, device: torch.device) -> Generator[Sequence[Exchange], None, None]:
    """The exchange that compares a flat dictionary of plain values over all ranks, as steps.

    Raises:
        ConfigError: they differ (on every rank), or are too long.
    """
    text = json.dumps(facts, sort_keys=True).encode()
    if len(text) > AGREEMENT_BYTES:
        raise ConfigError(
            f"the configuration takes {len(text)} bytes as JSON, at most {AGREEMENT_BYTES} fit; shorten `exclude`"
        )
    mine = torch.frombuffer(bytearray(text.ljust(AGREEMENT_BYTES)), dtype=torch.uint8).to(device)
    everyone = torch.empty(ranks, AGREEMENT_BYTES, dtype=torch.uint8, device=device)
    yield (Exchange("all_gather", everyone, mine),)

    first, *others = (json.loads(bytes(row.tolist())) for row in everyone.cpu())
    for rank, theirs in enumerate(others, start=1):
        if theirs != first:
            raise ConfigError(
                f"ranks 0 and {rank} do not agree: {describe_difference(first, theirs)}; give every rank the same"
            )


def parent_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself, or the default one.

    Raises:
        ConfigError: torch.distributed is not initialised.
    """
    parent = group if group is not None else dist.group.WORLD
    if not dist.is_initialized() or parent is None:
        raise ConfigError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
    return parent


def is_alive(group: dist.ProcessGroup) -> bool:
    """False once a group has been destroyed."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def _backend_for(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend of ``group`` for tensors on ``device``."""
    names = str(dist.get_backend_config(group)) if hasattr(dist, "get_backend_config") else dist.get_backend(group)
    supported = {"cpu": "gloo", "cuda": "nccl"}
    backend = supported.get(device.type)
    if backend is None or backend not in names:
        raise ConfigError(
            f"tensors on {device} over the backend {names!r} are not supported; "
            "use CPU tensors over 'gloo' or CUDA tensors over 'nccl'"
        )
    return backend


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", dist.constants.default_pg_timeout)
