"""The DDP communication hook and its state.

These rules of DDP shape this file: the hook is a plain function whose second parameter is called ``bucket`` and has no
annotation. The result is the bucket's own buffer, changed in place. DDP rebuilds its buckets after the first step, in
which the first bucket holds the whole model, so nothing is keyed by bucket index. DDP does not divide the buffer by the
number of ranks before it calls the hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.adaptive.plain import PlainPath, obstacle
from lightning_gqsgd.adaptive.steering import Steering
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve_each, setting_of
from lightning_gqsgd.ddp.checks import (
    check_group,
    check_is_ddp,
    check_model,
    device_of,
    dtypes_of,
    own_facts,
    unignored,
)
from lightning_gqsgd.ddp.model import Attachment, NumberedParameters
from lightning_gqsgd.ddp.unaveraged import average
from lightning_gqsgd.errors import MAX_INTEGER, ConfigError, check_integer, plain_integer
from lightning_gqsgd.predict.levels import fitted
from lightning_gqsgd.presets import make_config
from lightning_gqsgd.reducers import REDUCERS
from lightning_gqsgd.reducers.memory import MemoryStore
from lightning_gqsgd.session import checkpoint
from lightning_gqsgd.session.copies import DetachedState, say_if_detached
from lightning_gqsgd.session.first_rank import take_from_first_rank
from lightning_gqsgd.session.nodes import nodes_of_groups
from lightning_gqsgd.session.opening import Side, digest_of_facts, facts_of, open_engines
from lightning_gqsgd.session.parameters import digest, number_parameters
from lightning_gqsgd.session.report import in_words, report, ring_bytes_in_fp32, summary
from lightning_gqsgd.sparse.gradients import SparseGradients
from lightning_gqsgd.sparse.missing import fill_missing_gradients
from lightning_gqsgd.sparse.options import check_tables, tables_of
from lightning_gqsgd.spec.decisions import Decision
from lightning_gqsgd.wire.agreement import Stamp, StepCounter, digest_of
from lightning_gqsgd.wire.communicator import Communicator, parent_group, patience_of
from lightning_gqsgd.wire.engine import Engine, Request, Words, untraced
from lightning_gqsgd.wire.meeting import Meeting
from lightning_gqsgd.wire.plan import PLANS_KEPT, check_parameters
from lightning_gqsgd.wire.telemetry import Telemetry, moment

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lightning_gqsgd.spec.fields import FieldArguments

#: Bytes of all gradients from which on a sum through shared memory is taken to save more than the hook's calls cost.
LEAST_IN_MEMORY = 1 << 22

_WORDS = Words(remedy="register it on a new DistributedDataParallel model")

#: What `GQSGDState.rewrap` calls the end of the last backward pass, with the remedy if ranks differ.
_END_OF_BACKWARD = (
    "the last backward pass (after an exception at different places, close the hook, and "
    "register it on a new DistributedDataParallel model)"
)


class GQSGDState:
    """State of the hook on one DDP model.

    `register_gqsgd` creates it and describes the arguments.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        config: GQSGDConfig,
        timeout: timedelta | None,
        post_local_sgd: PostLocalSGDState | None,
        meeting: Meeting,
    ) -> None:
        self._group = model.process_group
        self._device = device_of(model)
        self._timeout = timeout
        self._requested = config
        self._post_local_sgd = post_local_sgd
        self._steps = StepCounter()
        self._handed_over = 0  # number of parameters whose gradients DDP has handed over in this step
        check_model(model)
        (nodes,) = nodes_of_groups(meeting, self._device)
        check_tables(model, config, post_local_sgd)
        check_group(post_local_sgd, model)
        ranks = dist.get_world_size(self._group)
        named = unignored(model.module, model.parameters_to_ignore)
        numbered = number_parameters(named, config)
        dtypes = dtypes_of(model)
        numel = sum(entry.numel for entry in numbered if not entry.raw)
        fit = fitted(config, nodes, numel, dtypes[0])
        config = fit.config
        self._note = fit.note
        says = dist.get_rank(self._group) == 0
        steering = self._steering = Steering(config, ranks, says=says) if config.chooses_bits else None
        by_bits = resolve_each(config, ranks) if steering is None else steering.candidates
        self._candidates = list(by_bits.values())
        # Candidates take turns in steps, while configurations by name share each step.
        self._configs = tuple(self._candidates if steering is None else self._candidates[:1])
        # Otherwise the backend's own all-reduce averages all gradients.
        self._compresses = any(REDUCERS[config.reducer].compresses for config in self._configs)
        choices = {bits: number for number, bits in enumerate(by_bits)}
        setting = setting_of(self.config, ranks, dtypes[0])
        self._parameters = NumberedParameters(numbered, named.values(), choices, setting, self._device)
        one_or_all = config if len(self._candidates) > 1 else self.config
        self._facts = facts_of(one_or_all, own_facts(config, model, numbered, post_local_sgd))
        self._digest = digest_of_facts(self._facts)
        tables = {}
        if config.sparse != "refuse":
            tables = tables_of(model.module, frozen=True, ignored=model.parameters_to_ignore)
        # The calling thread starts all collectives of a step, or none. For post-local SGD, steps have a stamp.
        is_native = not self._compresses and post_local_sgd is None
        direct = not tables and (steering is not None or is_native)
        sides = [Side(self._group, self._facts, self._candidates, direct=direct)]
        prepare = partial(self._prepare, list(tables.values()), dtypes[0])
        with open_engines(
            meeting, sides, self._device, timeout=timeout, words=_WORDS, dtypes=dtypes, prepare=prepare
        ) as (self._engine,):
            self._attach(model, is_countable=False)

    def _prepare(self, tables: list[Tensor], dtype: torch.dtype, engine: Engine) -> None:
        """Make the parts for sparse gradients and for the noise of dense ones, and compile their kernels."""
        entries = [self._parameters.entries[id(table)] for table in tables]
        self._sparse = SparseGradients(engine, self._candidates, entries, dtype) if entries else None
        if self._steering is not None:
            self._steering.compile(dtype, self._device)

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
        """The configuration with the chosen reducer. With ``auto`` or ``bits="auto"``, it is the configuration of the
        latest step; with bits by name, that of the first pattern."""
        return self._configs[0]

    @property
    def is_plain(self) -> bool:
        """True while plain DDP reduces the gradients under `auto`. Such a step is counted when the next one begins."""
        return self._steering is not None and self._steering.is_plain

    @property
    def is_waiting(self) -> bool:
        """True if the latest backward pass did not reach all parameters; the optimizer's next step then raises an
        error."""
        watch = self._attachment.watch
        return watch is not None and watch.is_waiting

    @property
    def _store(self) -> MemoryStore:
        """The memory of this rank."""
        return self._parameters.store

    @property
    def step(self) -> int:
        """Number of reduced backward passes. The dither depends on it. After setting it, a rank compares it with the
        others before it sends."""
        return self._steps.number

    @step.setter
    def step(self, number: int) -> None:
        check_integer("step", plain_integer(number), 0, MAX_INTEGER)
        self._steps.go_to(int(number))
        if self._attachment.plain is not None:
            self._attachment.plain.forget_comparison()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """With ``auto`` or ``bits="auto"``, all decisions about the number of bits so far, in order: what was
        predicted, what was measured, and the reason (see `spec.decisions.Decision`). Empty if ``bits`` is fixed."""
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
        """Start to replace a bucket's buffer by the mean of the buffers of all ranks of DDP's group.

        Under torch's `Join`, a rank that has no inputs left contributes zeros and still counts in the divisor. After
        ``start_localSGD_iter`` steps of post-local SGD, torch's hook reduces the buffer instead.

        Raises:
            ConfigError: if ranks have different seeds or steps, if DDP does not reduce a parameter that requires a
                gradient, or if `Join` needs another divisor.
        """
        x = bucket.buffer()
        attachment = self._attachment
        model = attachment.model()
        if getattr(model, "_divide_by_initial_world_size", True) is False:
            raise ConfigError(
                "Join with divide_by_initial_world_size=False divides by the number of ranks that still have inputs, "
                "which a communication hook is not told; gqsgd divides by the number of all ranks: leave it at True"
            )
        ids = tuple(map(id, bucket.parameters()))
        # In the first step of a static graph, DDP hands over all buckets at the end of the backward pass, and each of
        # them has index 0.
        is_static = getattr(model, "static_graph", False)
        is_first = not self._steps.is_under_way or (bucket.index() == 0 and not is_static)
        self._steps.is_under_way = True
        self._handed_over = len(ids) + (0 if is_first else self._handed_over)
        is_at_end = bucket.is_last() or (is_static and self._handed_over == len(attachment.trained.reduced))
        is_last = is_at_end and not attachment.skips_buckets
        if is_last:
            attachment.trained.check()
        if self._post_local_sgd is not None:
            left = self._left_to_torch(self._post_local_sgd, bucket, is_first, is_last)
            if left is not None:
                return left
        stamp = self._begin_step() if is_first else None
        segments = self._parameters.buckets.get(ids) or self._parameters.segments_of(ids)
        if attachment.unused is not None:
            attachment.unused.watch(x, segments)
        step = self._steps.number
        steering = self._steering
        # Rows of sparse gradients are not the same on all ranks, so no sample is taken of them.
        taken = None if steering is None or x.is_sparse else steering.take(x, segments, step)
        request = Request(
            name=f"bucket {bucket.index()} of step {step}",
            configs=self._configs,
            segments=segments,
            step=step,
            store=self._parameters.store,
            agreement=stamp,
            bucket=bucket.index(),
            ends_step=is_last,
            compressed=step >= self._configs[0].warmup_steps,
            watch=None if steering is None or taken is None else steering.sampler.watch(taken),
        )
        if is_last:
            self._end_step()
        if x.is_sparse and self._sparse is not None:
            future = self._sparse.reduce(x, request)
        else:
            future = self._engine.reduce(x, request).future
        if steering is not None and taken is not None:
            steering.sampler.measure(taken)  # while messages are under way
        if attachment.skips_buckets:
            self._latest_arrival = moment(x.device)
            if is_first:
                Variable._execution_engine.queue_callback(self._end_step_late)
        return future

    def _left_to_torch(
        self, local: PostLocalSGDState, bucket: dist.GradBucket, is_first: bool, is_last: bool
    ) -> torch.futures.Future[Tensor] | None:
        """Count a bucket for post-local SGD. Returns the result of torch's hook, if the bucket is left to that."""
        if local.iter < local.start_localSGD_iter:
            local.maybe_increase_iter(bucket)
            return None
        if is_first and self._steps.compares_first:
            # Torch's hook compares nothing. A rank that has loaded a state alone would train alone.
            self._engine.compare_first(self._stamp())
            self._steps.compares_first = self._engine.failed
        if self._engine.failed:
            return None  # the engine raises the reason
        if is_last:
            self._end_backward()
        return post_localSGD_hook(local, bucket)

    def _begin_step(self) -> Stamp | None:
        """Begin a step. Returns the stamp that ranks compare in it; None if they have compared it, or need not, because
        the reducer "native" has neither seed nor dither, and no step of post-local SGD is counted."""
        # DDP has rebuilt its buckets after the first step, and the plan of the whole model is of no more use.
        step = self._steps.number
        self._engine.plans.drop_unused(step - (2 if self._steering is None else PLANS_KEPT))
        if self._steering is not None:
            stamp = self._choose_bits(self._steering)
        elif self._compresses or self._post_local_sgd is not None:
            stamp = self._stamp()
        else:
            return None
        stamp = stamp._replace(weights=self._attachment.trained.weights(self.step))
        if not self._steps.compares_first:
            return stamp
        self._engine.compare_first(stamp)
        return None

    def _stamp(self) -> Stamp:
        """Returns the stamp of this step, without measurements and weights."""
        return Stamp(self._configs[0].seed, self._steps.number, self._digest_now())

    def _digest_now(self) -> int:
        """Returns the digest of the facts, and of the places of the model's parameters if they have changed."""
        order = self._attachment.trained.order
        return digest_of(f"{self._digest} {order}") if order else self._digest

    def _choose_bits(self, steering: Steering) -> Stamp:
        """Choose the configuration of the step that begins. Returns its stamp, with what this rank has measured."""
        engine = self._engine
        plain = self._attachment.plain
        steering.receive(engine.agreed(self.step - 2))
        # On a GPU, the time of a step that waits is known later than the step's length.
        exposed_s = None if self._device.type == "cuda" else engine.telemetry.exposed_s
        is_countable = plain is not None and plain.is_countable
        stamp = steering.begin_step(self.step, exposed_s, digest=self._digest_now(), is_countable=is_countable)
        if steering.config is not self.config:
            # A rank that has decided otherwise than others is found before any message of another size is sent.
            self._steps.compares_first = True
            self._configs = (steering.config,)
        engine.telemetry.choice = steering.choice()
        return stamp

    def _end_step(self) -> None:
        """Count a step: its last bucket has come."""
        self._steps.end()
        attachment = self._attachment
        if attachment.unused is not None:
            attachment.unused.settle_after_backward()
        if attachment.plain is not None:
            attachment.plain.end_hook_step()
        if self._steering is not None:
            self._steering.clock.end_backward()
        self._end_backward()

    def _end_backward(self) -> None:
        """Note that all gradients of a backward pass have been handed over, to this hook or one of torch's."""
        self._steps.is_under_way = False
        self._engine.telemetry.end_backward()
        if self._attachment.watch is not None:
            self._attachment.watch.end_reduction()

    def _end_step_late(self) -> None:
        """Count a step at the end of its backward pass, because no bucket was known to be the last one as it came."""
        self._attachment.trained.check()
        self._end_step()
        # DDP has queued a callback that waits for all results; this one comes behind it.
        Variable._execution_engine.queue_callback(self._count_step)

    def _count_step(self) -> None:
        self.telemetry.expose(self._latest_arrival, moment(self._device))
        self.telemetry.end_step()

    @untraced
    def before_forward(self, model: DistributedDataParallel) -> None:
        """Check that DDP reduces all trained parameters. If `auto` has decided so, replace the hook by plain DDP, or
        plain DDP by the hook (see `adaptive.plain`).

        Raises:
            ConfigError: if DDP does not reduce a parameter that requires a gradient, or if the previous backward pass
                bypassed DDP.
        """
        # Activations are computed again while a backward pass is under way.
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        is_closed = self.is_closed  # then the backward pass raises, also while plain DDP carries the gradients
        if model.require_backward_grad_sync and not is_closed:
            self._attachment.trained.check()
            self._steps.is_under_way = False  # of a backward pass that was broken off
        plain = self._attachment.plain
        if plain is not None and plain.is_due(model):
            plain.go_on(model, self._stamp(), (self, gqsgd_hook))
        watch = self._attachment.watch
        if not is_closed and watch is not None:
            watch.before_forward(model, has_hook=not self.is_plain)

    # --- which parameters are trained --------------------------------------------------------------------------------

    def changes(self) -> tuple[list[str], list[str]]:
        """Returns two lists of parameter names: those that require a gradient but are not reduced by DDP as they are
        now, and those that are reduced by DDP but do not require a gradient.

        DDP reduces the parameters that required a gradient when it was built, in the memory format of that time.
        """
        return self._attachment.trained.unfrozen, self._attachment.trained.frozen

    def rewrap(self, build: Callable[[nn.Module], DistributedDataParallel]) -> DistributedDataParallel:
        """Wrap the same module in a new DDP model. Call this if other parameters require a gradient than before, or if
        the module has other parameters.

        This is a collective on the process group. The step, the seed, the counters and the memory of each parameter are
        kept. A parameter that is new in the module gets the values of the group's first rank and an empty memory; one
        that has got another memory format has an empty memory, too. If a parameter was frozen and still has a gradient,
        that gradient is averaged now, because no later step would average it. If an exception has ended the last
        backward pass, all gradients are set to None. Do not use the old DDP model any more. Add new parameters to the
        optimizer yourself.

        Args:
            build: a function that wraps a module in DDP as the old model was wrapped, e.g. ``DistributedDataParallel``.

        Raises:
            ConfigError: if ranks have different parameters, if a parameter cannot be reduced, if parameters were frozen
                between a forward and a backward pass, or if ``build`` returns a model of another module or process
                group.
            RuntimeError: if the hook was closed, or if other ranks do not call this.
        """
        self._engine.check_open()
        before = self._attachment
        old = before.model()
        if old is None:
            raise RuntimeError(f"gqsgd: the model is gone; {_WORDS.remedy}")
        module = old.module
        with self._meeting("rewrap") as meeting:
            named = unignored(module, old.parameters_to_ignore)
            numbered = number_parameters(named, self.requested)
            if self._sparse is not None and numbered != self._parameters.numbered:
                raise ConfigError(
                    "the module has other parameters than before, and tables with sparse gradients, which are known by "
                    "number; call register_gqsgd on a new DistributedDataParallel model instead"
                )
            check_parameters({name: p for name, p in named.items() if p.requires_grad})
            new = before.trained.new_in(module)
            dtypes = list(dict.fromkeys(p.dtype for p in named.values() if p.requires_grad))
            facts = {
                "parameters": digest(numbered),
                "parameters that require a gradient": digest(
                    entry for entry in numbered if named[entry.name].requires_grad
                ),
                "new parameters": digest(new),
                "dtypes": ", ".join(map(str, dtypes)),
                "parameters with a memory": digest(sorted(self._parameters.remembered)),
                "places of parameters that were there before": digest(
                    self._parameters.moved_to(numbered, named.values()).items()
                ),
            }
            meeting.agree([facts])
            # A collective of DDP's, in which a rank that refuses would leave the others waiting.
            has_ended = before.trained.has_ended(old.reducer)
            left = before.trained.left_behind()
            # Without an end, buckets are still under way, which other ranks may not have sent.
            end = "ended" if has_ended else f"stopped in step {self.step} after {self._handed_over} gradients"
            meeting.agree([{"frozen with a gradient": digest(left), _END_OF_BACKWARD: end}])
            with meeting.preparing():
                self._engine.compile(self._candidates, dtypes)
        if not has_ended:
            before.trained.drop_gradients(old.reducer)
        average(left.values(), self._group)
        take_from_first_rank(new.values(), self._group)
        old._gqsgd_was_replaced = True  # type: ignore[assignment]
        del old
        if self._parameters.renumber(numbered, named.values(), dtypes[0], self._engine.communicator):
            if self._steering is not None:
                self._steering.sampler.drop()
            self._facts = {**self._facts, "parameters": digest(numbered)}
            # The digest so far stands for what ranks have loaded and not compared yet.
            self._digest = digest_of(f"{digest_of_facts(self._facts)} {self._digest}")
        self._engine.plans.clear()
        self._ends_with.detach()
        before.detach()
        try:
            model = build(module)
            check_is_ddp(model)
            check_model(model)
            if model.module is not module or model.process_group is not self._group:
                raise ConfigError("`build` wrapped another module, or for another process group; give both as before")
            check_tables(model, self.requested, self._post_local_sgd)
        except BaseException:
            self.close()
            raise
        self._attach(model, is_countable=before.plain is not None and before.plain.is_countable)
        return model

    @property
    def model(self) -> DistributedDataParallel | None:
        """The DDP model that the hook is on, which `rewrap` replaces; None if that model was deleted."""
        return self._attachment.model()

    @property
    def is_closed(self) -> bool:
        """True if the hook was closed and cannot train the model any more."""
        return self._engine.is_closed

    def is_on(self, model: nn.Module) -> bool:
        """Returns True for the model that the hook was registered on, and False for copies of it."""
        return self._attachment.model() is model

    def _attach(self, model: DistributedDataParallel, *, is_countable: bool) -> None:
        """Register the hook on a model; the hook is closed when that model is deleted.

        ``is_countable``: see `PlainPath`.
        """
        steering = self._steering
        ranks = self._engine.world_size
        if steering is not None:
            steering.clock.watch(model)
        if model.find_unused_parameters:
            tables = tables_of(model.module, ignored=model.parameters_to_ignore)
            fill_missing_gradients(model, tables.values())
        model.register_comm_hook(self, gqsgd_hook)
        plain = None
        if steering is not None and steering.trials is not None and ranks > 1:  # else there are no steps to compare
            needs = {
                'bits="auto"': steering.gauge,
                "sparse gradients": self._sparse,
                "post-local SGD": self._post_local_sgd,
                "sums through shared memory, which plain DDP does not have": self._adds_in_memory(model) or None,
            }
            why = "; ".join(name for name, value in needs.items() if value is not None) or obstacle(model)
            steering.permit_plain(why)
            if not why:
                plain = PlainPath(model, self._engine, steering, self._steps, is_countable=is_countable)
        remembers = self.config.remembers
        self._attachment = Attachment(model, self._parameters, ranks=ranks, remembers=remembers, plain=plain)
        self._parameters.remembered |= {entry.number for entry in self._attachment.trained.parameters if not entry.raw}
        model.register_forward_pre_hook(before_forward)
        # Also at exit: Gloo groups that are still open then can abort the process.
        self._ends_with = weakref.finalize(model, self.close)

    def _adds_in_memory(self, model: DistributedDataParallel) -> bool:
        """Returns whether this hook's own sums of uncompressed gradients are faster than those of plain DDP."""
        sizes = [p.numel() * p.element_size() for p in model.parameters() if p.requires_grad]
        return sum(sizes) >= LEAST_IN_MEMORY and self._engine.communicator.adds_in_memory(dtypes_of(model)[0])

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the hook, plain values and tensors. A run that resumes from it gives the same bits.

        Without a memory, the state is equal on all ranks, and this is no collective. With a memory, every rank has to
        call this. Only rank 0 gets the memory of all ranks (tensors [ranks, numel] by kind and parameter number), so
        save the state of rank 0.
        """
        state: dict[str, Any] = {"schema": checkpoint.STATE_SCHEMA, "seed": self.config.seed, "step": self.step}
        state["config"] = self.requested.to_dict()
        if self._post_local_sgd is not None:
            state["post_local_iter"] = self._post_local_sgd.iter
        if self._steering is not None:
            # While plain DDP carries the gradients, a comparison that is under way is for its next step to read.
            self._steering.receive({} if self._steering.is_plain else self._engine.agreed(at_once=True))
            state["auto"] = self._steering.state()
        if not self.config.remembers:
            return state
        return {**state, checkpoint.MEMORY_LAYOUT: self._store.layout, "memory": self._all_memory()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, so that the dither and the memory continue. Every rank has to load the state of rank 0.

        This is no collective. If the state has no memory, or comes from a different number of ranks, the memory starts
        empty, and a warning says so. If ranks load different states, the next backward pass raises ConfigError on all
        of them.

        Raises:
            ConfigError: if ``state`` is not a state of a hook, has another schema, or belongs to a model with other
                parameters.
        """
        checkpoint.check_state(state, self.requested)
        loaded: list[str | int] = []
        if self._steering is not None:
            self._steering.resume(state.get("auto"))
        if self.config.remembers:
            numbers = checkpoint.take_memory(self._store, state, self._engine.rank, self._engine.world_size)
            if numbers is not None:
                checkpoint.say_what_is_missing(self._attachment.trained.parameters, numbers)
                self._parameters.remembered |= numbers
            loaded.append(checkpoint.memory_digest(state))
        self._configs = tuple(replace(config, seed=state["seed"]) for config in self._configs)
        self._requested = replace(self._requested, seed=state["seed"])
        self.step = state["step"]
        if self._steering is not None:
            self._engine.agreed()  # nobody is told of the steps before
            self._steering.reseed(state["seed"])
            self._configs = (self._steering.config,)
        if self._post_local_sgd is not None:
            self._post_local_sgd.iter = state.get("post_local_iter", self._post_local_sgd.iter)
            loaded.append(self._post_local_sgd.iter)
        if loaded:  # seed and step of states may be equal where these are not
            self._digest = digest_of(f"{digest_of_facts(self._facts)} {loaded}")
        self._engine.plans.clear()

    def _all_memory(self) -> dict[str, dict[int, Tensor]] | None:
        # A rank that calls this alone would send rows where others send stamps, which aborts Gloo.
        with self._meeting("state_dict") as meeting:
            (key,) = meeting.agree([{"parameters": digest(sorted(self._parameters.remembered))}])
        if not self.is_closed:
            return checkpoint.gathered_memory(self._engine.communicator, self._store, self._parameters.remembered)
        # Lightning closes the hook before users save a model that has been fitted.
        with closing(Communicator(self._device, self._group, key, self._timeout)) as communicator:
            return checkpoint.gathered_memory(communicator, self._store, self._parameters.remembered)

    # --- reports -----------------------------------------------------------------------------------------------------

    def report(self) -> str:
        """Returns one line that says what is compressed, to how many bits and by which reducer, and what is sent
        uncompressed. With ``auto`` or ``bits="auto"``, it also has the allowed numbers of bits, their average so far,
        and the latest decision."""
        ranks = self._engine.world_size
        tables = frozenset() if self._sparse is None else self._sparse.numbers
        if self._steering is not None and ranks > 1:
            text = self._steering.report(ranks)
        else:
            dense = [parameter for parameter in self._attachment.trained.parameters if parameter.number not in tables]
            text = report(self.requested, self._configs, dense, ranks, self.step, has_tables=bool(tables))
        text += self._note
        return text if self._sparse is None or ranks == 1 else f"{text}; {self._sparse.describe(self._configs)}"

    def summary(self) -> dict[str, float]:
        """Returns bytes, bits, errors and waiting times since the hook was created, by name (see `report.summary`)."""
        return summary(self.telemetry, ring_bytes_in_fp32(self.telemetry.buckets.values(), self._engine.world_size))

    def summary_line(self) -> str:
        """Returns the summary as one line: bytes compared with fp32, bits, error, and the share of time spent
        waiting."""
        return in_words(self.summary())

    def announce(self, say: Callable[[str], None]) -> None:
        """Call ``say`` on rank 0 with the `report` now, and with each later decision of ``auto`` or ``bits="auto"``.

        ``say`` must not hold a reference to the model, because the model would then never be freed.
        """
        if self._steering is not None:
            self._steering.announce(say)
        if self._engine.rank == 0:
            say(self.report())

    def close(self) -> None:
        """Release threads and process groups. After that, the hook cannot train the model any more."""
        self._attachment.close()
        self._engine.close()

    def _meeting(self, purpose: str) -> Meeting:
        return Meeting(purpose, [self._group], patience_of(self._timeout, self._group, self._device))


def before_forward(model: nn.Module, inputs: Any) -> None:
    """Forward pre-hook of DDP models: calls `GQSGDState.before_forward`, or warns that the model is a copy."""
    if torch.compiler.is_compiling():
        return
    if getattr(model, "_gqsgd_was_replaced", False) and model.training and torch.is_grad_enabled():
        raise ConfigError(
            "this DistributedDataParallel model is not used any more, because rewrap has wrapped its module anew, and "
            "may not average all that is trained now: keep and train what rewrap has returned, `model = "
            "state.rewrap(DistributedDataParallel)`"
        )
    for _, state in getattr(model, "_comm_hooks", ()):
        if isinstance(state, GQSGDState) and isinstance(model, DistributedDataParallel) and state.is_on(model):
            state.before_forward(model)
            return
    say_if_detached(model, inputs)


def gqsgd_hook(state: GQSGDState, bucket):  # type: ignore[no-untyped-def]  # DDP rejects annotations that are strings
    """Reduce a bucket: the communication hook that DDP calls (see `GQSGDState.reduce`)."""
    return state.reduce(bucket)


def register_gqsgd(
    model: DistributedDataParallel,
    preset: str | GQSGDConfig | None = None,
    *,
    timeout: timedelta | None = None,
    post_local_sgd: PostLocalSGDState | None = None,
    **fields: Unpack[FieldArguments],
) -> GQSGDState:
    """Compress the gradient all-reduce of a DDP model.

    This is a collective on the model's process group: every rank has to call it. Returns the state of the hook, which
    has counters, checkpoints and `close`.

    Args:
        model: the DDP model, before its first backward pass.
        preset: name of a preset (see `presets.PRESETS`), or a configuration.
        timeout: timeout of collectives. None takes that of the model's process group.
        post_local_sgd: torch's state of post-local SGD. From its ``start_localSGD_iter`` on, torch's
            `post_localSGD_hook` averages gradients, uncompressed in its subgroup or not at all. You have to average the
            model yourself.
        **fields: fields of `GQSGDConfig`.

    Raises:
        ConfigError: if the configuration or the model cannot work, or if ranks do not agree. If one rank refuses, all
            ranks raise.
        CollectiveError: if not all ranks call this within the timeout.
    """
    check_is_ddp(model)
    patience = patience_of(timeout, parent_group(model.process_group), device_of(model))
    with Meeting("register_gqsgd", [model.process_group], patience) as meeting:
        config = make_config(preset, **fields)
        return GQSGDState(model, config, timeout, post_local_sgd, meeting)
