"""The engine, which replaces flat tensors by their mean over the ranks of a process group.

DDP's hook, `all_reduce`, local steps and FSDP's hooks each have an `Engine`. It holds the communicator, the runner of
jobs and the plans. It knows nothing of models; its callers know them, count steps, and talk to users.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.reducers import REDUCERS, Setting, Steps, new_store, setting_for, stages
from lightning_gqsgd.reducers.memory import MemoryStore
from lightning_gqsgd.wire.agreement import STATE_DIFFERS, Agreed, Card, Stamp, StampCheck, compared
from lightning_gqsgd.wire.communicator import Communicator
from lightning_gqsgd.wire.compiling import compile_kernels
from lightning_gqsgd.wire.direct import DirectRunner
from lightning_gqsgd.wire.job import Job, Start
from lightning_gqsgd.wire.peers import Peers
from lightning_gqsgd.wire.pipeline import Runner, release, runner_for
from lightning_gqsgd.wire.plan import Plan, check_gradient
from lightning_gqsgd.wire.telemetry import BucketCounters, Telemetry
from lightning_gqsgd.wire.workers import codec_threads

#: No step has a larger number.
MAX_STEP = 2**63 - 1

#: Seconds that ranks that are alive are waited for beyond the timeout where kernels may have to be compiled.
COMPILE_PATIENCE_S = 600.0

#: Steps without a plan's use after which the plan is dropped, where configurations take turns.
PLANS_KEPT = 100


@dataclass(frozen=True)
class Messages:
    """The words for an engine's caller in the engine's errors.

    Attributes:
        owner: what is closed when the engine is.
        remedy: what to do once it is closed.
        differ: why ranks may be at different steps, and what to do then, in whole sentences.
    """

    owner: str = "the hook"
    remedy: str = "make a new one"
    differ: str = STATE_DIFFERS


@dataclass(frozen=True)
class Request:
    """A request to reduce one flat tensor.

    Attributes:
        name: for messages.
        config: the configuration, with its reducer chosen.
        others: the configurations of segments whose choice is 1, 2 and so on. They differ from the first in ``bits``
            alone, and in what follows from that.
        segments: the parameters in the tensor, in order.
        step: number of the step, and of its dither.
        store: what this rank remembers; None: nothing.
        agreement: what ranks compare: a card before anything else is sent, or a stamp while messages are under way.
            In steps whose messages differ from those of other steps, a stamp is compared before anything else, too.
        bucket: index of the counters.
        ends_step: whether the tensor is the last one of its step.
        compressed: False: everything travels uncompressed.
        plan: what cuts the tensor into pieces.
        direct: whether a native all-reduce over Gloo is started by the calling thread, and a stamp compared without any
            job that waits for it; see `wire.direct`. The same for all tensors that are under way together, because
            two threads would start collectives in any order.
        varies: whether messages may have other sizes in other steps, so that a stamp is compared before they are sent.
        compares_first: whether this rank compares its stamp before it sends anything else, because its state was
            loaded, or its bits have changed.
        watch: what is called with the mean as soon as it is there, on the thread and the stream that complete the job;
            None: nothing. It changes nothing.
    """

    name: str
    config: GQSGDConfig
    segments: tuple[Segment, ...]
    step: int
    store: MemoryStore | None = None
    agreement: Card | Stamp | None = None
    bucket: int = 0
    ends_step: bool = False
    compressed: bool = True
    plan: type[Plan] = Plan
    direct: bool = False
    varies: bool = False
    compares_first: bool = False
    watch: Callable[[Tensor], None] | None = None
    others: tuple[GQSGDConfig, ...] = ()

    def alone(self) -> Request:
        """Returns the request for a tensor of one segment, without the configurations of other segments."""
        (segment,) = self.segments
        config = (self.config, *self.others)[segment.choice]
        return replace(self, config=config, others=(), segments=(segment._replace(choice=0),))


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
        messages: what errors say of the caller.

    Attributes:
        communicator: the ranks.
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
    ) -> None:
        self._threads = codec_threads(group.size()) if device.type == "cpu" else 1
        self.communicator = Communicator(device, group, key, timeout)
        self.telemetry: Telemetry = Telemetry() if shares_runner_of is None else shares_runner_of.telemetry
        self.plans = PlanCache()
        self._messages = messages or Messages()
        self._process = os.getpid()
        self._stamps = StampCheck(self.world_size, self.communicator.control_device, self._messages.differ)
        self._refusal: BaseException | None = None  # why this rank sends nothing any more
        self._owns_runner = shares_runner_of is None
        self._runner: Runner | None = (
            runner_for(self.communicator, streams) if shares_runner_of is None else shares_runner_of._runner
        )
        # On a GPU, a native all-reduce needs the runner's streams, and over Gloo copies in host memory.
        is_simple = self.communicator.backend == "gloo" and device.type == "cpu" and self.communicator.size > 1
        self._direct = DirectRunner(self.communicator) if is_simple else None

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.communicator.size

    @property
    def is_closed(self) -> bool:
        """Returns whether the engine was closed, or this process was forked from the one that made the engine."""
        return self._runner is None or self._process != os.getpid()

    @property
    def failed(self) -> bool:
        """Returns whether an error has left the ranks at different places, so that nothing can be reduced any more."""
        return self._error() is not None

    def connect(self, *configs: GQSGDConfig) -> None:
        """Make the process groups that configurations need and that do not exist yet. A collective.

        It comes before any kernel is compiled: ranks wait here no longer than the timeout.

        Args:
            *configs: the configurations, with their reducers chosen.

        Raises:
            ConfigError: a configuration is not for the engine's device.
        """
        for config in configs:
            REDUCERS[config.reducer].check_device(config, self.communicator.device)
            self.communicator.extend(stages(config, self.world_size), config.connections)

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
        request = self._compare_first_if_asked(request)
        counters = self.telemetry.bucket(request.bucket)
        telemetry = self.telemetry
        starts = []
        preface = None
        blocks = True
        if self.world_size > 1:
            preface, blocks = self._preface(request)  # also of nothing, which other ranks may have something for
        if self.world_size > 1 and x.numel():
            store = request.store or new_store(request.config, self.world_size, {}, x.dtype, x.device)
            plan = self.plan(x, request)
            starts = plan.starts(x, self.rank, request.step, store, counters, telemetry)
            if request.direct and plan.is_native and self._direct is not None:
                return self._reduce_directly(x, request, starts[0], self._direct)
        job = Job(x, starts, request.name, counters, telemetry, request.ends_step, preface, blocks, request.watch)
        job.kept_if_refused = isinstance(request.agreement, Card)
        # Pieces of one parameter share what is remembered of it. A single piece is nothing to share among threads.
        job.threads = 1 if request.config.remembers or len(starts) == 1 else self._threads
        job.connections = request.config.connections
        self._submit(job)
        return job

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
        request = self._compare_first_if_asked(request)
        counters = self.telemetry.bucket(request.bucket)
        starts = []
        preface = None
        blocks = True
        if self.world_size > 1:
            starts = [partial(start, counters)]
            preface, blocks = self._preface(request)
        job = Job(x, starts, request.name, counters, self.telemetry, request.ends_step, preface, blocks)
        self._submit(job)
        return job

    def agreed(self, until_step: int) -> dict[int, Agreed]:
        """Returns what all ranks know from the stamps of steps, by step, and forgets it.

        Args:
            until_step: the latest step whose stamps count. If they were exchanged in the step before the last one, or
                earlier, this waits for nobody.
        """
        if self._direct is not None:
            self._direct.settle(until_step)
        stamps = self._stamps
        steps = [step for step in sorted(stamps.periods) if step <= until_step]
        return {step: Agreed(stamps.periods.pop(step), stamps.numbers.pop(step)) for step in steps}

    def agreed_so_far(self) -> dict[int, Agreed]:
        """Returns what all ranks know from the stamps of all steps so far, and forgets it. Waits for other ranks."""
        self.read_stamps()
        return self.agreed(MAX_STEP)

    def read_stamps(self) -> None:
        """Wait until the stamps of all steps so far have been read, so that `agreed` knows them."""
        if self._direct is not None:
            self._direct.settle(MAX_STEP)
        self._stamps.read_sent()

    def forget_agreed(self) -> None:
        """Forget the stamps of all steps so far: a state was loaded."""
        if self._direct is not None:
            self._direct.settle(MAX_STEP)
        self._stamps.periods.clear()
        self._stamps.numbers.clear()

    def compare(self, stamp: Stamp) -> Job:
        """Start to compare a stamp over all ranks, between steps. `agreed` knows it when the job is done; over NCCL,
        when `read_stamps` was called after that.

        Returns:
            The job, whose `Job.wait` raises ConfigError if stamps differ; over NCCL, `read_stamps` raises that.
        """
        self.check_open()
        nothing = torch.empty(0, device=self.communicator.control_device)
        steps = partial(self._stamps.steps, stamp)
        job = Job(nothing, [], f"step {stamp.step}", self.telemetry.bucket(0), self.telemetry, False, steps)
        self._submit(job)
        return job

    def agree(self, card: Card) -> Job:
        """Start to compare a card over all ranks. A rank that refuses, by the card's error, need not wait for the job.

        Returns:
            The job, whose `Job.wait` raises ConfigError if ranks differ, or one refuses.
        """
        self.check_open()
        nothing = torch.empty(0, device=self.communicator.control_device)
        preface = self._compare(card) if self.world_size > 1 else None
        job = Job(nothing, [], card.purpose, self.telemetry.bucket(0), self.telemetry, False, preface)
        self._submit(job)
        return job

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
        if self._direct is not None:
            owner = self._messages.owner
            self._direct.fail(RuntimeError(f"{owner} was closed"), f"the end of {owner}")
        # First the jobs, then the groups that they use.
        runner.close(self.communicator)
        if self._owns_runner:
            release(runner)
        self.communicator.close()

    def _reduce_directly(self, x: Tensor, request: Request, start: Start, direct: DirectRunner) -> Job:
        """Start a native all-reduce in this thread."""
        if isinstance(request.agreement, Stamp):
            direct.compare(self._stamps, request.agreement)
        counters = self.telemetry.bucket(request.bucket)
        telemetry = self.telemetry
        job = Job(x, [], request.name, counters, telemetry, request.ends_step, watch=request.watch)
        # A failure of the runner has to fail direct jobs as well: the two use the same groups.
        error = self._error()
        if error is not None and direct.error is None:
            direct.fail(error, request.name)
        direct.submit(job, start())
        return job

    def _agree_on(self, stamp: Stamp) -> None:
        """Compare a stamp over all ranks, and wait for that. If stamps differ, this job and all later ones fail."""
        nothing = torch.empty(0, device=self.communicator.control_device)
        steps = partial(self._stamps.steps, stamp, at_once=True)
        job = Job(nothing, [], f"step {stamp.step}", self.telemetry.bucket(0), self.telemetry, False, steps)
        self._submit(job)
        try:
            job.wait()
        except Exception as error:  # reported through the futures of jobs, as other ranks report it
            self._refusal = self._refusal or error

    def _error(self) -> BaseException | None:
        """Returns the error that has left the ranks at different places; None: there was none."""
        if self._refusal is not None:
            return self._refusal
        if self._direct is not None and self._direct.error is not None:
            return self._direct.error
        return None if self._runner is None else self._runner.error_of(self.communicator)

    def _submit(self, job: Job) -> None:
        assert self._runner is not None
        error = self._refusal or (None if self._direct is None else self._direct.error)
        if error is not None:
            job.finish(self.communicator.describe(error, f"{job.name}, after an earlier failure,"))
        elif job.left:
            self._runner.submit(self.communicator, job)
        else:
            job.finish()

    def _compare(self, card: Card) -> Start:
        return partial(compared, card, self.world_size, self.communicator.control_device)

    def _compare_first_if_asked(self, request: Request) -> Request:
        """Compare a stamp that has to be compared before anything else is sent, and return the request without it.

        Other requests are returned as they are.
        """
        if request.compares_first and isinstance(request.agreement, Stamp) and self.world_size > 1:
            self._agree_on(request.agreement)
            return replace(request, agreement=None)
        return request

    def _preface(self, request: Request) -> tuple[Start | None, bool]:
        """Returns the steps of a request's agreement, and whether they are over before the first piece starts."""
        if isinstance(request.agreement, Card):
            return self._compare(request.agreement), True
        if request.agreement is not None:
            return partial(self._stamps.steps, request.agreement), _is_special(request)
        return None, True

    def plan(self, x: Tensor, request: Request) -> Plan:
        """Returns the plan that cuts a flat tensor into pieces for a request.

        Raises:
            ConfigError: a tensor that cannot be reduced.
        """
        configs = (request.config, *request.others)
        key = PlanKey(request.plan, configs, request.segments, x.dtype, request.compressed)
        return self.plans.get(key, request.step, lambda: self._planned(x, request))

    def _planned(self, x: Tensor, request: Request) -> Plan:
        check_gradient(x, "a gradient")
        configs = (request.config, *request.others)
        segments = request.segments
        if not request.compressed:  # all parameters travel in the same way then
            configs = configs[:1]
            segments = tuple(segment._replace(raw=True, choice=0) for segment in segments)
        settings = []
        for config in configs:
            bits = config.num_bits if request.compressed else 32  # fewer uncompressed coordinates fill a message
            settings.append(Setting(config, self.world_size, x.dtype, self.communicator.piece_size(bits)))
        plan = request.plan(segments, *[setting_for(setting, compressed=request.compressed) for setting in settings])
        if plan.numel != x.numel():
            raise RuntimeError(f"gqsgd: {request.name} has {x.numel()} coordinates, its parameters {plan.numel}")
        return plan


def _is_special(request: Request) -> bool:
    """Returns whether a rank at another step might send other messages: as the request says, in steps that sample
    errors, and in the warm-up."""
    config = request.config
    samples = bool(config.sample_every) and request.step % config.sample_every == 0
    return request.varies or samples or not request.compressed


class PlanKey(NamedTuple):
    """The values that a plan depends on, apart from the engine."""

    plan: type[Plan]
    configs: tuple[GQSGDConfig, ...]
    segments: tuple[Segment, ...]
    dtype: torch.dtype
    compressed: bool


class PlanCache:
    """Plans by what they depend on, in the order of their latest use.

    The tables of a plan take about a quarter of a byte of memory per coordinate, three times.
    """

    def __init__(self) -> None:
        self._plans: OrderedDict[PlanKey, Plan] = OrderedDict()
        self._used_in: dict[PlanKey, int] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: PlanKey, step: int, make: Callable[[], Plan]) -> Plan:
        """Returns the plan of a key, which is made if there is none; ``step``: the step that uses the plan."""
        if key not in self._plans:
            self._plans[key] = make()
        self._plans.move_to_end(key)
        self._used_in[key] = step
        return self._plans[key]

    def drop_unused(self, since_step: int) -> None:
        """Forget the plans that no step has used from ``since_step`` on."""
        for key in [key for key, step in self._used_in.items() if step < since_step]:
            self._drop(key)

    def trim(self, most_bytes: int) -> None:
        """Forget the plans that were not used for longest, until the others take ``most_bytes`` bytes, or one is
        left."""
        total = sum(plan.nbytes for plan in self._plans.values())
        while total > most_bytes and len(self._plans) > 1:
            key = next(iter(self._plans))
            total -= self._plans[key].nbytes
            self._drop(key)

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()
        self._used_in.clear()

    def _drop(self, key: PlanKey) -> None:
        del self._plans[key], self._used_in[key]
