"""The package's own process groups, and collectives on them.

The groups are our own, so the order of their collectives depends only on our calls (DDP broadcasts buffers, and users
reduce metrics, on other groups). Gloo keeps an order only within a group, so each stage of a piece has its own group,
and stages need no order between them. NCCL has one group for all stages: one thread issues its collectives, in the same
order on every rank, and NCCL runs them in that order. Another group would take GPU memory and threads, and two groups
that run at once may deadlock. If ranks of different scopes exchange, there is a group for each scope, and a collective
starts, on the device, after the latest collective of our other groups.

Collectives of other groups over NCCL (SyncBatchNorm's, or those with which DDP finds out which parameters were used)
need no such order. They are issued on the stream of the backward pass, which waits for each of them. Our streams first
wait for the stream of the backward pass, so all earlier collectives of other groups have ended when ours start. Of the
later ones, at most one runs at the same time as at most one of ours, on any rank. The kernels of two NCCL collectives
fit on a GPU together, so neither waits for the other to end.

Over Gloo, a stage may have several groups, which pieces use in turns. Each has a connection to every other rank. If all
ranks of a group are on one machine, and their tensors are in its host memory, they also have `shared_memory`, which
runs all collectives that it supports instead of Gloo.

Stage 0 is for agreements between ranks and for gathering memories; the other stages belong to a reducer. The groups are
backends that are created directly, under a key that no other groups have had (see `meeting`), because the names that
`new_group` chooses may differ between the ranks of a subgroup.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from ctypes import py_object, pythonapi
from datetime import timedelta
from ipaddress import ip_address
from itertools import product
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gqsgd.errors import CollectiveError, ConfigError
from lightning_gqsgd.kernels.layout import PieceSize
from lightning_gqsgd.reducers.base import ALL, Exchange, Scope
from lightning_gqsgd.wire import neighbours
from lightning_gqsgd.wire.peers import Peers, backends_of, check_alive, peers_of
from lightning_gqsgd.wire.shared_memory import SharedGroup
from lightning_gqsgd.wire.staging import Staging
from lightning_gqsgd.wire.store import EndingStore

logger = logging.getLogger(__name__)

#: The longest time that ranks may wait for each other, because clocks cannot add much more to the current time.
LONGEST_TIMEOUT = timedelta(days=3650)
#: Gloo waits for a connection so many times as long as its timeout says.
GLOO_PATIENCE = 5
#: Coordinates of a piece over NCCL: one piece for a bucket of DDP's default size, since kernel launches cost more than
#: smaller pieces would gain. A piece holds two messages and a shard, and `pipeline.MAX_ON_STREAM` pieces of each of two
#: streams are under way. So scratch memory on a GPU is at most 4 (2 + 1/ranks) times 16 MiB at 8 bits, less with fewer
#: bits, and the same for uncompressed parameters, whose pieces are smaller. PyTorch's allocator keeps it from step to
#: step.
NCCL_PIECE_NUMEL = 1 << 24
NCCL_PIECE_SIZE = PieceSize(NCCL_PIECE_NUMEL, NCCL_PIECE_NUMEL)

#: Seconds that `close` waits for this rank's own last collective over NCCL.
CLOSE_S = 5.0


class Communicator:
    """Runs collectives between the ranks of a process group, over our own groups.

    Creating one is a collective: every rank of ``group`` has to create one, with the same key.

    Args:
        device: device of the tensors of later collectives: CUDA over NCCL or, through host memory, over Gloo; CPU over
            Gloo.
        group: process group, or the ranks themselves.
        key: a name that no other communicator has had, the same on all ranks (see `meeting.Meeting.agree`).
        timeout: timeout of collectives; None uses the timeout of ``group``.

    Attributes:
        rank: this process's rank in the group.
        size: number of ranks.
        numbers: the numbers of the ranks among all processes, in order.
        backend: ``"gloo"`` or ``"nccl"``.
        device: device of the tensors of later collectives.
        timeout: timeout of collectives.

    Raises:
        ConfigError: if the backend of the group does not support the device.
    """

    def __init__(
        self, device: torch.device, group: dist.ProcessGroup | Peers, key: str, timeout: timedelta | None = None
    ) -> None:
        peers = peers_of(group)
        self.rank = peers.own
        self.size = peers.size()
        self.backend = backend_for(group, device)
        self.device = device
        self._key = key
        self.timeout = timeout or timeout_of(group, device)
        self.numbers = peers.numbers
        # Gloo waits in this store when groups are created, while its process may be stopped.
        self._store = peers.store if self.backend == "nccl" else EndingStore(peers.store, self.timeout)
        # Backends by stage, scope and turn; torch's type stubs lack their collectives.
        self._groups: dict[tuple[int, Scope, int], Any] = {}
        self._shared: dict[tuple[int, Scope, int], SharedGroup] = {}
        # Gloo's devices, by turn. Each has a thread that wakes up a hundred times a second, even if no data arrive.
        self._devices: dict[int, Sequence[Any]] = {0: peers.devices} if peers.devices else {}
        self._apart: set[Scope] = set()  # scopes whose ranks share no memory
        self._turn = 0
        self._has_several = False  # whether groups over NCCL have to be kept in order
        self._latest: tuple[Any, Any] = (None, None)  # group and work of the latest collective
        self._staging: Staging | None = None
        self._has_failed = False
        self._tried: weakref.WeakSet[Any] = weakref.WeakSet()  # groups that have run a collective
        neighbours.is_wanted()  # checks the variable before other ranks wait for this one
        if self.size > 1:
            self.extend([])
            if needs_staging(self.backend, device):
                self._staging = Staging(self._start, self.timeout)
        _alive.add(self)

    def piece_size(self, bits: int) -> PieceSize:
        """Returns the number of coordinates of a piece whose codes have ``bits`` bits."""
        if self.backend != "nccl":
            return PieceSize.of_bits(bits)
        numel = NCCL_PIECE_NUMEL * 8 // max(8, bits)
        return PieceSize(numel, numel)

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks exchange through memory that they share."""
        return (0, ALL, 0) in self._shared

    def adds_in_memory(self, dtype: torch.dtype) -> bool:
        """Returns whether sums of gradients of a dtype run through memory that the ranks share, and not over Gloo."""
        shared = self._shared.get((1, ALL, 0))
        return shared is not None and shared.adds(dtype)

    @property
    def control_device(self) -> torch.device:
        """The device of messages that the host writes and reads: the GPU over NCCL, and otherwise the CPU."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def extend(self, stages: Sequence[Sequence[Scope]], connections: int = 1) -> None:
        """Create the groups that a piece's exchanges need and that do not exist yet. Groups for stage 0 exist from the
        start.

        A collective: every rank has to call it, with the same stages.

        Args:
            stages: the scopes of the exchanges, for each stage after stage 0 (see `reducers.stages`).
            connections: number of groups for each stage after stage 0; more than 1 only over Gloo.

        Raises:
            CollectiveError: if other ranks do not arrive within the timeout.
            ConfigError: if several connections are requested over NCCL, which has its own.
        """
        if connections > 1 and self.backend == "nccl":
            raise ConfigError(
                f"connections={connections} is for Gloo; leave it out, and set NCCL_NSOCKS_PERTHREAD or "
                "NCCL_SOCKET_NTHREADS for NCCL"
            )
        for stage, scopes in enumerate([(ALL,), *stages] if self.size > 1 else []):
            for scope, turn in product(scopes, range(connections if stage else 1)):
                if (stage, scope, turn) not in self._groups:
                    self._groups[stage, scope, turn] = self._group_for(stage, scope, turn)
                    self._share(stage, scope, turn)
        self._has_several = self.backend == "nccl" and len(set(self._groups.values())) > 1

    def try_groups(self) -> None:
        """Over NCCL, run one tiny collective in each group that has run none. A collective.

        NCCL connects ranks when a group is used for the first time. Without this call, that would happen in the first
        backward pass: it would take seconds there, and errors of a misconfigured network would be raised there.

        Raises:
            CollectiveError: if the ranks cannot be connected.
        """
        if self.backend != "nccl":
            return
        for (stage, scope, _), group in list(self._groups.items()):
            if group in self._tried:
                continue
            self._tried.add(group)
            number = torch.zeros(1, device=self.device)
            try:
                self.start(Exchange("max", number, number, scope=scope), stage).wait()
            except RuntimeError as error:
                raise self.describe(error, "the first collective of a group") from error

    def next_turn(self, connections: int) -> int:
        """Returns the connection of the next piece. Every rank has to call this in the same order."""
        turn = self._turn % connections
        self._turn += 1
        return turn

    def _group_for(self, stage: int, scope: Scope, turn: int) -> Any:
        """Returns the group of a stage, scope and turn; over NCCL, all stages of a scope share one group."""
        if self.backend == "nccl":
            # Each NCCL communicator takes GPU memory and threads, and NCCL keeps the order of collectives within one.
            same = [group for (_, other, _), group in self._groups.items() if other == scope]
            if same:
                return same[0]
        members = scope.members(self.rank, self.size)
        # Two sizes of nodes have other groups with the same first rank.
        key = f"gqsgd/groups/{self._key}/{stage}/{scope.kind}/{scope.node_size}/{members[0]}/{turn}"
        store = dist.PrefixStore(key, self._store)
        try:
            made = self._new_group(store, members.index(self.rank), len(members), turn)
        except RuntimeError as error:  # e.g. another rank has refused, or died
            raise self.describe(error, f"connecting to {len(members)} ranks") from error
        _connected.add(made)
        return made

    def _new_group(self, store: dist.Store, rank: int, size: int, turn: int) -> Any:
        """Returns a new process group. Over Gloo, all groups of a turn share the thread that receives from the
        network."""
        if self.backend != "gloo":
            nccl: Any = dist.ProcessGroupNCCL
            return nccl(store, rank, size, self.timeout)
        gloo: Any = dist.ProcessGroupGloo
        if turn not in self._devices:
            self._devices[turn] = gloo_devices()
        # Before torch 2.8, collectives keep the timeout with which their group was connected.
        connecting = self.timeout / (GLOO_PATIENCE if torch.__version__ >= "2.8" else 1)
        made = gloo(store, rank, size, gloo_options(self._devices[turn], connecting))
        made._set_default_timeout(self.timeout)
        return made

    def _share(self, stage: int, scope: Scope, turn: int) -> None:
        """Let the ranks of a group share memory, if all of them are on one machine. A collective of the group."""
        members = scope.members(self.rank, self.size)
        if self.backend != "gloo" or self.device.type != "cpu" or len(members) < 2 or scope in self._apart:
            return
        group = self._groups[stage, scope, turn]

        def gather(own: bytes) -> list[bytes]:
            everyone = torch.empty(len(members), len(own), dtype=torch.uint8, device="cpu")
            group._allgather_base(everyone.view(-1), torch.frombuffer(bytearray(own), dtype=torch.uint8)).wait()
            return [row.numpy().tobytes() for row in everyone]

        timeout_s = self.timeout.total_seconds()
        try:
            place = members.index(self.rank)
            found = neighbours.connect(gather, place, self.numbers[self.rank], timeout_s)
        except RuntimeError as error:  # e.g. another rank has died
            raise self.describe(error, f"connecting to {len(members)} ranks") from error
        if found is None:
            self._apart.add(scope)  # all its ranks do the same, so that none tries again for the next stage
        else:
            numbers = [self.numbers[member] for member in members]
            self._shared[stage, scope, turn] = SharedGroup(found, numbers, timeout_s)

    def start(self, exchange: Exchange, stage: int, turn: int = 0) -> Any:
        """Start a collective of a stage, on one of the stage's connections.

        Returns:
            torch's `Work`. Over NCCL, its `wait` returns at once, and the current stream waits.

        Raises:
            RuntimeError: if the communicator was closed, or if this process was forked from the one that created it.
        """
        if not self._groups:
            raise RuntimeError("the communicator was closed, or belongs to the process that this one was forked from")
        if self._staging is not None:  # also collectives on host tensors, because all share one order
            return self._staging.start(exchange, stage, turn)
        return self._start(exchange, stage, turn)

    def _start(self, exchange: Exchange, stage: int, turn: int) -> Any:
        kind, output, source, splits, scope = exchange
        shared = self._shared.get((stage, scope, turn))
        if shared is not None and shared.takes(exchange):
            return shared.start(exchange)
        group = self._groups[stage, scope, turn]
        if self._has_several:
            self._wait_for_other_groups(group)
        if kind == "all_to_all":
            work = group.alltoall_base(output, source, *(splits or ([], [])))
        elif kind == "all_gather":
            flat = output if output.dim() == 1 else output.view(-1)  # a view takes the host almost a microsecond
            work = group._allgather_base(flat, source)
        else:
            work = group.allreduce([output], dist.ReduceOp.MAX if kind == "max" else dist.ReduceOp.SUM)
        # A forked child must not run the destructor of a work either, see `_abandon_after_fork`.
        _connected.add(work)
        if self.backend == "nccl":
            self._latest = (group, work)
        return work

    def _wait_for_other_groups(self, group: Any) -> None:
        """Make the current stream wait for the latest collective if another of our groups ran it. NCCL orders only the
        collectives of one group."""
        latest, work = self._latest
        if work is not None and latest is not group:
            work.wait()

    def describe(self, error: BaseException, what: str) -> Exception:
        """Returns a CollectiveError that says where an error happened and what to do. A ConfigError is returned
        unchanged."""
        if isinstance(error, ConfigError):
            return error
        self._has_failed = True
        return CollectiveError(
            f"gqsgd: {what} failed on rank {self.rank} of {self.size} (global rank {self.numbers[self.rank]}, "
            f"{self.backend}): {type(error).__name__}: {error}. Look for the first error among all ranks' logs: "
            "a rank that died or fell behind the process group's timeout fails its peers. The result is NaN."
        )

    def close(self) -> None:
        """Destroy the groups. Not a collective.

        Groups over NCCL are aborted, because a shutdown waits for the other ranks of a node, which may be in a
        collective that waits for this rank. Without an error, this rank's own work ends before that, if it ends within
        `CLOSE_S`; otherwise, a warning says that its result is undefined.
        """
        _alive.discard(self)
        if self._staging is not None:
            self._staging.close()
        # The groups are forgotten first, so that `start` refuses from now on.
        groups = self._groups
        self._groups = {}
        self._devices = {}
        work = self._latest[1]
        self._latest = (None, None)
        shared = self._shared
        self._shared = {}
        for in_memory in shared.values():
            in_memory.close()
        if isinstance(self._store, EndingStore):
            self._store.close()
        if self.backend != "nccl":
            return  # Gloo's groups end with their last reference
        if work is not None and not self._has_failed and not _ends_within(work, CLOSE_S):
            logger.warning(
                "gqsgd: the last collective of rank %d had not ended %.0f s after close(), which has ended it: its "
                "result is undefined, and so is what was computed with it. Call torch.cuda.synchronize() before "
                "close(), and before the program ends, if the last step counts",
                self.rank,
                CLOSE_S,
            )
        # Stages share a group, which must be aborted only once.
        for group in dict.fromkeys(groups.values()):
            group.abort()

    def abandon(self) -> None:
        """Forget the groups without ending them, in a process that was forked from the one that created them.

        The groups themselves are kept for the rest of this process, see `_abandon_after_fork`.
        """
        self._groups = {}
        self._shared = {}
        self._latest = (None, None)
        self._staging = None

    def gather(self, tensor: Tensor, purpose: str) -> Tensor:
        """Gather the tensors of all ranks, [ranks, ...]. A collective, outside any job.

        Args:
            tensor: the tensor of this rank, of the same shape, dtype and device on all ranks.
            purpose: why the tensor is gathered, for the error message.

        Raises:
            CollectiveError: if the collective fails, e.g. because other ranks do not arrive within the timeout.
        """
        everyone = torch.empty(self.size, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if self.size == 1 or not tensor.numel():
            return everyone.copy_(tensor)
        try:
            self.start(Exchange("all_gather", everyone, tensor.contiguous().view(-1)), stage=0).wait()
        except RuntimeError as error:
            raise self.describe(error, purpose) from error
        return everyone

    def scatter(self, rows: Tensor | None, like: Tensor) -> Tensor:
        """Send each rank its row of a tensor of rank 0, and return this rank's row. A collective, outside any job.

        Args:
            rows: on rank 0, a row for every rank, [ranks, numel]; None elsewhere.
            like: a tensor with the size, dtype and device of a row, which are the same on all ranks.

        Raises:
            CollectiveError: if the collective fails, e.g. because other ranks do not arrive within the timeout.
        """
        source = like.new_empty(0) if rows is None else rows.to(like).contiguous().view(-1)
        if self.size == 1 or not like.numel():
            return source.view_as(like)
        own = torch.empty_like(like)
        # Written as an all-to-all in which only rank 0 sends, because exchanges have no scatter.
        others = [0] * (self.size - 1)
        sent = [0] * self.size if rows is None else [like.numel()] * self.size
        try:
            self.start(Exchange("all_to_all", own, source, ([like.numel(), *others], sent)), stage=0).wait()
        except RuntimeError as error:
            raise self.describe(error, "sending each rank what it remembers (every rank loads the state)") from error
        return own


def _ends_within(work: Any, seconds: float) -> bool:
    """Wait for a collective of the GPU on the host. Returns whether it has ended within this time."""
    ends = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > ends:
            return False
        time.sleep(0.001)
    return True


def parent_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the group itself, or the default group if it is None.

    Raises:
        ConfigError: if torch.distributed is not initialised, or if the group is no process group of this rank, or was
            destroyed.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"group={group!r:.100} is not a process group that this rank is in; give one of "
            "torch.distributed.new_group, or leave it out"
        )
    parent = group if group is not None else dist.group.WORLD
    if not dist.is_initialized() or parent is None:
        raise ConfigError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
    check_alive(parent)
    return parent


def gloo_devices(host: str = "") -> list[Any]:
    """Create Gloo's devices as torch creates them for a process group: one for each network interface named in
    GLOO_SOCKET_IFNAME, or one for the address of this host's name.

    Args:
        host: an address of this host that others reach. It is used if the host's name stands for no such address, as on
            Debian, where it is 127.0.1.1.
    """
    gloo: Any = dist.ProcessGroupGloo
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(names) > 1:  # as torch checks it
        return [gloo.create_device(interface=name) for name in names.split(",")]
    if host and _name_reaches_no_other_host():
        return [gloo.create_device(hostname=host)]
    return [gloo.create_default_device()]


def gloo_options(devices: Sequence[Any], timeout: timedelta) -> Any:
    """Returns Gloo's options for a process group on some devices, with as many threads as torch uses."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = list(devices)
    options._threads = 2 * len(options._devices)
    return options


def _name_reaches_no_other_host() -> bool:
    """Returns whether torch would listen at the loopback: it takes the first address of this host's name at which it
    can listen, or else the loopback."""
    with suppress(OSError, UnicodeError):  # nobody knows the name, or it is no valid one, e.g. one of 64 letters
        for family, kind, _, _, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as listening:
                listening.bind(address)
                return ip_address(address[0]).is_loopback
    return True


def backend_for(group: dist.ProcessGroup | Peers, device: torch.device) -> str:
    """Returns the backend of ``group`` for tensors on ``device``: NCCL for CUDA tensors if the group has it, and
    otherwise Gloo.

    Raises:
        ConfigError: if the group has neither of the two for that device.
    """
    names = backends_of(group)
    if device.type == "cuda" and names.get("cuda") == "nccl":
        return "nccl"
    if device.type in ("cpu", "cuda") and "gloo" in (names.get(device.type), names.get("cpu")):
        return "gloo"
    backends = ",".join(map(":".join, names.items()))
    raise ConfigError(
        f"tensors on {device} over the backend {backends!r} are not supported; use CUDA tensors "
        "over 'nccl' or 'gloo', or CPU tensors over 'gloo', e.g. init_process_group('cpu:gloo,cuda:nccl') for both"
    )


def patience_of(timeout: timedelta | None, group: dist.ProcessGroup | Peers, device: torch.device) -> timedelta:
    """Returns how long ranks wait for each other: the user's timeout, or the timeout of the group.

    If `check_timeout` would refuse the user's timeout, the group's is used, so that the other ranks can be told.

    Raises:
        ConfigError: if the group was destroyed. Every call that waits for other ranks asks here first.
    """
    if not isinstance(group, Peers):
        check_alive(group)
    return timeout if _is_timeout(timeout) else timeout_of(group, device)


def check_timeout(timeout: object) -> None:
    """Raise ConfigError for a timeout that is neither None nor a positive timedelta that clocks can add to now."""
    if timeout is not None and not _is_timeout(timeout):
        raise ConfigError(
            f"timeout={timeout!r} must be a positive datetime.timedelta of at most {LONGEST_TIMEOUT.days} days, e.g. "
            "timedelta(minutes=5)"
        )


def _is_timeout(timeout: object) -> TypeGuard[timedelta]:
    return isinstance(timeout, timedelta) and timedelta(0) < timeout <= LONGEST_TIMEOUT


def needs_staging(backend: str, device: torch.device) -> bool:
    """Returns whether collectives go through copies in host memory."""
    return backend == "gloo" and device.type == "cuda"


def timeout_of(group: dist.ProcessGroup | Peers, device: torch.device) -> timedelta:
    """Returns the timeout of a group's collectives on tensors of a device, `LONGEST_TIMEOUT` at most. If the group has
    no backend for the device, it is the timeout of another backend, so that ranks can meet and be told."""
    if isinstance(group, Peers):
        return min(group.timeout or dist.constants.default_pg_timeout, LONGEST_TIMEOUT)
    names = backends_of(group)
    usable = device if device.type in names else torch.device(next(iter(names)))
    options = getattr(group._get_backend(usable), "options", None)
    return min(getattr(options, "_timeout", dist.constants.default_pg_timeout), LONGEST_TIMEOUT)


#: The communicators of this process. A forked child must not use them.
_alive: weakref.WeakSet[Communicator] = weakref.WeakSet()
#: Objects whose destructors end connections: process groups and works of this process, also of closed communicators,
#: because something else may still refer to them, for example a traceback.
_connected: weakref.WeakSet[Any] = weakref.WeakSet()


def _abandon_after_fork() -> None:
    """Keep references to all groups and works for ever, and forget the communicators.

    The groups' threads run in the parent process. Destructors would wait for these threads, and would shut down
    connections that the parent process still uses.
    """
    for connected in list(_connected):
        pythonapi.Py_IncRef(py_object(connected))
    for communicator in list(_alive):
        communicator.abandon()
    _alive.clear()


os.register_at_fork(after_in_child=_abandon_after_fork)
