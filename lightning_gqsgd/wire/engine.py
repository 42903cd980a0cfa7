"""The engine, which replaces flat tensors by their mean over the ranks of a process group.

DDP's hook, `all_reduce`, local steps and FSDP's hooks each have an `Engine`. It holds the communicator, the runner of
jobs and the plans. It knows nothing of models; its callers know them, count steps, and talk to users.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import setting_of
from lightning_gqsgd.errors import CollectiveError, ConfigError
from lightning_gqsgd.kernels.layout import PieceSize, Segment
from lightning_gqsgd.reducers import Steps, new_store, setting_for, stages
from lightning_gqsgd.reducers.base import Exchange
from lightning_gqsgd.reducers.memory import MemoryStore
from lightning_gqsgd.wire.agreement import STATE_DIFFERS, Agreed, Card, Stamp, StampCheck, compared
from lightning_gqsgd.wire.communicator import Communicator
from lightning_gqsgd.wire.compiling import compile_kernels
from lightning_gqsgd.wire.direct import DirectRunner
from lightning_gqsgd.wire.peers import Peers
from lightning_gqsgd.wire.pipeline import Job, Runner, Start, release, runner_for
from lightning_gqsgd.wire.plan import Plan, PlanCache, PlanKey, check_gradient
from lightning_gqsgd.wire.telemetry import BucketCounters, Telemetry
from lightning_gqsgd.wire.workers import codec_threads

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: No step has a larger number.
MAX_STEP = 2**63 - 1

#: Seconds that ranks that are alive are waited for beyond the timeout where kernels may have to be compiled.
COMPILE_PATIENCE_S = 600.0

#: How many times larger pieces are where ranks share memory. No link is to be filled there while a piece is encoded,
#: and what Python does for each piece takes more of a processor than copying its codes.
SHARED_GROWTH = 4


def untraced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator for a function of an engine's caller: torch.compile traces neither its calls nor what they call.

    Dynamo runs whatever a compiled train step calls, and also the hook that DDP calls from its backward pass. It cannot
    trace threads, process groups and compiled kernels, and fails instead of leaving them out.
    """
    # `torch.compiler.disable` would import Dynamo at once, which takes seconds. So it is called when Dynamo is there.

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
class Messages:
    """The words for an engine's caller in the engine's errors.

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
        name: for messages.
        configs: the configuration, with its reducer chosen; where segments have different ones, that of each choice.
            They differ in ``bits`` alone, and in what follows from that.
        segments: the parameters in the tensor, in order.
        step: number of the step, and of its dither.
        store: the memory of this rank; None: it remembers nothing.
        agreement: a card, which ranks compare before anything else is sent, or a stamp, which they compare while
            messages are under way. In steps whose messages differ from those of other steps, a stamp is compared before
            anything else, too.
        bucket: index of the counters.
        ends_step: whether the tensor is the last one of its step.
        compressed: False: everything travels uncompressed.
        varies: whether messages may have other sizes in other steps, so that a stamp is compared before they are sent.
        watch: a function that is called with the mean as soon as it is there, on the thread and the stream that
            complete the job, and that leaves the mean as it is; None: there is none.
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

    def alone(self) -> Request:
        """Returns the request for a tensor of one segment, without the configurations of other segments."""
        (segment,) = self.segments
        return self._replace(configs=(self.configs[segment.choice],), segments=(segment._replace(choice=0),))

    @property
    def is_special(self) -> bool:
        """Returns whether a rank at another step might send other messages: as the request says, in steps that sample
        errors, and in the warm-up."""
        every = self.configs[0].sample_every
        return self.varies or not self.compressed or bool(every) and self.step % every == 0


class Engine:
    """Replaces flat tensors by their mean over the ranks of a process group.

    Creating one is a collective: every rank of ``group`` does it, with the same key.

    Args:
        device: device of the tensors.
        group: process group, or the ranks themselves.
        key: a name that no other engine has had, the same on all ranks (see `wire.meeting.Meeting.agree`).
        timeout: of collectives; None takes that of ``group``.
        streams: on a GPU over NCCL, number of streams to work on; 1 if another engine is to work beside this one.
        shares_runner_of: another engine, which was made with one stream. Both engines use the other engine's runner,
            so that their collectives never run at the same time, and both add to the same counters.
        messages: the words for the caller in errors.
        plan: the class that cuts tensors into pieces.
        direct: whether the calling thread starts native all-reduces over Gloo itself; see `wire.direct`.

    Attributes:
        communicator: the ranks.
        rank: this process's rank.
        world_size: number of ranks.
        telemetry: counters of this process.
        plans: the cache of plans, which say how tensors are cut into pieces.

    Raises:
        ConfigError: the backend of the group does not go with the device, or ``GQSGD_THREADS`` is no number of threads.
    """

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | Peers,
        key: str,
        *,
        timeout: timedelta | None = None,
        streams: int = 2,
        shares_runner_of: Engine | None = None,
        messages: Messages | None = None,
        plan: type[Plan] = Plan,
        direct: bool = False,
    ) -> None:
        self._threads = codec_threads(group.size()) if device.type == "cpu" else 1
        self.communicator = Communicator(device, group, key, timeout)
        self.rank = self.communicator.rank
        self.world_size = self.communicator.size
        self._has_large_pieces = self._wants_large_pieces()
        self.telemetry: Telemetry = Telemetry() if shares_runner_of is None else shares_runner_of.telemetry
        self.plans = PlanCache()
        self._plan_type = plan
        self._messages = messages or Messages()
        self._process = os.getpid()
        self._stamps = StampCheck(
            self.world_size, self.communicator.control_device, self._messages.differ, says=self.rank == 0
        )
        self._borrowed: Runner | None = None  # what `close` gives back
        if shares_runner_of is None:
            self._borrowed = runner_for(self.communicator, streams)
        self._runner: Runner | None = self._borrowed if shares_runner_of is None else shares_runner_of._runner
        # On a GPU, a native all-reduce needs the runner's streams, and over Gloo copies in host memory.
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
        """Returns whether an error has left the ranks at different places, so that nothing can be reduced any more."""
        return self._runner is not None and self._runner.error_of(self.communicator) is not None

    def connect(self, *configs: GQSGDConfig) -> None:
        """Make the process groups that configurations need and that do not exist yet. A collective.

        It comes before any kernel is compiled: ranks wait here no longer than the timeout.

        Args:
            *configs: the configurations, with their reducers chosen.

        Raises:
            ConfigError: a configuration is not for the engine's device.
        """
        for config in configs:
            setting = setting_of(config, self.world_size, torch.float32)  # of any dtype: the stages are the same
            setting.reducer.check_device(setting, self.communicator.device)
            self.communicator.extend(stages(setting), config.connections)
        self.communicator.try_groups()

    def compile(self, config: GQSGDConfig, dtype: torch.dtype) -> None:
        """Compile the kernels of a configuration, with its reducer chosen, for gradients of a dtype."""
        if self.world_size > 1:
            compile_kernels(config, dtype, self.communicator.device, self.world_size)

    def reduce(self, x: Tensor, request: Request) -> Job:
        """Start to replace a flat tensor by its mean over ranks; on every rank in the same order.

        Returns:
            The job, whose future completes with the tensor.

        Raises:
            ConfigError: a tensor that cannot be reduced.
            RuntimeError: the engine is closed.
        """
        self.check_open()
        counters = self.telemetry.bucket(request.bucket)
        starts: Sequence[Start] = ()
        is_direct = False
        if self.world_size > 1 and x.numel():
            plan = self.plan(x, request)
            is_direct = self._is_direct and plan.is_native
            if is_direct and isinstance(request.agreement, Stamp):
                # No job waits for it, see `wire.direct`. `agreed` does.
                comparison = self._compare_alone("the comparison of stamps", request.agreement, is_direct=True)
                self._comparing[request.step] = comparison
                request = request._replace(agreement=None)
            store = request.store or new_store(plan.setting, {}, x.device)
            starts = plan.starts(x, self.rank, request.step, store, counters, self.telemetry)
        connections = request.configs[0].connections
        job = self._job(x, starts, request, counters, connections=connections, is_direct=is_direct)
        return self._submit(job)

    def run(self, x: Tensor, request: Request, start: Callable[[BucketCounters], Steps]) -> Job:
        """Start steps of the caller's own, in the order of `reduce`; on every rank, with any tensor.

        Args:
            x: what becomes NaN if the steps fail.
            request: see `Request`; its agreement is compared.
            start: makes the steps; called with the counters of the bucket, not if there is one rank only.

        Returns:
            The job, whose future completes with ``x`` when the steps are through.

        Raises:
            RuntimeError: the engine is closed.
        """
        self.check_open()
        counters = self.telemetry.bucket(request.bucket)
        starts = [partial(start, counters)] if self.world_size > 1 else []
        return self._submit(self._job(x, starts, request, counters))

    def agreed(self, until_step: int = MAX_STEP, *, at_once: bool = False) -> dict[int, Agreed]:
        """Returns the numbers that all ranks have agreed on in stamps, by step, and forgets them.

        Args:
            until_step: the latest step whose stamps count. If they were exchanged in the step before the last one, or
                earlier, this waits for nobody.
            at_once: over NCCL, the host waits for the GPU, so that stamps of the latest step count.
        """
        if at_once:
            self._stamps.read_sent()
        for step in [step for step in self._comparing if step <= until_step]:
            with suppress(ConfigError, CollectiveError):  # all later jobs fail with that, too
                self._comparing.pop(step).wait()
        return self._stamps.take(until_step)

    def compare(self, stamp: Stamp) -> Job:
        """Start to compare a stamp over all ranks, between steps. `agreed` knows it when the job is done. If stamps
        differ, `Job.wait` raises ConfigError; over NCCL, `agreed` does."""
        return self._compare_alone(f"step {stamp.step}", stamp)

    def compare_first(self, stamp: Stamp) -> None:
        """Compare a stamp over all ranks before this rank sends anything else of the step: a state was loaded on this
        rank, or its messages have changed. Waits for other ranks, which compare theirs while messages are under way.

        If stamps differ, all later jobs fail with what is raised on the other ranks.
        """
        if self.world_size > 1:
            # Not a comparison that blocks: after those, ranks go on where they differ.
            with suppress(ConfigError, CollectiveError):  # all later jobs fail with that, too
                self._compare_alone(f"step {stamp.step}", stamp, blocks=False, at_once=True).wait()

    def agree(self, card: Card) -> Job:
        """Start to compare a card over all ranks. A rank that refuses, by the card's error, need not wait for the job.

        Returns:
            The job, whose `Job.wait` raises ConfigError if ranks differ, or one refuses.
        """
        return self._compare_alone(card.purpose, card)

    def check_open(self) -> None:
        """Raise RuntimeError if the engine is closed."""
        if self._process != os.getpid():
            raise RuntimeError(
                "gqsgd: this process was forked from the one whose threads and connections it would need; "
                f"{self._messages.remedy}"
            )
        if self._runner is None:
            raise RuntimeError(f"gqsgd: {self._messages.owner} was closed; {self._messages.remedy}")

    def close(self) -> None:
        """Stop using threads and process groups. Not a collective; does nothing in a forked process."""
        # The runner is taken away first, so that a job that fails below finds the engine closed.
        runner = self._runner
        self._runner = None
        if runner is None or self._process != os.getpid():
            return
        # First the jobs, then the groups that they use.
        runner.close(self.communicator)
        if self._borrowed is not None:
            release(self._borrowed)
        self.communicator.close()

    def plan(self, x: Tensor, request: Request) -> Plan:
        """Returns the plan that cuts a flat tensor into pieces for a request.

        Raises:
            ConfigError: a tensor that cannot be reduced.
        """
        key = PlanKey(request.configs, request.segments, x.dtype, request.compressed)
        return self.plans.get(key, request.step, lambda: self._planned(x, request))

    def _planned(self, x: Tensor, request: Request) -> Plan:
        check_gradient(x, "a gradient")
        configs = request.configs
        segments = request.segments
        if not request.compressed:  # all parameters travel in the same way then
            configs = configs[:1]
            segments = tuple(segment._replace(raw=True, choice=0) for segment in segments)
        settings = []
        for config in configs:
            bits = config.num_bits if request.compressed else 32  # fewer uncompressed coordinates fill a message
            settings.append(setting_of(config, self.world_size, x.dtype, self._piece_size(bits)))
        plan = self._plan_type(segments, *[setting_for(each, compressed=request.compressed) for each in settings])
        if plan.numel != x.numel():
            raise RuntimeError(f"gqsgd: {request.name} has {x.numel()} coordinates, its parameters {plan.numel}")
        return plan

    def _piece_size(self, bits: int) -> PieceSize:
        """Returns the number of coordinates of a piece whose codes have ``bits`` bits."""
        size = self.communicator.piece_size(bits)
        return size.times(SHARED_GROWTH) if self._has_large_pieces else size

    def _wants_large_pieces(self) -> bool:
        """Returns whether pieces are larger than over a network, the same on all ranks: where ranks share memory, and
        each has one thread for its codes. Several threads want several pieces. A collective where ranks share memory.

        Raises:
            CollectiveError: another rank has died, or has not come.
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
        """Returns the job of a request, whose pieces are started by ``starts``; for the others, see `Job`."""
        is_card = isinstance(request.agreement, Card)
        return Job(
            x,
            starts,
            request.name,
            counters,
            self.telemetry,
            request.ends_step,
            preface=self._preface(request.agreement),  # also for nothing, because other ranks may have something
            preface_blocks=is_card or request.is_special,
            watch=request.watch,
            kept_if_refused=is_card,
            # Pieces of one parameter share what is remembered of it. A single piece is nothing to share among threads.
            threads=1 if len(starts) == 1 or request.configs[0].remembers else self._threads,
            connections=connections,
            is_direct=is_direct,
        )

    def _compare_alone(
        self, name: str, agreement: Card | Stamp, *, blocks: bool = True, at_once: bool = False, is_direct: bool = False
    ) -> Job:
        """Start to compare a card or a stamp, without anything to reduce; see `Job` and `StampCheck.steps`."""
        self.check_open()
        nothing = torch.empty(0, device=self.communicator.control_device)
        preface = self._preface(agreement, at_once=at_once)
        counters = self.telemetry.bucket(0)
        return self._submit(
            Job(nothing, [], name, counters, self.telemetry, False, preface, blocks, is_direct=is_direct)
        )

    def _preface(self, agreement: Card | Stamp | None, *, at_once: bool = False) -> Start | None:
        """Returns what starts the steps that compare a card or a stamp; None if there is nothing to compare."""
        if agreement is None or self.world_size == 1:
            return None
        if isinstance(agreement, Card):
            return partial(compared, agreement, self.world_size, self.communicator.control_device)
        return partial(self._stamps.steps, agreement, at_once=at_once)

    def _submit(self, job: Job) -> Job:
        """Give a job to the runner, which also knows why nothing can be run any more. All jobs come through here."""
        assert self._runner is not None  # see `check_open`
        if job.left or self.failed:
            self._runner.submit(self.communicator, job)
        else:  # there is one rank, or nothing to send
            job.finish()
        return job
