"""torchft: a process group that survives ranks that die, leave and join, with quantised all-reduces.

torchft's Manager calls `configure` (in later versions: `reconfigure`) whenever the ranks have changed, and a new engine
is created for the new ranks. All failures are reported to the Manager, through the work that it waits for and through
`errored`. The Manager then discards the step, and asks for a new group of ranks.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchft.process_group import ProcessGroup, ProcessGroupWrapper

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.errors import CollectiveError, ConfigError
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES
from lightning_gqsgd.membership.requirement import torch_is_new_enough
from lightning_gqsgd.presets import make_config
from lightning_gqsgd.session.opening import Side, digest_of_facts, facts_of, open_engines, prepare_later
from lightning_gqsgd.session.parameters import check_for_tensors
from lightning_gqsgd.sparse.options import refuse_for
from lightning_gqsgd.wire.agreement import Card
from lightning_gqsgd.wire.communicator import timeout_of
from lightning_gqsgd.wire.compiling import compile_kernels
from lightning_gqsgd.wire.engine import Engine, Request, Words, untraced
from lightning_gqsgd.wire.meeting import Meeting
from lightning_gqsgd.wire.peers import Peers, peers_of_unregistered
from lightning_gqsgd.wire.pipeline import Job
from lightning_gqsgd.wire.processors import Place, own_place
from lightning_gqsgd.wire.store import EndingStore, Store
from lightning_gqsgd.wire.telemetry import Telemetry

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lightning_gqsgd.spec.fields import FieldArguments

_WORDS = Words("torchft's process group", "let the Manager configure it for the next quorum")

#: Seconds that `shutdown` waits at most until old connections have ended.
_CLOSE_S = 10.0

#: Bytes in which a rank's place is sent. They are enough for the numbers of 1,700 processors.
_PLACE_BYTES = 512

#: Seconds that `QuantisedProcessGroup.have_all_said` waits for an answer of the store.
_ANSWER_S = 2.0


def quantised(
    process_group: ProcessGroup,
    *,
    device: torch.device | str = "cpu",
    preset: str | GQSGDConfig | None = None,
    **fields: Unpack[FieldArguments],
) -> QuantisedProcessGroup:
    """Returns a process group for torchft's Manager whose all-reduces of floating-point tensors are quantised.

    Sums and means of fp32, fp16, bf16 and fp64 tensors are quantised. Tensors of fewer than ``min_numel`` elements
    (1024 by default) are sent uncompressed. All other calls are passed to ``process_group`` unchanged::

        manager = torchft.Manager(pg=quantised(torchft.ProcessGroupGloo(), bits=4), ...)

    Then torchft's ``DistributedDataParallel``, ``LocalSGD`` and ``DiLoCo`` send 4 bits.

    Args:
        process_group: a ``torchft.ProcessGroupGloo``. Its timeout also holds for quantised all-reduces.
        device: device of the tensors that are reduced. Tensors on a GPU go through host memory.
        preset: name of a preset (see `presets.PRESETS`), or a configuration.
        **fields: fields of `GQSGDConfig`, e.g. ``bits=4``.

    Raises:
        ConfigError: if the process group is of another kind, or if the configuration cannot work for tensors without a
            name.
    """
    return QuantisedProcessGroup(process_group, make_config(preset, **fields), torch.device(device))


class QuantisedProcessGroup(ProcessGroupWrapper):
    """The process group that `quantised` returns.

    Args:
        process_group: the process group for all other calls. It is configured before the engine is created.
        config: the compression.
        device: device of the tensors.
        facts: further facts that ranks must have in common, plain values by name.

    Attributes:
        config: the compression, as requested.
        resolved: the compression, with the chosen reducer for the current number of ranks.
        telemetry: counters of this process.

    Raises:
        ConfigError: for the reasons of `quantised`.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        config: GQSGDConfig,
        device: torch.device,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        check_process_group(process_group)
        check_config(config)
        _end_requests_of(process_group)
        super().__init__(pg=process_group)
        self.config = config
        self.resolved = config
        self.telemetry = Telemetry()
        self._device = device
        self._facts = {"device": device.type, **(facts or {})}
        self._engines: list[Engine] = []  # the engine of the current ranks, if there is one
        self._closing: list[threading.Thread] = []  # threads that close the engines of earlier ranks
        self._peers: Peers  # the current ranks, once there are some
        self._notes: Store | None = None  # what they say to each other, as long as their store answers
        self._prepared: set[torch.dtype] = set()  # dtypes that kernels are compiled for
        self._compiled: set[tuple[GQSGDConfig, int]] = set()  # for fp32, see `_kernels_of`
        self._calls = 0
        self._error: Exception | None = None
        # This also runs at exit, because Gloo groups that are still open then can abort the process.
        weakref.finalize(self, _close_all, self._engines, self._closing)

    @torch.no_grad()
    def sum(self, flat: Tensor, segments: Sequence[Segment], number: int) -> Tensor:
        """Replace a flat tensor by its sum over the ranks, and wait for the result.

        Unlike `allreduce`, this does not check that all ranks reduce the same tensor; the caller has to ensure it.

        Args:
            flat: the tensor, [numel].
            segments: the parameters in it, in order.
            number: a number that no other sum of the training has. It is the same on all ranks.

        Raises:
            ConfigError: if the ranks do not agree on kernels for a new dtype.
            CollectiveError: if a collective failed. The tensor is then all NaN.
            RuntimeError: if there are no ranks, because of an earlier error.
        """
        try:
            engine = self._engine_for(flat, _card(flat, number))
            job = engine.reduce(flat, Request(f"sum number {number}", (self.resolved,), tuple(segments), number))
            engine.plans.trim()
            return job.wait().mul_(engine.world_size)
        except Exception as error:
            self._note(error)
            raise

    def configure(self, *arguments: Any, **named: Any) -> None:
        """Switch to a new group of ranks. The Manager calls this; it is a collective of the new ranks.

        Args:
            *arguments: see ``torchft.process_group.ProcessGroup.configure``.
            **named: the same.

        Raises:
            ConfigError: on all ranks, if they have different configurations, versions or other facts.
            CollectiveError: if a rank did not arrive in time, or gave no sign of life.
        """
        self._close_beside()
        super().configure(*arguments, **named)
        self._open_or_abort()

    def reconfigure(self, options: Any) -> Any:
        """Switch to a new group of ranks, in later versions of torchft; see `configure`.

        Args:
            options: see ``torchft.process_group.ProcessGroup.reconfigure``.
        """
        self._close_beside()
        work = super().reconfigure(options)
        work.wait()
        self._open_or_abort()
        return work

    def errored(self) -> Exception | None:
        """Returns the error after which the group has to be configured again; None if there was none."""
        return self._error or self._pg.errored()

    def abort(self, errored: bool = True) -> None:
        """Let all calls under way fail.

        Args:
            errored: whether the cause is an error, which torchft logs.
        """
        self._error = self._error or RuntimeError("gqsgd: the process group was aborted")
        self._close_beside()
        self._pg.abort(errored)

    def shutdown(self) -> None:
        """Close the connections, and wait until they have ended."""
        _close_all(self._engines, self._closing)
        self._pg.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of collectives. It takes effect with the next group of ranks."""
        self._pg.set_timeout(timeout)

    @untraced
    @torch.no_grad()
    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist._Work:
        """Start to replace each tensor by its sum, or mean, over the ranks.

        Args:
            tensors: the tensors.
            opts: the operation, or torch's options with it.

        Returns:
            The work, whose future has the tensors. After an error, the tensors are all NaN; if the ranks do not agree
            on what they reduce, the tensors are unchanged.

        Raises:
            ConfigError: if a tensor is on another device.
            RuntimeError: if there are no ranks, because of an earlier error.
        """
        return self._quantised(tensors, opts) or super().allreduce(tensors, opts)

    @untraced
    @torch.no_grad()
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist._Work:
        """Start to replace tensors by their sums, or means, over the ranks; see `allreduce`."""
        return self._quantised(tensors, opts) or super().allreduce_coalesced(tensors, opts)

    def _quantised(self, tensors: list[Tensor], opts: Any) -> _Work | None:
        """Start to replace tensors. Returns None for operations and tensors that are not quantised."""
        operation = getattr(opts, "reduceOp", opts)
        is_sum = operation == dist.ReduceOp.SUM
        are_reducible = all(one.dtype in COMPUTE_DTYPES and one.layout is torch.strided for one in tensors)
        if not (is_sum or operation == dist.ReduceOp.AVG) or not are_reducible:
            return None
        return _Work([self._reduce(tensor, is_sum) for tensor in tensors], self._note)

    def compile_for(self, most_ranks: int) -> None:
        """Compile the kernels for all numbers of ranks up to ``most_ranks`` for which the compression works, before
        other ranks wait for this process."""
        for ranks in range(2, most_ranks + 1):
            try:
                config = resolve(self.config, ranks)
            except ConfigError:  # it is raised by `configure`, if so many ranks ever come
                return
            kernels = self._kernels_of(config, ranks)
            if kernels not in self._compiled:
                compile_kernels(config, torch.float32, self._device, ranks)
                self._compiled.add(kernels)

    def _close_beside(self) -> None:
        """Close the engines of the current ranks in another thread, while this rank connects to new ranks.

        Gloo's connections take many milliseconds to end, and this rank need not wait for that.
        """
        self._closing[:] = [thread for thread in self._closing if thread.is_alive()]
        if self._engines:
            old = self._engines[:]
            self._engines.clear()  # at once, so that no more jobs are started on them
            thread = threading.Thread(target=_close, args=(old,), name="gqsgd-closing", daemon=True)
            self._closing.append(thread)
            thread.start()

    def _open_or_abort(self) -> None:
        """Create an engine for the current ranks. If that fails, close the connections, so that no rank waits for this
        one."""
        try:
            self._open()
        except BaseException:
            self._pg.abort()
            raise

    def _open(self) -> None:
        """Create an engine for the current ranks. A collective.

        Ranks join and leave while others train, so this takes few round trips: ranks compare numbers on their existing
        connections. They hold a meeting only if the numbers differ, because the meeting puts the difference into words,
        or if kernels have to be compiled.
        """
        self._error = None
        self._peers = peers = _peers_of(self._pg, self._device)
        self._notes = Store(peers.store, _ANSWER_S).under("notes")
        timeout = timeout_of(peers, self._device)
        side: Side | None = None
        with suppress(ConfigError):  # it is raised again in the meeting, which tells all ranks
            side = self._side()
        seen = self._greet(side)
        if side is not None and seen.are_ready:
            places = self._places_of_all()
            engine = Engine(self._device, side.group, seen.key, timeout=timeout, words=_WORDS, places=places)
            try:
                engine.connect(*side.configs)
            except BaseException:
                engine.close()
                raise
        else:
            with Meeting("torchft's quorum", [peers], timeout) as meeting:
                side = self._side()
                with open_engines(
                    meeting, [side], self._device, timeout=timeout, words=_WORDS, dtypes=[torch.float32]
                ) as engines:
                    (engine,) = engines
            self._compiled.add(self._kernels_of(side.configs[0], peers.size()))
        self._calls = seen.calls
        engine.telemetry = self.telemetry  # the counters of earlier ranks are continued
        self.resolved = side.configs[0]
        self._prepared = {torch.float32}
        self._engines[:] = [engine]

    def _side(self) -> Side:
        """Returns the current ranks and the compression for them. Raises ConfigError if no compression works for
        them."""
        config = resolve(self.config, self._peers.size())
        return Side(self._peers, facts_of(config, self._facts), [config])

    def _greet(self, side: Side | None) -> _Greeting:
        """Exchange the state of all ranks: their facts, numbers of calls and compiled kernels. A collective.

        Args:
            side: the side of this rank; None if its compression cannot work for these ranks.
        """
        digest = 0 if side is None else digest_of_facts(side.facts)
        is_ready = side is not None and self._kernels_of(side.configs[0], self._peers.size()) in self._compiled
        rows = self.rows_of_all(torch.tensor([digest, self._calls, int(is_ready), secrets.randbits(62)]))
        digests, calls, ready, tokens = rows.T.tolist()
        # The largest number of calls is used, so that no dither is used twice.
        return _Greeting(len(set(digests)) == 1 and all(ready), max(calls), f"{tokens[0]:x}")

    def _places_of_all(self) -> list[Place]:
        """Returns the places of the ranks whose places fit into a row. A collective of equal versions."""
        place = json.dumps(own_place()).encode().ljust(_PLACE_BYTES)
        row = bytearray(place if len(place) == _PLACE_BYTES else b" " * _PLACE_BYTES)
        rows = self.rows_of_all(torch.frombuffer(row, dtype=torch.int64)).numpy()
        texts = [text for text in (each.tobytes().strip() for each in rows) if text]
        return [Place(*json.loads(text)) for text in texts]

    def rows_of_all(self, row: Tensor) -> Tensor:
        """Returns the rows of all ranks. A collective: it sums matrices in which only a rank's own row is not zero.

        Args:
            row: the row of this rank, int64, [numel].

        Returns:
            The rows in rank order, [ranks, numel].
        """
        rows = torch.zeros(self._peers.size(), row.numel(), dtype=torch.int64)
        rows[self._peers.own] = row
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        super().allreduce([rows], options).wait()
        return rows

    def have_all_said(self, words: str) -> bool:
        """Say something to the current ranks, and return whether all of them have said it. Not a collective. It is
        False if there are none, or if the rank that keeps their store has gone."""
        if self._notes is None:
            return False
        try:
            self._notes.set(f"{words}/{self._peers.own}", "said")
            return all(self._notes.get_all([f"{words}/{rank}" for rank in range(self._peers.size())]))
        except (dist.DistStoreError, dist.DistNetworkError):
            self._notes = None  # torch prints a stack of C++ at each attempt
            return False

    def _kernels_of(self, config: GQSGDConfig, ranks: int) -> tuple[GQSGDConfig, int]:
        """Returns a key for compiled kernels. Kernels of a GPU are for one number of ranks."""
        return config, ranks if self._device.type == "cuda" else 0

    def _reduce(self, tensor: Tensor, is_sum: bool) -> _Result:
        """Start to replace one tensor, which has no name."""
        # Kernels read memory directly, so a lazy negation has to be resolved.
        flat = tensor.detach().resolve_neg().contiguous().view(-1)
        segment = Segment(0, flat.numel(), raw=flat.numel() < self.resolved.min_numel)
        number = self._calls
        card = _card(tensor, number)
        engine = self._engine_for(tensor, card)
        self._calls += 1
        request = Request(f"all-reduce number {number}", (self.resolved,), (segment,), number, agreement=card)
        job = engine.reduce(flat, request)
        engine.plans.trim()
        return _Result(job, tensor, flat, engine.world_size if is_sum else 1)

    def _engine_for(self, tensor: Tensor, card: Card) -> Engine:
        """Returns the engine of the current ranks. For a new dtype, it compiles kernels, after all ranks have compared
        their cards; this is a collective.

        Raises:
            RuntimeError: if there is none, because of an earlier error.
            ConfigError: if the tensor is on another device than the engine's tensors, or if the ranks do not agree.
        """
        if not self._engines:
            raise self._error or RuntimeError("gqsgd: there are no ranks; configure the process group first")
        if tensor.device.type != self._device.type:
            raise ConfigError(
                f"a tensor on {tensor.device} came to a process group for tensors on {self._device}; give "
                f"quantised(..., device={tensor.device.type!r})"
            )
        (engine,) = self._engines
        if tensor.dtype not in self._prepared:
            try:
                prepare_later(engine, self._peers, card, self.resolved, tensor.dtype)
            except Exception as error:
                self._note(error)
                raise
            self._prepared.add(tensor.dtype)
        return engine

    def _note(self, error: Exception) -> None:
        """Remember the first error, for `errored`."""
        self._error = self._error or error


class _Greeting(NamedTuple):
    """The result of `_greet`.

    Attributes:
        are_ready: whether all ranks have the same facts, and have compiled the kernels.
        calls: the largest number of calls that a rank has made.
        key: key for their connections.
    """

    are_ready: bool
    calls: int
    key: str


class _Result(NamedTuple):
    """The result of one all-reduce under way.

    Attributes:
        job: the mean of a flat tensor.
        tensor: the tensor that receives the result.
        flat: the flat tensor, which may share its memory.
        scale: the number by which the mean is multiplied.
    """

    job: Job
    tensor: Tensor
    flat: Tensor
    scale: int

    @torch.no_grad()
    def take(self) -> Tensor:
        """Wait for the result, copy it to the tensor, and return the tensor. On a GPU, the current stream waits.

        Raises:
            ConfigError: if the ranks do not agree.
            CollectiveError: if a collective failed. The tensor is then all NaN.
        """
        try:
            self.job.wait()
            self.flat.mul_(self.scale)
        finally:
            if self.flat.data_ptr() != self.tensor.data_ptr():
                self.tensor.detach().copy_(self.flat.view(self.tensor.shape))
        return self.tensor


class _Work(dist._Work):
    """All-reduces under way.

    Args:
        results: the results of the tensors.
        note: function that is called with an error.
    """

    def __init__(self, results: Sequence[_Result], note: Callable[[Exception], None]) -> None:
        super().__init__()
        self._results = results
        self._note = note
        self._error: Exception | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._left = 1 + len(results)  # 1 for the end of this method
        # A future lets streams wait only for devices that it knows, and that of `collect_all` knows none.
        devices: list[Any] = list({result.tensor.device for result in results if result.tensor.device.type == "cuda"})
        self._taken: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices or None)
        self._together: Any = self._taken.then(self._result)
        self._together.add_done_callback(lambda _: self._over.set())
        for result in results:
            result.job.future.add_done_callback(self._arrived)
        self._arrived(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the tensors. On a GPU, the current stream waits.

        Args:
            timeout: how long to wait; None or zero means the process group's timeout.

        Raises:
            ConfigError: if the ranks do not agree.
            CollectiveError: if a collective failed, or has not ended within the timeout.
        """
        if timeout and not self._over.wait(timeout.total_seconds()):
            raise CollectiveError(
                f"gqsgd: an all-reduce was not over within {timeout.total_seconds():g} s; look for the first error "
                "among all members' logs, or give a longer timeout"
            )
        try:
            # Wait for the last future, because torchft relies on it being complete then.
            self._together.wait()
        except Exception:
            if self._error is None:
                raise
            raise self._error from None
        return True

    def get_future(self) -> Any:
        """Returns the future of the tensors."""
        return self._together

    def block_current_stream(self) -> None:
        """Wait for the tensors, as `wait` does: a GPU may still write them once their future is complete."""
        self.wait()

    def _arrived(self, _: object) -> None:
        """Take all results once the last of them is complete. Called on the threads that complete them."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        try:
            self._taken.set_result(self._take())
        except Exception as error:  # of a GPU that has failed, so that a future cannot hold its tensors
            self._note_first(error)
            if not self._taken.done():
                self._taken.set_result([])

    def _take(self) -> list[Tensor]:
        """Copy all results to their tensors."""
        tensors = []
        for result in self._results:
            try:
                tensors.append(result.take())
            except Exception as error:
                self._note_first(error)
        return tensors

    def _note_first(self, error: Exception) -> None:
        self._error = self._error or error
        self._note(error)

    def _result(self, taken: torch.futures.Future[list[Tensor]]) -> list[Tensor]:
        """Returns the tensors, or raises the first error."""
        if self._error is not None:
            raise self._error
        return taken.value()


def check_process_group(process_group: object) -> None:
    """Raise ConfigError for a process group that `quantised` does not support, or a torch that torchft does not."""
    if not isinstance(process_group, ProcessGroupWrapper):
        raise ConfigError(f"process_group={process_group!r:.100} is none of torchft's; give torchft.ProcessGroupGloo()")
    if process_group.getBackendName() != "torchft-gloo":
        raise ConfigError(
            f"process_group={process_group!r:.100} has the backend {process_group.getBackendName()!r}; quantised "
            "all-reduces go through torchft.ProcessGroupGloo, also for tensors on a GPU (device='cuda')"
        )
    if not torch_is_new_enough():
        raise ConfigError(
            f"torchft connects ranks with an option of Gloo that torch {torch.__version__} does not have; update torch"
        )


def check_config(config: GQSGDConfig) -> None:
    """Raise ConfigError for a configuration that needs the names of parameters, or the nodes of ranks.

    The Manager reduces tensors without names, and ranks join and leave, so no memory can be kept for tensors or ranks.
    """
    refuse_nodes(config)
    refuse_for(config, "torchft, which reduces dense tensors")
    check_for_tensors(resolve(config, 2), "torchft's process group")


def refuse_nodes(config: GQSGDConfig) -> None:
    """Raise ConfigError for a configuration that needs nodes. Call it first: other checks would ask for their size."""
    if config.reducer == "hierarchical":
        raise ConfigError(
            "reducer='hierarchical' needs the same number of ranks on every node, and torchft's ranks come and go; "
            "leave it out"
        )


def _card(tensor: Tensor, number: int) -> Card:
    """Returns the card that ranks compare before they reduce a tensor without a name."""
    facts = {"numel": tensor.numel(), "dtype": str(tensor.dtype), "number of the call": number}
    return Card("torchft's all-reduce", facts)


def _peers_of(process_group: ProcessGroup, device: torch.device) -> Peers:
    """Returns the current ranks of torchft's process group."""
    group: Any = process_group
    while isinstance(group, ProcessGroupWrapper):
        group = group.parent
    # Also for "cpu", because torchft registers Gloo for both.
    return peers_of_unregistered(group, {"cpu": "gloo", device.type: "gloo"})


def _end_requests_of(process_group: ProcessGroup) -> None:
    """Make ranks of torchft's process group connect through a store whose requests end in bounded time.

    One rank's process runs the store. If the connection to that rank is cut while ranks connect, the others would wait
    for its store without a limit.
    """
    group: Any = process_group
    while isinstance(group._pg, ProcessGroupWrapper):
        group = group._pg
    create = group._create_pg
    kept: list[EndingStore] = []  # torch keeps only the C++ part, without the methods

    def create_pg(store: dist.Store, rank: int, size: int) -> Any:
        kept[:] = [EndingStore(store, group._timeout)]
        return create(kept[0], rank, size)

    group._create_pg = create_pg


def _close(engines: list[Engine]) -> None:
    """Close engines and forget them."""
    while engines:
        engines.pop().close()


def _close_all(engines: list[Engine], closing: list[threading.Thread]) -> None:
    """Close engines, and wait for the threads that close others."""
    _close(engines)
    deadline = time.monotonic() + _CLOSE_S
    while closing:
        closing.pop().join(max(0.0, deadline - time.monotonic()))
