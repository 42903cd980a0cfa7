"""The engine, which replaces flat tensors by their mean over the ranks of a process group.

DDP's hook, `all_reduce`, local steps and FSDP's hooks each have an `Engine`. It holds the communicator, the runner of
jobs and the plans. It knows nothing of models; its callers know them, count steps, and talk to users.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from itertools import product
from typing import NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import setting_of
from lightning_gqsgd.errors import MAX_INTEGER, CollectiveError, ConfigError
from lightning_gqsgd.kernels.layout import PieceSize, Segment
from lightning_gqsgd.reducers import Steps, new_store, setting_for
from lightning_gqsgd.reducers.base import Exchange
from lightning_gqsgd.reducers.memory import MemoryStore
from lightning_gqsgd.wire.agreement import STATE_DIFFERS, Agreed, Card, Stamp, StampCheck, compared
from lightning_gqsgd.wire.communicator import Communicator
from lightning_gqsgd.wire.compiling import compile_kernels
from lightning_gqsgd.wire.direct import DirectRunner
from lightning_gqsgd.wire.peers import Peers
from lightning_gqsgd.wire.pipeline import STREAMS, Job, Runner, Start, release, runner_for
from lightning_gqsgd.wire.plan import Plan, PlanCache, PlanKey, check_gradient
from lightning_gqsgd.wire.processors import Place
from lightning_gqsgd.wire.telemetry import BucketCounters, Telemetry, span
from lightning_gqsgd.wire.workers import codec_threads

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Factor by which pieces are larger if ranks share memory. There is no network to keep busy while a piece is encoded,
#: and Python's overhead for each piece takes more processor time than copying its codes.
SHARED_GROWTH = 4


def untraced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator for a function of an engine's caller: torch.compile traces neither the function nor the functions that
    it calls.

    Dynamo traces every function that a compiled train step calls, including the hook that DDP calls from its backward
    pass. It cannot trace threads, process groups and compiled kernels, and fails instead of skipping them.
    """
    # `torch.compiler.disable` would import Dynamo at once, which takes seconds. So it is called only once Dynamo is
    # imported.

    disabled: list[Callable[_P, _T]] = []  # once it was needed; Dynamo would warn of a function that is cached

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not torch.compiler.is_compiling() and "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return call


@dataclass(frozen=True)
class Words:
    """The words that describe an engine's caller in the engine's error messages.

    Attributes:
        owner: the object that is closed together with the engine, in words.
        remedy: what to do once it is closed.
        differ: why ranks may be at different steps, and what to do then, in whole sentences.
    """

    owner: str = "the hook"
    remedy: str = "make a new one"
    differ: str = STATE_DIFFERS


class Request(NamedTuple):
    """A request to reduce one flat tensor.

    Attributes:
        name: for errors.
        configs: the configuration with the chosen reducer; if segments have different ones, the configuration of each
            choice. They differ only in ``bits``, and in fields that follow from ``bits``.
        segments: the parameters in the tensor, in order.
        step: number of the step, and of its dither.
        store: the memory of this rank; None if it has no memory.
        agreement: a card, which ranks compare before anything else is sent, or a stamp, which they compare while
            messages are under way. In steps whose messages differ from those of other steps, a stamp is also compared
            before anything else is sent.
        bucket: index of the counters.
        ends_step: whether the tensor is the last one of its step.
        compressed: False if everything is sent uncompressed.
        varies: whether messages may have other sizes in other steps, so that a stamp is compared before they are sent.
        watch: a function that is called with the mean as soon as the mean is complete, on the thread and the stream
            that complete the job. It must not change the mean. None if there is no such function.
        plan: the class that cuts the tensor into pieces, and says what is done with them.
        is_held: whether the caller waits for the job before it lets go of the tensor; see `Job`.
    """

    name: str
    configs: tuple[GQSGDConfig, ...]
    segments: tuple[Segment, ...]
    step: int
    store: MemoryStore | None = None
    agreement: Card | Stamp | None = None
    bucket: int = 0
    ends_step: bool = False
    compressed: bool = True
    varies: bool = False
    watch: Callable[[Tensor], None] | None = None
    plan: type[Plan] = Plan
    is_held: bool = False

    def alone(self) -> Request:
        """Returns the request for a tensor of one segment, without the configurations of other segments."""
        (segment,) = self.segments
        return self._replace(configs=(self.configs[segment.choice],), segments=(segment._replace(choice=0),))

    @property
    def is_special(self) -> bool:
        """Returns whether a rank at another step might send other messages: if the request says so, in steps that
        sample errors, and in the warm-up."""
        every = self.configs[0].sample_every
        return self.varies or not self.compressed or bool(every) and self.step % every == 0


class Engine:
    """Replaces flat tensors by their mean over the ranks of a process group.

    Creating an engine is a collective: every rank of ``group`` has to create one, with the same key.

    Args:
        device: device of the tensors.
        group: process group, or the ranks themselves.
        key: a name that no other engine has had, the same on all ranks (see `wire.meeting.Meeting.agree`).
        timeout: timeout of collectives; None uses the timeout of ``group``.
        streams: on a GPU over NCCL, number of streams to work on; 1 if another engine shares this engine's runner.
        shares_runner_of: another engine, which was made with one stream. Both engines use the other engine's runner,
            so that their collectives never run at the same time, and both add to the same counters.
        words: the words for the caller in errors.
        direct: whether the calling thread starts native all-reduces over Gloo itself; see `wire.direct`.
        places: the processors of this rank and of others, as far as they are known.

    Attributes:
        communicator: the ranks.
        rank: this process's rank.
        world_size: number of ranks.
        telemetry: counters of this process.
        plans: the cache of plans, which say how tensors are cut into pieces.

    Raises:
        ConfigError: if the backend of the group does not support the device, or if ``GQSGD_THREADS`` is no number of
            threads.
    """

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | Peers,
        key: str,
        *,
        timeout: timedelta | None = None,
        streams: int = STREAMS,
        shares_runner_of: Engine | None = None,
        words: Words | None = None,
        direct: bool = False,
        places: Sequence[Place] = (),
    ) -> None:
        # Processes outside of the group use the processors of their machine as well.
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._threads = codec_threads(max(world_size, group.size()), places) if device.type == "cpu" else 1
        self.communicator = Communicator(device, group, key, timeout)
        self.rank = self.communicator.rank
        self.world_size = self.communicator.size
        self._has_large_pieces = self._wants_large_pieces()
        self.telemetry: Telemetry = Telemetry() if shares_runner_of is None else shares_runner_of.telemetry
        self.plans = PlanCache()
        self._words = words or Words()
        self._process = os.getpid()
        self._stamps = StampCheck(
            self.communicator.numbers, self.communicator.control_device, self._words.differ, says=self.rank == 0
        )
        self._borrowed: Runner | None = None  # the runner that `close` releases
        if shares_runner_of is None:
            self._borrowed = runner_for(self.communicator, streams)
        self._runner: Runner | None = self._borrowed if shares_runner_of is None else shares_runner_of._runner
        # On a GPU, a native all-reduce needs the runner's streams, and over Gloo also copies in host memory.
        is_simple = self.communicator.backend == "gloo" and device.type == "cpu" and self.world_size > 1
        self._is_direct = direct and is_simple
        self._comparing: dict[int, Job] = {}  # comparisons that no other job waits for, by step
        if self._is_direct and self._runner is not None:
            self._runner = DirectRunner(self.communicator, self._runner)

    @property
    def is_closed(self) -> bool:
        """Returns whether the engine was closed, or this process was forked from the one that made the engine."""
        return self._runner is None or self._process != os.getpid()

    @property
    def failed(self) -> bool:
        """Returns whether an earlier error prevents all further reductions, because ranks may be at different
        places."""
        return self._runner is not None and self._runner.error_of(self.communicator) is not None

    def connect(self, *configs: GQSGDConfig) -> None:
        """Create the process groups that configurations need and that do not exist yet. A collective.

        Call it before any kernel is compiled, because ranks wait here no longer than the timeout.

        Args:
            *configs: the configurations with the chosen reducers.

        Raises:
            ConfigError: if a configuration does not support the engine's device.
        """
        for config in configs:
            setting = setting_of(config, self.world_size, torch.float32)  # any dtype will do: the stages are the same
            setting.reducer.check_device(setting, self.communicator.device)
            self.communicator.extend(setting.reducer.scopes(setting), config.connections)
        self.communicator.try_groups()

    def compile(self, configs: Iterable[GQSGDConfig], dtypes: Collection[torch.dtype], plan: type[Plan] = Plan) -> None:
        """Compile the kernels of configurations with chosen reducers for tensors of some dtypes; ``plan`` is that of
        the requests."""
        if self.world_size == 1:
            return
        for config, dtype in product(configs, dtypes):
            compile_kernels(config, dtype, self.communicator.device, self.world_size, plan)

    def reduce(self, x: Tensor, request: Request) -> Job:
        """Start to replace a flat tensor by its mean over ranks. Every rank has to make its calls in the same order.

        Returns:
            The job, whose future completes with the tensor.

        Raises:
            ConfigError: if the tensor cannot be reduced.
            RuntimeError: if the engine is closed.
        """
        with span("reduce"):
            return self._reduce(x, request)

    def _reduce(self, x: Tensor, request: Request) -> Job:
        self.check_open()
        counters = self.telemetry.bucket(request.bucket)
        starts: Sequence[Start] = ()
        is_direct = False
        if self.world_size > 1 and x.numel():
            plan = self.plan(x, request)
            is_direct = self._is_direct and plan.is_native
            if is_direct and isinstance(request.agreement, Stamp):
                # No job waits for this comparison, see `wire.direct`. `agreed` waits for it.
                self._comparing[request.step] = self.compare(request.agreement, is_direct=True)
                request = request._replace(agreement=None)
            store = request.store or new_store(plan.setting, {}, x.device)
            starts = plan.starts(x, self.rank, request.step, store, counters, self.telemetry)
        connections = request.configs[0].connections
        job = self._job(x, starts, request, counters, connections=connections, is_direct=is_direct)
        return self._submit(job)

    def run(self, x: Tensor, request: Request, start: Callable[[BucketCounters], Steps]) -> Job:
        """Start steps that the caller defines, on every rank, in one order with the calls of `reduce`. Any tensor is
        allowed.

        Args:
            x: the tensor that becomes NaN if the steps fail.
            request: see `Request`; its agreement is compared.
            start: creates the steps; called with the counters of the bucket, unless there is only one rank.

        Returns:
            The job, whose future completes with ``x`` after the steps.

        Raises:
            RuntimeError: if the engine is closed.
        """
        self.check_open()
        counters = self.telemetry.bucket(request.bucket)
        starts = [partial(start, counters)] if self.world_size > 1 else []
        return self._submit(self._job(x, starts, request, counters))

    def agreed(self, until_step: int = MAX_INTEGER, *, at_once: bool = False) -> dict[int, Agreed]:
        """Return and forget the numbers that the compared stamps of all ranks had, by step.

        Args:
            until_step: the latest step whose stamps are returned. If its stamps were exchanged in the step before the
                last one, or earlier, this does not wait for other ranks.
            at_once: over NCCL, make the host wait for the GPU, so that stamps of the latest step are included.
        """
        if at_once:
            self._stamps.read_sent()
        for step in [step for step in self._comparing if step <= until_step]:
            with suppress(ConfigError, CollectiveError):  # all later jobs fail with that, too
                self._comparing.pop(step).wait()
        return self._stamps.take(until_step)

    def compare(
        self, agreement: Card | Stamp, *, blocks: bool = True, at_once: bool = False, is_direct: bool = False
    ) -> Job:
        """Start to compare a card or a stamp over all ranks, without a tensor to reduce. If the card of this rank has
        an error, the rank need not wait for the job. Once the job is done, `agreed` returns the numbers of a stamp.

        Args:
            agreement: the card or the stamp.
            blocks, is_direct: see `Job`.
            at_once: see `StampCheck.steps`.

        Returns:
            The job, whose `Job.wait` raises ConfigError if ranks differ, or if a rank refuses; over NCCL, `agreed`
            raises it for a stamp.
        """
        self.check_open()
        nothing = torch.empty(0, device=self.communicator.control_device)
        name = agreement.purpose if isinstance(agreement, Card) else f"step {agreement.step}"
        start = self._comparison(agreement, at_once=at_once)
        counters = self.telemetry.bucket(0)
        return self._submit(Job(nothing, [], name, counters, self.telemetry, False, start, blocks, is_direct=is_direct))

    def compare_first(self, stamp: Stamp) -> None:
        """Compare a stamp over all ranks before this rank sends anything else in the step, because a state was loaded
        on this rank, or because its messages have changed. Waits for the other ranks, which compare their stamps while
        messages are under way.

        If stamps differ, all later jobs fail with the error that the other ranks raise.
        """
        if self.world_size > 1:
            # Not a blocking comparison: after one of those, ranks continue although they differ.
            with suppress(ConfigError, CollectiveError):  # all later jobs fail with that, too
                self.compare(stamp, blocks=False, at_once=True).wait()

    def check_open(self) -> None:
        """Raise RuntimeError if the engine is closed."""
        if self._process != os.getpid():
            raise RuntimeError(
                "gqsgd: this process was forked from the one whose threads and connections it would need; "
                f"{self._words.remedy}"
            )
        if self._runner is None:
            raise RuntimeError(f"gqsgd: {self._words.owner} was closed; {self._words.remedy}")

    def close(self) -> None:
        """Stop using threads and process groups. This is not a collective. It does nothing in a forked process."""
        # The runner is removed first, so that a job that fails below finds the engine closed.
        runner = self._runner
        self._runner = None
        if runner is None or self._process != os.getpid():
            return
        # Jobs are ended before the groups that they use.
        with ExitStack() as parts:
            parts.callback(self.communicator.close)
            if self._borrowed is not None:
                parts.callback(release, self._borrowed)
            runner.close(self.communicator)

    def plan(self, x: Tensor, request: Request) -> Plan:
        """Returns the plan that cuts a flat tensor into pieces for a request.

        Raises:
            ConfigError: if the tensor cannot be reduced.
        """
        key = PlanKey(request.configs, request.segments, x.dtype, request.compressed, request.plan)
        return self.plans.get(key, request.step, lambda: self._planned(x, request))

    def _planned(self, x: Tensor, request: Request) -> Plan:
        check_gradient(x, "a gradient")
        configs = request.configs
        segments = request.segments
        if not request.compressed:  # all parameters are sent in the same way then
            configs = configs[:1]
            segments = tuple(segment._replace(raw=True, choice=0) for segment in segments)
        settings = []
        for config in configs:
            bits = config.num_bits if request.compressed else 32  # fewer uncompressed coordinates fill a message
            settings.append(setting_of(config, self.world_size, x.dtype, self._piece_size(bits)))
        plan = request.plan(segments, *[setting_for(each, compressed=request.compressed) for each in settings])
        if plan.numel != x.numel():
            raise RuntimeError(f"gqsgd: {request.name} has {x.numel()} coordinates, its parameters {plan.numel}")
        return plan

    def _piece_size(self, bits: int) -> PieceSize:
        """Returns the number of coordinates of a piece whose codes have ``bits`` bits."""
        size = self.communicator.piece_size(bits)
        return size.times(SHARED_GROWTH) if self._has_large_pieces else size

    def _wants_large_pieces(self) -> bool:
        """Returns whether pieces are larger than over a network: if ranks share memory and each has one thread for its
        codes, because several threads need several pieces. The result is the same on all ranks. A collective if ranks
        share memory.

        Raises:
            CollectiveError: if another rank has died, or has not arrived.
        """
        if not self.communicator.shares_memory:
            return False
        most_threads = torch.tensor([self._threads], device="cpu")
        try:
            self.communicator.start(Exchange.in_place("max", most_threads), stage=0).wait()
        except RuntimeError as error:
            said = self.communicator.describe(error, "comparing numbers of threads")
            self.communicator.close()
            raise said from error
        return int(most_threads) == 1

    def _job(
        self,
        x: Tensor,
        starts: Sequence[Start],
        request: Request,
        counters: BucketCounters,
        *,
        connections: int = 1,
        is_direct: bool = False,
    ) -> Job:
        """Returns the job of a request. ``starts`` start its pieces; for the other arguments, see `Job`."""
        is_card = isinstance(request.agreement, Card)
        return Job(
            x,
            starts,
            request.name,
            counters,
            self.telemetry,
            request.ends_step,
            agreement=self._comparison(request.agreement),  # also for an empty tensor: other ranks' may have elements
            agreement_blocks=is_card or request.is_special,
            watch=request.watch,
            kept_if_refused=is_card,
            # Pieces of one parameter share its memory. A single piece cannot be shared among threads.
            threads=1 if len(starts) == 1 or request.configs[0].remembers else self._threads,
            connections=connections,
            is_direct=is_direct,
            is_held=request.is_held,
        )

    def _comparison(self, agreement: Card | Stamp | None, *, at_once: bool = False) -> Start | None:
        """Returns a function that starts the steps that compare a card or a stamp; None if there is nothing to
        compare."""
        if agreement is None or self.world_size == 1:
            return None
        if isinstance(agreement, Card):
            return partial(compared, agreement, self.communicator.numbers, self.communicator.control_device)
        return partial(self._stamps.steps, agreement, at_once=at_once)

    def _submit(self, job: Job) -> Job:
        """Give a job to the runner. All jobs are submitted here. After an error, the runner makes them fail with its
        reason."""
        assert self._runner is not None  # see `check_open`
        if job.left or self.failed:
            self._runner.submit(self.communicator, job)
        else:  # there is one rank, or nothing to send
            job.finish()
        return job
