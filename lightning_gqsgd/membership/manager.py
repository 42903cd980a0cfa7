"""Members that use torchft: they meet at a lighthouse, and may die, leave and join while a training runs.

torchft's Manager asks the lighthouse which members take part, and connects them. If a member has made fewer merges, the
Manager gives it the state of a member that has made the most. If a member dies, the merge fails on the members that
were still sending. The lighthouse then leaves the dead member out.

A member that joins need not wait for the others' next merge: it fetches the current state of one of them. It does so
before the others know of it, and so before they wait for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo
from torchft._torchft import ManagerClient

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError, counted
from lightning_gqsgd.membership.door import (
    HEARTBEAT_MS,
    check_others,
    check_resolves,
    in_brackets,
    latest_merge_of,
    lighthouse_address,
    merges_at,
    name_for,
    own_host,
    shortage_at,
)
from lightning_gqsgd.membership.members import (
    Commit,
    Meet,
    Members,
    MergeFailed,
    Quorum,
    Rejoin,
    Request,
    RowsOfAll,
    SumOfAll,
)
from lightning_gqsgd.membership.process_group import QuantisedProcessGroup
from lightning_gqsgd.membership.quorums import DistinctQuorums
from lightning_gqsgd.membership.transport import PlainTransport, check_time, sendable
from lightning_gqsgd.wire.communicator import check_timeout, gloo_devices, gloo_options

logger = logging.getLogger(__name__)

#: Default timeout of connections, collectives and transfers of the state.
_TIMEOUT = timedelta(seconds=60)

#: The longest time that a joining member waits for one answer of another member. After that, it meets all of them
#: instead.
_GLANCE = timedelta(seconds=5)

#: Members that a joining member asks for their state at most, until one answers.
_ASKED = 3

#: Time between two calls to a lighthouse that does not answer.
_CALL_AGAIN = timedelta(seconds=2)

#: Time after which a member that waits for the lighthouse's answer checks whether the lighthouse is there.
_LOOK_AFTER = timedelta(seconds=15)

#: The largest number of members for which kernels of a CPU are compiled in advance. More members need the same kernels.
_COMPILED_RANKS = 8


class TorchftMembers(Members):
    """The members that a lighthouse knows.

    Args:
        config: the compression, as requested.
        facts: the facts that members must have in common, plain values by name.
        state: function that returns the state that a joining member needs.
        device: device of the model.
        min_replicas: the smallest number of members for a merge.
        timeout: timeout of connections, collectives and transfers of the state; None means 60 s.
        patience: how long to wait until all others have ended their rounds.

    Attributes:
        timeout: see above.

    Raises:
        ConfigError: if the timeout is invalid, if there is no lighthouse, if its members do not fit, or if the transfer
            of their state takes too long.
    """

    waits_for_all = False

    def __init__(
        self,
        config: GQSGDConfig,
        facts: Mapping[str, Any],
        state: Callable[[], Mapping[str, Any]],
        *,
        device: torch.device,
        min_replicas: int,
        timeout: timedelta | None = None,
        patience: timedelta,
    ) -> None:
        check_timeout(timeout)
        self.timeout = timeout or _TIMEOUT
        self._state = lambda: sendable(state())
        self._device = device
        self._min_replicas = min_replicas
        self._patience = patience
        self.patience_s = patience.total_seconds()
        self._lighthouse = lighthouse_address(os.environ)
        check_resolves(self._lighthouse)
        self._name = name_for({"device": device.type, **facts})  # as the process group compares them
        # The others' names are compared before they notice this member. Members that start at the same time do not see
        # each other's names yet, so the process group compares the facts again.
        managers = check_others(self._lighthouse, self._name, self.timeout.total_seconds())
        self._host = own_host(self._lighthouse, self.timeout.total_seconds(), managers)
        self._present = self._fetched_present(managers)
        # Of a training at this lighthouse whose state this member has not: who made its latest merge, and its merges.
        self._merged_before: tuple[set[str], int] = set(), 0
        if self._present is None:
            with suppress(ConfigError):  # the first merge says that no lighthouse answers
                self._merged_before = latest_merge_of(self._lighthouse, self._name, self.timeout.total_seconds())
        self._received: Mapping[str, Any] | None = None
        self._group = QuantisedProcessGroup(_Gloo(self._host, self.timeout), config, device, facts)
        self.telemetry = self._group.telemetry
        self._merges = 0  # made by the others before this member meets them
        self._has_met = False
        self._met_at = _seconds_of_machine()
        self._connecting = threading.Lock()
        self._is_closed = False
        self._manager: Manager | None = None

    def _fetched_present(self, managers: Sequence[str]) -> Mapping[str, Any] | None:
        """Returns the current state of a member, from which this one may start; see `_fetch_present`.

        Raises:
            ConfigError: if the transfer was too slow, and the state is outdated by now. A merge would send it again,
                and all others would wait in vain.
        """
        began = time.monotonic()
        state = _fetch_present(managers, min(self.timeout, _GLANCE))
        seconds = time.monotonic() - began
        if state is not None and seconds > self.timeout.total_seconds():
            known = state.get("merges")
            if not isinstance(known, int) or merges_at(self._lighthouse, self.timeout.total_seconds()) > known:
                check_time(seconds, self.timeout)
        return state

    def _connected(self) -> Manager:
        """Returns torchft's Manager, which is created for the first merge. If this member has a state, it trains
        meanwhile.

        Raises:
            ConfigError: if the compiled kernels are wrong.
            MergeFailed: if this was closed.
        """
        with self._connecting:
            if self._manager is None:
                # Compile before the others know of this member, because they wait for it from then on. Each kernel of a
                # GPU is for one number of members, and takes long to compile.
                self._group.compile_for(2 if self._device.type == "cuda" else _COMPILED_RANKS)
                self._manager = self._made()
            if self._is_closed:  # meanwhile
                self.close()
                raise MergeFailed("this member has left")
            return self._manager

    def _made(self) -> Manager:
        """Create a Manager. From then on, others wait for this member."""
        self._store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=self.timeout)
        transport = PlainTransport(self.timeout, self._host, self._state)
        try:
            manager = Manager(
                pg=self._group,
                load_state_dict=self._receive,
                state_dict=self._state,
                min_replica_size=self._min_replicas,
                use_async_quorum=False,
                timeout=self.timeout,
                quorum_timeout=self._patience,
                connect_timeout=self.timeout,
                rank=0,
                world_size=1,
                store_addr=self._host,
                store_port=self._store.port,
                lighthouse_addr=self._lighthouse,
                replica_id=self._name,
                hostname=in_brackets(self._host),  # it becomes part of an address
                heartbeat_interval=timedelta(milliseconds=HEARTBEAT_MS),
                # Without retries, torchft's Manager waits for the whole patience after a failed call, although the
                # lighthouse may have been restarted.
                quorum_retries=max(1, round(self._patience / _CALL_AGAIN)),
                checkpoint_transport=transport,
            )
        except BaseException:
            transport.shutdown()  # otherwise each further attempt would leave a server
            raise
        manager._client = self._quorums = DistinctQuorums(manager._client)
        manager._executor = _DaemonExecutor()
        manager.load_state_dict({"step": self._merges, "batches_committed": 0})
        return manager

    @property
    def config(self) -> GQSGDConfig:
        """The compression, with the chosen reducer for the current number of members."""
        return self._group.resolved

    @torch.no_grad()
    def answer(self, request: Request) -> Any:
        """Answer one request; see `Members`.

        Raises:
            MergeFailed: if a member has left, if it does not answer, or if there are too few members.
            ConfigError: if the members do not fit together, and this one is new.
        """
        try:
            if isinstance(request, Meet):
                return self._meet()
            if isinstance(request, RowsOfAll):
                return self._group.rows_of_all(request.row)
            if isinstance(request, SumOfAll):
                return self._group.sum(request.x, request.segments, request.number)
            if isinstance(request, Rejoin):
                return self.start_after(0)
            assert isinstance(request, Commit)
            if request.problem:
                raise MergeFailed(request.problem)
            manager = self._connected()
            is_merged = bool(manager.should_commit())
        except (MergeFailed, ConfigError) as error:
            self._fail(error)
            raise
        except Exception as error:
            self._fail(error)
            raise MergeFailed(f"{type(error).__name__}: {error}") from error
        there = manager.num_participants()
        if not is_merged and there < self._min_replicas:
            # The connections are good, so they stay.
            raise MergeFailed(f"{counted(there, 'member')} came, and a merge needs min_replicas={self._min_replicas}")
        return is_merged

    def present_state(self) -> Mapping[str, Any] | None:
        """Returns the state that a member had when this one joined; None if no member had merged or answered in
        time."""
        state = self._present
        self._present = None
        return state

    def say_if_begun_anew(self, merges: int) -> None:
        """Warn if the lighthouse knows a longer training of the same model, of which no member was left."""
        members, merges_before = self._merged_before
        if merges <= merges_before and not members & self._quorums.members:
            logger.warning(
                "gqsgd: the lighthouse %s knows a training with this model and these options, which has made %s, and "
                "none of its members is left: %s, unless this process loads a checkpoint of it",
                self._lighthouse,
                counted(merges_before, "merge"),
                "a new training begins" if merges == 1 else f"this process goes on by itself after merge {merges - 1}",
            )
        self._merged_before = set(), 0

    def start_after(self, merges: int) -> None:
        """Continue after ``merges`` merges, the count of another member or of a checkpoint."""
        self._merges = merges
        if self._manager is not None:
            self._manager.load_state_dict({"step": merges, "batches_committed": 0})

    def have_all_finished(self, merges: int) -> bool:
        """Tell the other members that this one has finished; see `Members`."""
        return self._group.have_all_said(f"finished after merge {merges}")

    def close(self) -> None:
        """Leave. If a merge is under way, it fails, also on the other members."""
        self._is_closed = True
        with suppress(Exception):  # torchft's parts may have ended already
            self._group.shutdown()
        with suppress(Exception):
            if self._manager is not None:
                self._manager.shutdown(wait=False)

    def _meet(self) -> Quorum:
        self._received = None
        manager = self._connected()
        if _seconds_of_machine() - self._met_at > _LOOK_AFTER.total_seconds():
            # This process may have been suspended, and the others may have finished since.
            with suppress(ConfigError):
                self._merged_before = latest_merge_of(self._lighthouse, self._name, _GLANCE.total_seconds())
        look = threading.Timer(_LOOK_AFTER.total_seconds(), _say_why_it_waits, [self._lighthouse])
        look.daemon = True
        look.start()
        try:
            manager.start_quorum()
        except TimeoutError as late:
            reason: str | None = None
            with suppress(ConfigError):
                reason = shortage_at(self._lighthouse, _GLANCE.total_seconds())
            raise MergeFailed(reason or f"TimeoutError: {late}") from late
        finally:
            look.cancel()
        problem = manager.errored()
        if problem is not None:
            error = problem.original_exception
            # The existing members continue without the one that does not fit.
            if isinstance(error, ConfigError) and not self._has_met:
                raise error
            raise MergeFailed(f"{type(error).__name__}: {error}") from error
        own = manager.participating_rank()
        if own is None:
            raise MergeFailed("this member does not take part")
        self._has_met = True
        self._met_at = _seconds_of_machine()
        return Quorum(own, self._received)

    def _receive(self, state: Mapping[str, Any]) -> None:
        self._received = state

    def _fail(self, error: Exception) -> None:
        """Close the connections, and tell the lighthouse that this member needs new ones.

        Another member may wait for a message of this member, and not of the one that has died. It then notices the
        failure now, and not after the timeout.
        """
        if self._manager is None or self._is_closed:  # `close` has ended what would answer
            return
        self._manager.report_error(error)
        self._group.abort()
        with suppress(Exception):  # its error would repeat the one that is being raised
            self._manager.should_commit()


class _Gloo(ProcessGroupGloo):
    """torchft's process group, which listens where other members reach this machine.

    Args:
        host: an address of this machine, see `gloo_devices`.
        timeout: timeout of connections and collectives.
    """

    def __init__(self, host: str, timeout: timedelta) -> None:
        super().__init__(timeout=timeout)
        self._host = host

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        gloo: Any = dist.ProcessGroupGloo
        backend = gloo(store, rank, world_size, gloo_options(gloo_devices(self._host), self._timeout))
        group: Any = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            group._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, backend)
        return group


class _DaemonExecutor(Executor):
    """Runs each call in a daemon thread, which does not keep the process alive.

    Python waits for torchft's own executor at exit. Its call for a quorum may last until the patience ends, even after
    this member has left.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name="gqsgd-quorum", daemon=True).start()
        return future


def _seconds_of_machine() -> float:
    """Returns the seconds since the machine's start. They go on while it is suspended, where `time.monotonic` stands
    still, and nobody can set them, unlike `time.time`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _say_why_it_waits(lighthouse: str) -> None:
    """Log that a lighthouse does not answer, or waits for more members than there are."""
    try:
        shortage = shortage_at(lighthouse, _GLANCE.total_seconds())
    except ConfigError as error:
        logger.warning("gqsgd: %s; merges wait for it", error)
        return
    if shortage is not None:
        logger.warning("gqsgd: %s; merges wait for them", shortage)


def _fetch_present(managers: Sequence[str], timeout: timedelta) -> Mapping[str, Any] | None:
    """Returns the current state of a member; None if no member has merged, or if none answers.

    Args:
        managers: addresses of the members' managers.
        timeout: timeout of each answer.
    """
    for manager in managers[:_ASKED]:
        try:
            client = ManagerClient(manager, connect_timeout=timeout)
            address = client._checkpoint_metadata(0, timeout=timeout)
            return PlainTransport.fetch_present(address, timeout)
        except Exception as error:  # of torchft, the network or an incomplete state
            logger.info("gqsgd: no state from the member at %s (%s)", manager, error)
    return None
