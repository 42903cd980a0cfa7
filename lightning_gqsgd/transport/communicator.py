"""Process groups of our own, the agreement of all ranks before the first collective, and their end.

Own groups: the order of our collectives then depends on nothing but ours (DDP broadcasts buffers, and users reduce
metrics, on theirs). Gloo keeps an order only within a group, so that each stage of a piece's way has one, and stages
need no order between them. NCCL has one for all stages: one thread issues its collectives, in the same order on every
rank, and NCCL runs them in that order; another would take memory of the GPU and threads, and two that run at once may
wait for each other for ever. Where ranks of different scopes exchange, a collective starts after the latest of another
group, on the device. Stage 0 is agreement: it waits long, because other ranks may still be compiling kernels.

The groups are backends made directly, under keys of the store that no other group has had. `new_group` gives names
again once a group is destroyed, or by how many groups a process has made (torch 2.15), which may differ among the ranks
of a subgroup; a group under a used or a different name waits for ever.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gqsgd.errors import CollectiveError, ConfigError, describe_difference
from lightning_gqsgd.layout import PIECE_NUMEL
from lightning_gqsgd.reducers.base import ALL, Exchange, Scope
from lightning_gqsgd.transport.staging import Staging

#: How long ranks wait for each other to agree, at least, whatever the timeout of collectives.
AGREEMENT_TIMEOUT = timedelta(minutes=10)

#: Coordinates of a piece over NCCL: one piece for a bucket of DDP's default size, since launches cost more than pieces
#: gain there, and scratch memory of 64 MiB where a bucket is larger.
NCCL_PIECE_NUMEL = 1 << 24

#: Bytes of what is compared: JSON, padded.
AGREEMENT_BYTES = 2048


class Communicator:
    """The ranks of a process group, over groups of our own.

    Creating one is a collective: every rank of ``group`` must do it, in the same order.

    Args:
        device: device of the tensors to come: CUDA over NCCL or, through host memory, over Gloo; CPU over Gloo.
        group: process group; None is the default group.
        timeout: of collectives; None takes that of ``group``.
        stages: between whom the exchanges of a piece are, stage by stage after stage 0 (see `reducers.stages`).

    Attributes:
        rank: this process's rank in the group.
        size: number of ranks.
        backend: ``"gloo"`` or ``"nccl"``.
        device: device of the tensors to come.

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
        self.backend, self.device = _backend_for(parent, device), device
        self._ranks = dist.get_process_group_ranks(parent)
        self._groups: dict[tuple[int, Scope], Any] = {}  # backends; torch's type stubs lack their collectives
        self._latest: tuple[Any, Any] = (None, None)  # group and work of the latest collective
        self._staging: Staging | None = None
        if self.size > 1:
            self._timeout = timeout or _timeout_of(parent, device)
            self._patience = max(self._timeout, AGREEMENT_TIMEOUT)
            self._make_groups(self._unused_key(parent), stages)
            if _needs_staging(self.backend, device):
                self._staging = Staging(self._start, self._patience)

    @property
    def piece_numel(self) -> int:
        """The most coordinates of a piece, about."""
        return NCCL_PIECE_NUMEL if self.backend == "nccl" else PIECE_NUMEL

    @property
    def control_device(self) -> torch.device:
        """Where the messages of an agreement lie."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def start(self, exchange: Exchange, stage: int) -> Any:
        """Start a collective of a stage: 0 is agreement, the others are a reducer's. Returns torch's `Work`.

        Its `wait` returns at once over NCCL: the current stream waits.
        """
        if self._staging is not None:  # all of them, since they have one order
            return self._staging.start(exchange, stage)
        return self._start(exchange, stage)

    def _start(self, exchange: Exchange, stage: int) -> Any:
        kind, output, source, splits, scope = exchange
        group = self._groups[stage, scope]
        if self.backend == "nccl":
            self._make_way(group, stage)
        if kind == "all_to_all":
            work = group.alltoall_base(output, source, *(splits or ([], [])))
        elif kind == "all_gather":
            work = group._allgather_base(output.view(-1), source)
        else:
            work = group.allreduce([output], dist.ReduceOp.MAX if kind == "max" else dist.ReduceOp.SUM)
        if self.backend == "nccl" and len(set(self._groups.values())) > 1:
            self._latest = (group, work)
        return work

    def _make_way(self, group: Any, stage: int) -> None:
        """Before a collective over NCCL: let the current stream wait for the latest one of another group, and set the
        timeout, which a group has one of."""
        latest, work = self._latest
        if work is not None and latest is not group:
            work.wait()
        group._set_default_timeout(self._timeout if stage else self._patience)

    def describe(self, error: BaseException, what: str) -> Exception:
        """An error of this rank with where it happened and what to do; a ConfigError says so itself."""
        if isinstance(error, ConfigError):
            return error
        return CollectiveError(
            f"gqsgd: {what} failed on rank {self.rank} of {self.size} (global rank {self._ranks[self.rank]}, "
            f"{self.backend}): {type(error).__name__}: {error}. Look for the first error among all ranks' logs: "
            "a rank that died or fell behind the process group's timeout fails its peers. The result is NaN."
        )

    def close(self) -> None:
        """Destroy the groups. Not a collective."""
        if self._staging is not None:
            self._staging.close()
        groups, self._groups, self._latest = self._groups, {}, (None, None)
        for group in dict.fromkeys(groups.values()):
            if self.backend == "nccl":  # Gloo's end with their last reference
                group.shutdown()

    def _unused_key(self, parent: dist.ProcessGroup) -> str:
        """A key that this parent's communicators have not used yet, the same on all its ranks.

        Numbered by the store, where every rank counts itself once per communicator: a process's own count would go on
        after the default group is made anew, with processes that start at zero.
        """
        key = f"gqsgd/{parent.group_name}/{'_'.join(map(str, self._ranks))}"
        count = dist.distributed_c10d._get_default_store().add(key, 1)
        return f"{key}/{(count - 1) // self.size}"

    def _make_groups(self, key: str, stages: Sequence[Sequence[Scope]]) -> None:
        """A group for each stage and scope; over NCCL, for each scope."""
        made: dict[tuple[int, Scope], Any] = {}
        for stage, scopes in enumerate([(ALL,), *stages]):
            number = 0 if self.backend == "nccl" else stage
            timeout = self._timeout if stage else self._patience
            for scope in scopes:
                if (number, scope) not in made:
                    made[number, scope] = self._new_group(f"{key}/{number}", scope, timeout)
                self._groups[stage, scope] = made[number, scope]

    def _new_group(self, key: str, scope: Scope, timeout: timedelta) -> Any:
        make: Any = dist.ProcessGroupGloo if self.backend == "gloo" else dist.ProcessGroupNCCL
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
            steps = agreement(facts, self.size, self.control_device)
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
    """The backend of ``group`` for tensors on ``device``: NCCL for CUDA, if it has that there; otherwise Gloo."""
    names = _backends(group)
    if device.type == "cuda" and names.get("cuda") == "nccl":
        return "nccl"
    if device.type in ("cpu", "cuda") and "gloo" in (names.get(device.type), names.get("cpu")):
        return "gloo"
    raise ConfigError(
        f"tensors on {device} over the backend {dist.get_backend_config(group)!r} are not supported; use CUDA tensors "
        "over 'nccl' or 'gloo', or CPU tensors over 'gloo', e.g. init_process_group('cpu:gloo,cuda:nccl') for both"
    )


def _needs_staging(backend: str, device: torch.device) -> bool:
    """Whether collectives go through copies in host memory."""
    return backend == "gloo" and device.type == "cuda"


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend of a group for each type of device."""
    pairs = (entry.partition(":") for entry in str(dist.get_backend_config(group)).split(","))
    return {device: name for device, _, name in pairs}


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    known = device if device.type in _backends(group) else torch.device("cpu")
    options = getattr(group._get_backend(known), "options", None)
    return getattr(options, "_timeout", dist.constants.default_pg_timeout)
