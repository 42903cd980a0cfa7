"""The DDP communication hook and its state.

DDP's contract, as far as it shapes this file: the hook is a plain function whose second parameter is called ``bucket``
and carries no annotation; the result is the bucket's own buffer, in place; buckets are rebuilt after the first step
(the first holds the whole model), so nothing is keyed by bucket index; the buffer is not divided by the number of
ranks beforehand.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.adaptive.plain import PlainPath
from lightning_gqsgd.adaptive.steering import Steering
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve_each
from lightning_gqsgd.ddp.starting import (
    check_divisor,
    check_group,
    check_is_ddp,
    check_model,
    check_wrapped_anew,
    device_of,
    dtypes_of,
    own_facts,
)
from lightning_gqsgd.ddp.trained import TrainedParameters, average, start_alike
from lightning_gqsgd.ddp.unaveraged import BackwardWatch
from lightning_gqsgd.ddp.unused import UnusedParameters
from lightning_gqsgd.errors import ConfigError, check_integer, plain_integer
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.predict.levels import fitted
from lightning_gqsgd.presets import make_config
from lightning_gqsgd.reducers import REDUCERS, new_store
from lightning_gqsgd.session import checkpoint
from lightning_gqsgd.session.copies import DetachedState, say_if_detached
from lightning_gqsgd.session.nodes import layouts
from lightning_gqsgd.session.opening import Side, compile_together, digest_of_facts, facts_of, open_engines
from lightning_gqsgd.session.parameters import Parameter, digest, number_parameters, segments_of
from lightning_gqsgd.session.report import report
from lightning_gqsgd.session.summary import StepClock, in_words, summary
from lightning_gqsgd.sparse.gradients import SparseGradients
from lightning_gqsgd.sparse.missing import fill_missing_gradients
from lightning_gqsgd.sparse.options import check_tables, tables_of
from lightning_gqsgd.spec.decisions import Decision
from lightning_gqsgd.tracing import untraced
from lightning_gqsgd.wire.agreement import Stamp, digest_of
from lightning_gqsgd.wire.communicator import Communicator, parent_group, patience_of
from lightning_gqsgd.wire.engine import MAX_STEP, PLANS_KEPT, Engine, Messages, Request
from lightning_gqsgd.wire.meeting import Meeting
from lightning_gqsgd.wire.plan import check_parameters
from lightning_gqsgd.wire.telemetry import Telemetry, moment

_MESSAGES = Messages(remedy="register it on a new DistributedDataParallel model")


class GQSGDState:
    """State of the hook on one DDP model.

    Creating one is a collective on the model's process group; `register_gqsgd` says what its arguments are.

    Attributes:
        requested: the configuration as it was given.
        config: the configuration, with its reducer chosen; with ``auto`` or ``bits="auto"``, that of the latest step;
            with bits by name, that of the first pattern.
        step: number of reduced backward passes; numbers the dither.
        decisions: with ``auto`` or ``bits="auto"``, all changes of bits (see `spec.decisions.Decision`), in order:
            what was predicted and measured, and why.
        telemetry: counters of this process.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        config: GQSGDConfig,
        timeout: timedelta | None = None,
        post_local_sgd: PostLocalSGDState | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        check_is_ddp(model)
        self._group = model.process_group
        self._device = device_of(model)
        self._timeout = timeout
        self._requested = config
        self._post_local_sgd = post_local_sgd
        self._step = 0
        self._compares_first = False
        self._plain: PlainPath | None = None
        self._watch: BackwardWatch | None = None
        self._is_in_step = False  # some buckets of a backward pass have come, and not the last one
        with meeting or self._meeting("register_gqsgd") as start:
            check_model(model)
            (layout,) = layouts(start)
            check_tables(model, config, post_local_sgd)
            check_group(post_local_sgd, model)
            named = dict(model.module.named_parameters())
            numbered = number_parameters(named, config)
            self._parameters = {id(p): entry for entry, p in zip(numbered, named.values(), strict=True)}
            dtypes = dtypes_of(model)
            numel = sum(entry.numel for entry in numbered if not entry.raw)
            fit = fitted(config, layout, numel, dtypes[0], self._device)
            config = fit.config
            self._note = fit.note
            world_size = dist.get_world_size(self._group)
            steering = self._steering = Steering(config, world_size) if config.chooses_bits else None
            by_bits = resolve_each(config, world_size) if steering is None else steering.candidates
            self._configs = list(by_bits.values())
            self._config = self._configs[0]
            # Candidates take turns in steps, while configurations by name share each step.
            self._others = tuple(self._configs[1:]) if steering is None else ()
            self._choices = {bits: number for number, bits in enumerate(by_bits)}
            self._dtype = dtypes[0]
            self._store = new_store(self.config, world_size, _sizes(numbered), self._dtype, self._device)
            self._remembered: set[int] = set()  # numbers of the parameters that have been compressed, or loaded
            self._segments: dict[tuple[int, ...], tuple[Segment, ...]] = {}
            one_or_all = config if len(self._configs) > 1 else self.config
            self._facts = facts_of(one_or_all, own_facts(config, model, numbered))
            self._digest = digest_of_facts(self._facts)
            sides = [Side(self._group, self._facts, self._configs)]
            prepare = partial(self._prepare, model)
            with open_engines(
                start, sides, self._device, timeout=timeout, messages=_MESSAGES, dtypes=dtypes, prepare=prepare
            ) as (self._engine,):
                self._clock = StepClock(self._engine.telemetry)
                self._install(model)

    def _prepare(self, model: DistributedDataParallel, engine: Engine) -> None:
        """Make what reduces sparse gradients and measures the noise of dense ones, with its kernels compiled."""
        tables = [self._parameters[id(table)] for table in tables_of(model, frozen=True).values()]
        self._sparse = SparseGradients.of(engine, self._configs, tables, self._dtype)
        if self._steering is not None:
            self._steering.compile(self._dtype, self._device)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name != "step":
            raise AttributeError(
                f"the state of a hook has no attribute {name!r} that can be set, only 'step'; its configuration is "
                "fixed: call register_gqsgd with other fields, on a new DistributedDataParallel model"
            )
        super().__setattr__(name, value)

    @property
    def requested(self) -> GQSGDConfig:
        """The configuration as it was given."""
        return self._requested

    @property
    def config(self) -> GQSGDConfig:
        """The configuration of the latest step, with its reducer chosen."""
        return self._config

    @property
    def _compresses(self) -> bool:
        """True if some gradients are not averaged by the backend's own all-reduce."""
        return any(REDUCERS[config.reducer].compresses for config in (self._config, *self._others))

    @property
    def step(self) -> int:
        """Number of reduced backward passes. A rank that sets it compares it with others before it sends gradients."""
        return self._step + (0 if self._plain is None else self._plain.passed)

    @step.setter
    def step(self, number: int) -> None:
        check_integer("step", plain_integer(number), 0, MAX_STEP)
        self._step = int(number)
        self._compares_first = True
        if self._plain is not None:
            self._plain.restart()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """All changes of bits so far, in order; empty where ``bits`` are given."""
        return () if self._steering is None else self._steering.decisions

    @property
    def telemetry(self) -> Telemetry:
        """Counters of this process."""
        return self._engine.telemetry

    def __deepcopy__(self, memo: Any) -> DetachedState:
        return DetachedState(self.requested.to_dict(), self.step)

    def __reduce__(self) -> Any:
        return DetachedState, (self.requested.to_dict(), self.step)

    # --- the hook ----------------------------------------------------------------------------------------------------

    @untraced
    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to replace a bucket's buffer by its mean over ranks: their sum, divided by the size of DDP's group.

        Under torch's `Join`, a rank that has run out of inputs takes part with zeros, and still counts in the divisor.
        After ``start_localSGD_iter`` steps of post-local SGD, the buffer is left to torch's hook.

        Raises:
            ConfigError: ranks do not agree on the seed or the step, DDP does not reduce a parameter that requires a
                gradient, or `Join` asks for another divisor.
        """
        x = bucket.buffer()
        check_divisor(self._model())
        is_first = bucket.index() == 0 or not self._is_in_step
        self._is_in_step = True
        # Told to skip unused parameters, DDP hands over no bucket without used ones, the last one included.
        is_last = bucket.is_last() and not self._skips_buckets
        if is_last:
            self._trained.check()
        local = self._post_local_sgd
        if local is not None:
            if local.iter >= local.start_localSGD_iter:
                if is_last:
                    self._end_watched_step()
                return post_localSGD_hook(local, bucket)
            local.maybe_increase_iter(bucket)
        step = self._step
        stamp = self._begin_step(step) if is_first else None
        segments = self._segments_of(bucket.parameters())
        if self._unused is not None:
            self._unused.watch(x, segments)
        steering = self._steering
        # Rows of sparse gradients are not the same on all ranks.
        taken = None if steering is None or x.is_sparse else steering.take(x, segments, step)
        request = Request(
            name=f"bucket {bucket.index()} of step {step}",
            config=self.config,
            others=self._others,
            segments=segments,
            step=step,
            store=self._store,
            agreement=stamp,
            bucket=bucket.index(),
            ends_step=is_last,
            compressed=step >= self.config.warmup_steps,
            direct=self._sparse is None and (steering is not None or not self._compresses),
            compares_first=stamp is not None and self._compares_first,
            watch=None if steering is None or taken is None else steering.sampler.watch(taken),
        )
        if is_last:
            self._end_backward()
        if x.is_sparse and self._sparse is not None:
            future = self._sparse.reduce(x, request)
        else:
            future = self._engine.reduce(x, request).future
            if steering is not None and taken is not None:
                steering.sampler.measure(taken)  # while messages are under way
        if self._skips_buckets:
            self._latest_arrival = moment(x.device)
            if is_first:
                Variable._execution_engine.queue_callback(self._end_backward_late)
        return future

    def _end_backward(self) -> None:
        """Count a step: its last bucket has come."""
        self._step += 1
        self._compares_first = False
        if self._unused is not None:
            self._unused.settle_after_backward()
        if self._steering is not None:
            self._steering.end_backward()
        if self._plain is not None:
            self._plain.end_hook_step()
        self._end_watched_step()

    def _end_watched_step(self) -> None:
        self._is_in_step = False
        self._clock.tick()
        if self._watch is not None:
            self._watch.end_reduction()

    def _end_backward_late(self) -> None:
        """Count a step at the end of its backward pass, because no bucket was known to be the last one as it came."""
        self._trained.check()
        self._end_backward()
        # DDP has queued a callback that waits for all results; this one comes behind it.
        Variable._execution_engine.queue_callback(self._count_step)

    def _count_step(self) -> None:
        self.telemetry.expose(self._latest_arrival, moment(self._device))
        self.telemetry.end_step()

    @untraced
    def before_forward(self, model: DistributedDataParallel) -> None:
        """Check that DDP reduces what is trained; let plain DDP take the hook's place, or the hook its own again, where
        that is decided (see `adaptive.plain`).

        Raises:
            ConfigError: DDP does not reduce a parameter that requires a gradient, or the backward pass before has not
                reached DDP.
        """
        # Activations are computed again while a backward pass is under way.
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        plain = self._plain
        is_closed = self.is_closed  # then the backward pass raises, also while plain DDP carries the gradients
        if model.require_backward_grad_sync and not is_closed:
            self._trained.check()
            self._is_in_step = False  # of a backward pass that was broken off
        if plain is not None and plain.is_due(model):
            was_on = plain.is_on
            plain.go_on(model, Stamp(self.config.seed, self.step, self._digest), (self, gqsgd_hook))
            if was_on and not plain.is_on:
                self.step = self.step  # counted by the hook again, and compared first
        if self._watch is not None and not is_closed:
            self._watch.before_forward(model, has_hook=plain is None or not plain.is_on)

    def _begin_step(self, step: int) -> Stamp | None:
        """Choose the step's configuration. Returns the stamp that ranks compare in the step; None for the reducer
        "native", which has neither seed nor dither."""
        steering = self._steering
        engine = self._engine
        # DDP has rebuilt its buckets after the first step, and the plan of the whole model is of no more use.
        engine.plans.drop_unused(step - (2 if steering is None else PLANS_KEPT))
        if steering is None:
            return Stamp(self.config.seed, step, self._digest) if self._compresses else None
        steering.receive(engine.agreed(step - 2))
        # On a GPU, the time of a step that waits is known later than the step's length.
        exposed_s = None if self._device.type == "cuda" else engine.telemetry.exposed_s
        before = self._config
        begun = steering.begin_step(step, exposed_s, logs=engine.rank == 0)
        self._config = begun.config
        # A rank that has decided otherwise than others is found before any message of another size is sent.
        self._compares_first |= self._config is not before
        engine.telemetry.choice = steering.choice()
        return Stamp(self.config.seed, step, steering.digest(self._digest), begun.period_us, begun.numbers)

    def _segments_of(self, parameters: list[Tensor]) -> tuple[Segment, ...]:
        key = tuple(map(id, parameters))
        if key not in self._segments:
            entries = [self._parameters[id(p)] for p in parameters]
            self._segments[key] = segments_of(entries, self._choices)
        return self._segments[key]

    # --- which parameters are trained --------------------------------------------------------------------------------

    def changes(self) -> tuple[list[str], list[str]]:
        """Names of the parameters that require a gradient although DDP does not reduce them, and names of those that
        DDP reduces although they require none.

        DDP reduces the parameters that required a gradient when it was built.
        """
        return self._trained.unfrozen, self._trained.frozen

    def rewrap(self, build: Callable[[nn.Module], DistributedDataParallel]) -> DistributedDataParallel:
        """Go on with a new DDP model around the same module, because other parameters require a gradient now, or the
        module has other parameters.

        A collective on the process group. Step, seed, counters and what is remembered of each parameter stay. A
        parameter that is new in the module takes the values of the group's first rank, and nothing is remembered of it.
        Gradients that frozen parameters have are averaged, because nobody would average them later. The old DDP model
        cannot be trained any more: drop it. Tell the optimizer of new parameters.

        Args:
            build: makes the DDP model, as the old one was made, e.g. ``DistributedDataParallel``.

        Raises:
            ConfigError: ranks do not agree on the parameters, a parameter cannot be reduced, some were frozen between a
                forward and a backward pass, or ``build`` gives a model of another module or process group.
            RuntimeError: the hook was closed, or other ranks do not call this.
        """
        self._engine.check_open()
        old = self._model()
        if old is None:
            raise RuntimeError(f"gqsgd: the model is gone; {_MESSAGES.remedy}")
        module = old.module
        with self._meeting("rewrap") as meeting:
            named = dict(module.named_parameters())
            numbered = number_parameters(named, self.requested)
            if self._sparse is not None and numbered != list(self._parameters.values()):
                raise ConfigError(
                    "the module has other parameters than before, and tables with sparse gradients, which are known by "
                    "number; call register_gqsgd on a new DistributedDataParallel model instead"
                )
            check_parameters({name: p for name, p in named.items() if p.requires_grad})
            trained = [entry for entry, p in zip(numbered, named.values(), strict=True) if p.requires_grad]
            new = self._trained.new_in(module)
            left = self._trained.left_behind(old.reducer)
            dtypes = list(dict.fromkeys(p.dtype for p in named.values() if p.requires_grad))
            facts = {
                "parameters": digest(numbered),
                "parameters that require a gradient": digest(trained),
                "new parameters": digest(new),
                "frozen with a gradient": digest(left),
                "dtypes": ", ".join(map(str, dtypes)),
            }
            meeting.agree([facts])
            compile_together(meeting, {self._engine: self._configs}, dtypes)
        average(left.values(), self._group)
        start_alike(new.values(), self._group)
        del old
        self._renumber(numbered, named, dtypes[0])
        self._ends_with.detach()
        if self._watch is not None:
            self._watch.remove()
        if self._plain is not None:
            self.step = self.step  # takes over the steps that plain DDP has counted
            self._plain.remove()
        try:
            model = build(module)
            check_wrapped_anew(model, module, self._group)
            check_tables(model, self.requested, self._post_local_sgd)
        except BaseException:
            self.close()
            raise
        self._install(model)
        return model

    def _renumber(self, numbered: list[Parameter], named: dict[str, nn.Parameter], dtype: torch.dtype) -> None:
        """Give parameters their new numbers, and keep what is remembered of those that were there before."""
        before = self._parameters
        self._parameters = {id(p): entry for entry, p in zip(numbered, named.values(), strict=True)}
        self._segments.clear()
        self._engine.plans.clear()
        if numbered == list(before.values()) and self._parameters.keys() == before.keys() and dtype == self._dtype:
            return
        same = {entry.number: self._parameters[key].number for key, entry in before.items() if key in self._parameters}
        store = new_store(self.config, self._engine.world_size, _sizes(numbered), dtype, self._device)
        store.take_from(self._store, same)
        self._store = store
        self._dtype = dtype
        self._remembered = {same[number] for number in self._remembered if number in same}
        if self._steering is not None:
            self._steering.sampler.drop()
        self._facts = {**self._facts, "parameters": digest(numbered)}
        self._digest = digest_of_facts(self._facts)

    @property
    def is_closed(self) -> bool:
        """True if the hook cannot train the model any more."""
        return self._engine.is_closed

    def is_on(self, model: nn.Module) -> bool:
        """Returns True for the model that the hook was registered on, and False for copies of it."""
        return self._model() is model

    def _install(self, model: DistributedDataParallel) -> None:
        """Register the hook on a model; the hook is closed when that model is deleted."""
        self._trained = TrainedParameters(model, self._parameters)
        numbers = [entry.number for entry in self._trained.parameters]
        self._remembered |= {entry.number for entry in self._trained.parameters if not entry.raw}
        drops_results = model.find_unused_parameters and not model.static_graph
        watches = self.config.remembers and drops_results
        self._unused = UnusedParameters(model, self._store, numbers) if watches else None
        self._skips_buckets = getattr(model, "skip_all_reduce_unused_params", False)
        if self._steering is not None:
            self._steering.watch(model)
        if model.find_unused_parameters:
            fill_missing_gradients(model, tables_of(model).values())
        model.register_comm_hook(self, gqsgd_hook)
        if self._steering is not None and self._steering.trials is not None:
            needs = {"sparse gradients": self._sparse, "post-local SGD": self._post_local_sgd}
            self._plain = PlainPath.on(model, self._engine, self._steering, needs)
        if self._engine.world_size > 1:
            self._watch = BackwardWatch(model, list(self._trained.reduced.values()))
        model.register_forward_pre_hook(before_forward)
        model.register_forward_pre_hook(say_if_detached)
        # Also at exit: Gloo groups that are still open then can abort the process.
        self._ends_with = weakref.finalize(model, self.close)
        self._model = weakref.ref(model)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to give the same bits: plain values and tensors.

        Without a memory, the state is equal on all ranks, and this is no collective. With a memory, every rank has to
        call this. Rank 0 alone gets all ranks' memory, tensors [ranks, numel] by kind and parameter number: save its
        state.
        """
        state: dict[str, Any] = {"schema": checkpoint.STATE_SCHEMA, "seed": self.config.seed, "step": self.step}
        state["config"] = self.requested.to_dict()
        if self._post_local_sgd is not None:
            state["post_local_iter"] = self._post_local_sgd.iter
        if self._steering is not None:
            # While plain DDP carries the gradients, a comparison that is under way is for its next step to read.
            self._steering.receive({} if self._steering.is_plain else self._engine.agreed_so_far())
            state["auto"] = self._steering.state()
        return {**state, "memory": self._all_memory()} if self.config.remembers else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the dither and the memory of a checkpoint. Not a collective; every rank loads the state of rank 0.

        With a state of another number of ranks, or without memory, the memory starts empty, and a warning says so.
        Where ranks load different states, the next backward pass raises ConfigError on all of them.

        Raises:
            ConfigError: ``state`` is no state, has another schema, or is that of a model with other parameters.
        """
        checkpoint.check_state(state, self.requested)
        if self._steering is not None:
            self._steering.resume(state.get("auto"))
        if self.config.remembers:
            numbers = checkpoint.take_memory(self._store, state, self._engine.rank, self._engine.world_size)
            # Seed and step of states may be equal where memories are not.
            self._digest = digest_of(f"{digest_of_facts(self._facts)} {checkpoint.memory_digest(state)}")
            if numbers is not None:
                checkpoint.say_what_is_missing(self._trained.parameters, numbers)
                self._remembered |= numbers
        self._config, *others = (replace(config, seed=state["seed"]) for config in (self._config, *self._others))
        self._others = tuple(others)
        self._requested = replace(self._requested, seed=state["seed"])
        self.step = state["step"]
        if self._steering is not None:
            self._engine.forget_agreed()
            self._steering.reseed(state["seed"])
            self._config = self._steering.config
        if self._post_local_sgd is not None:
            self._post_local_sgd.iter = state.get("post_local_iter", self._post_local_sgd.iter)
        self._engine.plans.clear()

    def _all_memory(self) -> dict[str, dict[int, Tensor]] | None:
        # A rank that calls this alone would send rows where others send stamps, which aborts Gloo.
        with self._meeting("state_dict") as meeting:
            (key,) = meeting.agree([{"parameters": digest(sorted(self._remembered))}])
        if not self.is_closed:
            return checkpoint.gathered_memory(self._engine.communicator, self._store, self._remembered)
        # Lightning closes the hook before users save a model that has been fitted.
        with closing(Communicator(self._device, self._group, key, self._timeout)) as communicator:
            return checkpoint.gathered_memory(communicator, self._store, self._remembered)

    # --- what the user sees ------------------------------------------------------------------------------------------

    def report(self) -> str:
        """Returns one line that says what is compressed, to how many bits and by which reducer, and what is not; with
        ``auto`` or ``bits="auto"``, also the bits that are allowed, their average so far, and the latest decision."""
        ranks = self._engine.world_size
        configs = (self.config, *self._others)
        tables = frozenset() if self._sparse is None else self._sparse.numbers
        if self._steering is not None and ranks > 1:
            text = self._steering.report(ranks)
        else:
            dense = [parameter for parameter in self._trained.parameters if parameter.number not in tables]
            text = report(self.requested, configs, dense, ranks, self.step, has_tables=bool(tables))
        text += self._note
        return text if self._sparse is None or ranks == 1 else f"{text}; {self._sparse.describe(configs)}"

    def summary(self) -> dict[str, float]:
        """Returns what compression did since the hook was made, in numbers (see `summary.summary`)."""
        return summary(self.telemetry, self._clock, self._engine.world_size)

    def summary_line(self) -> str:
        """Returns the summary as one line: bytes against those of fp32, bits, error, and the share of waiting."""
        return in_words(self.summary())

    def announce(self, say: Callable[[str], None]) -> None:
        """Say what `report` says, and from now on whatever ``auto`` or ``bits="auto"`` decides, on rank 0.

        ``say`` must not refer to the model, which would never be freed then.
        """
        if self._steering is not None:
            self._steering.say = say
        if self._engine.rank == 0:
            say(self.report())

    def close(self) -> None:
        """Stop using threads and process groups. The model cannot be trained by this hook any more."""
        if self._plain is not None:
            self._plain.forget()
        if self._watch is not None:
            self._watch.remove()
        self._trained.forget()
        self._engine.close()

    def _meeting(self, purpose: str) -> Meeting:
        return Meeting(purpose, [self._group], patience_of(self._timeout, self._group, self._device))


def _sizes(parameters: list[Parameter]) -> dict[int, int]:
    """Returns the number of coordinates of each compressed parameter, by the parameter's number."""
    return {entry.number: entry.numel for entry in parameters if not entry.raw}


def before_forward(model: nn.Module, inputs: Any) -> None:
    """Forward pre-hook of DDP models: calls `GQSGDState.before_forward`, unless the model is a copy."""
    if torch.compiler.is_compiling():
        return
    for _, state in getattr(model, "_comm_hooks", ()):
        if isinstance(state, GQSGDState) and isinstance(model, DistributedDataParallel) and state.is_on(model):
            state.before_forward(model)


def gqsgd_hook(state: GQSGDState, bucket):  # type: ignore[no-untyped-def]  # DDP rejects annotations that are strings
    """Reduce a bucket: the communication hook that DDP calls (see `GQSGDState.reduce`)."""
    return state.reduce(bucket)


def register_gqsgd(
    model: DistributedDataParallel,
    preset: str | GQSGDConfig | None = None,
    *,
    timeout: timedelta | None = None,
    post_local_sgd: PostLocalSGDState | None = None,
    **fields: Any,
) -> GQSGDState:
    """Compress the gradient allreduce of a DDP model.

    A collective on the model's process group: every rank calls it. Returns the state (counters, checkpoints, `close`).

    Args:
        model: the DDP model, before its first backward pass.
        preset: name of a preset (see `presets.PRESETS`), or a configuration.
        timeout: of collectives; None takes that of the model's process group.
        post_local_sgd: torch's state of post-local SGD: from its ``start_localSGD_iter`` on, gradients are averaged as
            `post_localSGD_hook` does, uncompressed in its subgroup or not at all. Averaging the model is up to you.
        **fields: fields of `GQSGDConfig`.

    Raises:
        ConfigError: a configuration or model that cannot work, or ranks that do not agree; on every rank, if one of
            them refuses.
        CollectiveError: not all ranks call it within the timeout.
    """
    check_is_ddp(model)
    patience = patience_of(timeout, parent_group(model.process_group), device_of(model))
    with Meeting("register_gqsgd", [model.process_group], patience) as meeting:
        config = make_config(preset, **fields)
        return GQSGDState(model, config, timeout, post_local_sgd, meeting)
